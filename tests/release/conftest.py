import shutil
from functools import partial
from pathlib import Path

import pytest
import shared
from pipeline import made

from shardmill.release.sign import sign_build

from .signed import Keys, make_keys


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A finished build that nobody signed."""
    return made.finish(tmp_path / "build")


@pytest.fixture
def keys() -> Keys:
    folder = shared.once("keys", partial(make_keys, name="builder"))
    return Keys(folder / "builder.key", folder / "builder.pub")


@pytest.fixture
def signed(build: Path, keys: Keys) -> Path:
    """The same build, signed once in a run of all tests."""

    def sign(folder: Path) -> None:
        shutil.copytree(build.parent, folder / "build", symlinks=True)
        sign_build(folder / "build" / build.name, keys.private)

    folder = shared.once("signed", sign)
    shutil.rmtree(build.parent)
    shutil.copytree(folder / "build", build.parent, symlinks=True)
    return build


@pytest.fixture
def others(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys", "other")
