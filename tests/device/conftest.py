"""One finished build and its kit for all tests of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.device.kit import write_kit

from .finished import finished
from .measuring import unpacked


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build of a tiny model."""
    return finished(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def packed(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its kit."""
    target = tmp_path_factory.mktemp("kit") / "kit.zip"
    write_kit([build], target)
    return target


@pytest.fixture
def kit(packed: Path, tmp_path: Path) -> Path:
    """The kit unpacked."""
    return unpacked(packed, tmp_path)
