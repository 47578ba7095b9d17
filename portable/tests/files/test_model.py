"""Where a package's specification is, and what is read at all: one guard for everyone who opens a package.

Only regular files are read: a device has no end, and a pipe without a writer never begins.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files import compare
from portable_coreml.files.bundle import compile_model, load_model
from portable_coreml.files.compare import compare_compiled
from portable_coreml.files.model import read_json
from portable_coreml.judge.lint import lint, read_report
from portable_coreml.proxy import MLModelProxy

from tests.conftest import PATIENCE, step_inputs

READERS: dict[str, Callable[[Path], Any]] = {
    "load": load_model,
    "inspect": compare.read_contents,
    "lint": lint,
    "compile": lambda path: compile_model(path, path.with_suffix(".mlmodelc")),
}


def rewrite(package: Path, path: str) -> None:
    """Lets a package's manifest name another specification."""
    manifest = package / "Manifest.json"
    content = json.loads(manifest.read_text())
    content["itemInfoEntries"][content["rootModelIdentifier"]]["path"] = path
    manifest.write_text(json.dumps(content))


@pytest.mark.parametrize("reader", sorted(READERS))
@pytest.mark.parametrize("kind", ["relative", "absolute"])
def test_no_reader_follows_a_manifest_out_of_its_package(
    attention_package: Path, tmp_path: Path, reader: str, kind: str
) -> None:
    """The file outside is a sound model: it is refused for where it is, not for what it holds."""
    package = Path(shutil.copytree(attention_package, tmp_path / "m.mlpackage"))
    outside = Path(shutil.copy(next(package.rglob("*.mlmodel")), tmp_path / "outside.mlmodel"))
    rewrite(package, "../../outside.mlmodel" if kind == "relative" else str(outside))
    with pytest.raises(ProgramError, match="its manifest points outside the package"):
        READERS[reader](package)


@pytest.mark.parametrize("reader", sorted(READERS))
def test_a_manifest_nested_without_end_is_one_line(attention_package: Path, tmp_path: Path, reader: str) -> None:
    package = Path(shutil.copytree(attention_package, tmp_path / "m.mlpackage"))
    (package / "Manifest.json").write_text("[" * 100_000)
    with pytest.raises(ProgramError, match=r"Manifest\.json: damaged: its JSON is nested too deeply$"):
        READERS[reader](package)


@pytest.mark.parametrize("reader", sorted(READERS))
def test_a_name_that_no_file_can_have_is_one_line(tmp_path: Path, reader: str) -> None:
    with pytest.raises(ProgramError, match="no such file or folder"):
        READERS[reader](tmp_path / ("m" * 5000))


def test_a_package_of_symbolic_links_is_read_and_compiled(attention_package: Path, tmp_path: Path) -> None:
    """As the Hugging Face cache keeps it: every file is a relative link to a blob outside the package."""
    package, blobs = tmp_path / "snapshot" / "m.mlpackage", tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(path for path in attention_package.rglob("*") if path.is_file())):
        shutil.copy(file, blobs / str(number))
        link = package / file.relative_to(attention_package)
        link.parent.mkdir(parents=True, exist_ok=True)
        ups = len(link.parent.relative_to(tmp_path).parts)
        link.symlink_to(Path(*[".."] * ups) / "blobs" / str(number))
    bundle = compile_model(package, tmp_path / "elsewhere" / "deep" / "m.mlmodelc")
    data = step_inputs(32, 8, 0, 1, 0)
    expected = MLModelProxy(str(attention_package)).predict(dict(data))["hidden"]
    for path in (package, bundle):
        np.testing.assert_array_equal(MLModelProxy(str(path)).predict(dict(data))["hidden"], expected)


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A reader that waits for a pipe fails instead of blocking all tests."""

    def stop(*_: object) -> None:
        raise TimeoutError("still reading")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(int(PATIENCE))
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", [*sorted(READERS), "diff-residency"])
def test_devices_and_pipes_are_refused(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "linked").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "linked", tmp_path / "pipe"):
        with pytest.raises(ProgramError, match=f"^{path}: not a regular file$"):
            read_report(path, "predicted") if reader == "diff-residency" else READERS[reader](path)


def test_a_package_whose_specification_is_a_pipe_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "m.mlpackage"
    (package / "Data").mkdir(parents=True)
    (package / "Manifest.json").write_text('{"itemInfoEntries": {"i": {"path": "m"}}, "rootModelIdentifier": "i"}')
    os.mkfifo(package / "Data" / "m")
    for reader in READERS:
        with pytest.raises(ProgramError, match="Data/m: not a regular file"):
            READERS[reader](package)


def test_what_is_compared_are_bundles(tmp_path: Path) -> None:
    """A device or a pipe in the place of a bundle, or of the file that makes a folder one, is no bundle."""
    (tmp_path / "m.mlmodelc").mkdir()
    os.mkfifo(tmp_path / "m.mlmodelc" / "coremldata.bin")
    for path in (Path("/dev/zero"), tmp_path / "m.mlmodelc"):
        with pytest.raises(ProgramError, match=f"^{path} is not a compiled bundle"):
            compare_compiled(path, path)


BAD_JSON = {
    "nested without end": ("[" * 100_000, "damaged: its JSON is nested too deeply"),
    "cut": ('{"rows": [', "damaged: not JSON"),
    "of another encoding": ("\udcff", "not UTF-8"),
}


@pytest.mark.parametrize("what", sorted(BAD_JSON))
def test_json_that_is_none_is_one_line(tmp_path: Path, what: str) -> None:
    text, message = BAD_JSON[what]
    (tmp_path / "report.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ProgramError, match=message) as error:
        read_json(tmp_path / "report.json")
    assert "\n" not in str(error.value)
