"""Only regular files are read: a device has no end, and a pipe without a writer never begins."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files import compare
from portable_coreml.files.bundle import compile_model, load_model
from portable_coreml.files.compare import compare_compiled
from portable_coreml.files.regular import read_json
from portable_coreml.judge.lint import lint, read_report

READERS: dict[str, Callable[[Path], Any]] = {
    "load": load_model,
    "inspect": compare.read_contents,
    "lint": lint,
    "compile": lambda path: compile_model(path, path.with_suffix(".mlmodelc")),
    "diff-residency": lambda path: read_report(path, "predicted"),
}


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A reader that waits for a pipe fails instead of blocking all tests."""

    def stop(*_: object) -> None:
        raise TimeoutError("still reading")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", sorted(READERS))
def test_devices_and_pipes_are_refused(tmp_path: Path, reader: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "linked").symlink_to("/dev/null")
    for path in (Path("/dev/null"), tmp_path / "linked", tmp_path / "pipe"):
        with pytest.raises(ProgramError, match=f"^{path}: not a regular file$"):
            READERS[reader](path)


def test_a_package_whose_specification_is_a_pipe_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "m.mlpackage"
    (package / "Data").mkdir(parents=True)
    (package / "Manifest.json").write_text('{"itemInfoEntries": {"i": {"path": "m"}}, "rootModelIdentifier": "i"}')
    os.mkfifo(package / "Data" / "m")
    for reader in ("load", "inspect", "lint", "compile"):
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
