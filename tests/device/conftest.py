"""One finished build and its kit for all tests of the folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import shared

from shardmill.device.kit import write_kit

from .finished import finished
from .measuring import measured, unpacked


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


@pytest.fixture(scope="session")
def sound(packed: Path) -> Path:
    """A folder with the kit, which a sound engine has measured."""

    def make(folder: Path) -> None:
        measured(unpacked(packed, folder))

    return shared.once("measured-kit", make)


@pytest.fixture
def measured_kit(sound: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(sound, tmp_path / "measured", symlinks=True)) / "shardmill-kit"
