"""Where a package's specification is: one guard for everyone who opens a package."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files import compare
from portable_coreml.files.bundle import compile_model, load_model
from portable_coreml.judge.lint import lint
from portable_coreml.proxy import MLModelProxy

from tests.conftest import step_inputs

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
