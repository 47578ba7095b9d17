"""What several tests of packages share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardmill.convert import trace


@pytest.fixture
def unchecked() -> Iterator[None]:
    """coremltools makes what a package is compared with, and does not check its own program after each pass."""
    with trace.hurried():
        yield
