"""Every public declaration of the Swift package is explained, and DocC makes pages of the explanations."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from processes import succeeded

from .programs import ROOT, SCRIPTS, SWIFT

pytestmark = pytest.mark.slow
MODULES = ("Shardmill", "ShardmillDecode", "ShardmillText")  # nothing of the others is public, see test_access.py


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of web pages that docs.sh writes; it leaves the symbols in .build."""
    found = os.pathsep.join([*filter(None, [os.environ.get(SWIFT)]), os.environ["PATH"]])
    if missing := [tool for tool in ("swift", "docc") if not shutil.which(tool, path=found)]:
        pytest.skip(f"there is no {' and no '.join(missing)}: install it, or set {SWIFT} (.ci/install-swift)")
    folder = tmp_path_factory.mktemp("docs") / "pages"
    command = [str(SCRIPTS / "docs.sh"), str(folder)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"PATH": found}, cwd=ROOT
    )
    succeeded(done)
    return folder


def symbols(module: str) -> list[dict[str, Any]]:
    """The public declarations of a module."""
    (file,) = (ROOT / ".build").glob(f"*/symbolgraph/{module}.symbols.json")
    found: list[dict[str, Any]] = json.loads(file.read_text())["symbols"]
    return found


def test_every_public_declaration_is_explained(pages: Path) -> None:
    found = [symbol for module in MODULES for symbol in symbols(module)]
    assert len(found) > 100
    assert [".".join(symbol["pathComponents"]) for symbol in found if "docComment" not in symbol] == []


def test_every_module_has_pages(pages: Path) -> None:
    assert (pages / "index.html").is_file()
    for module in MODULES:
        page = json.loads((pages / "data" / "documentation" / f"{module.lower()}.json").read_text())
        assert page["metadata"]["title"] == module and page["topicSections"]


def test_the_code_of_the_page_compiles(pages: Path) -> None:
    code = re.findall(r"```swift\n(import .*?)```", (ROOT / "docs" / "swift.md").read_text(), re.DOTALL)
    assert len(code) == 1
    # Foundation on Linux has no URL.applicationSupportDirectory.
    app = code[0].replace("URL.applicationSupportDirectory", 'URL(fileURLWithPath: "/")')
    app += "print(ShardmillError.self, ShardmillOptions().sampling == Sampling())\n"
    (ROOT / ".build" / "page.swift").write_text(app)  # some ways to run Swift see no other folder
    swift = shutil.which("swift", path=os.pathsep.join([os.environ.get(SWIFT, ""), os.environ["PATH"]]))
    assert swift
    command = [swift, "-frontend", "-typecheck", "-swift-version", "6", "-warnings-as-errors"]
    command += ["-I", ".build/debug/Modules", ".build/page.swift"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    succeeded(done)
