from pathlib import Path

import pytest
from pipeline import made

from .signed import Keys, make_keys


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A finished build that nobody signed."""
    return made.finish(tmp_path / "build")


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys", "builder")


@pytest.fixture
def others(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys", "other")
