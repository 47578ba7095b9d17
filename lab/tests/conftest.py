"""What tests of the lab share with those of the product: a small built model, and marks for what limits judge."""

from __future__ import annotations

from collections.abc import Iterator

import portable_coreml
import pytest
import tiny
from limits import pytest_collection_modifyitems as pytest_collection_modifyitems


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """The tied checkpoint in three layers parts and two head slices."""
    return tiny.build(tmp_path_factory.mktemp("tied"))


@pytest.fixture
def fp32() -> Iterator[None]:
    """The portable engine in fp32, where this is no Mac."""
    portable_coreml.install(precision="fp32")
    yield
