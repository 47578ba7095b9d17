"""An app can write the name of everything that it is given, with `import Shardmill` alone, and sees nothing else."""

from __future__ import annotations

import re

from .programs import ROOT

SOURCES = ROOT / "swift" / "Sources"
INNER = ("Decode", "Text", "CoreML", "Pipe")  # Shardmill's own modules; an app imports none of them
KIND = r"(?:final )?(class|struct|enum|actor|protocol)"


def test_what_is_public_beneath_is_a_name_that_the_product_exports() -> None:
    exported = re.findall(
        r"^@_exported import (\w+) (\w+)\.(\w+)$", (SOURCES / "Shardmill/Model.swift").read_text(), re.MULTILINE
    )
    public = []
    for module in INNER:
        for file in sorted((SOURCES / module).glob("*.swift")):
            found = re.findall(rf"^public {KIND} (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
            public += [(kind, f"Shardmill{module}", name) for kind, name in found]
    assert sorted(public) == sorted(exported)
    assert len(public) > 10


def test_functions_and_extensions_beneath_are_not_public_by_themselves() -> None:
    loose = [
        f"{file.relative_to(ROOT)}: {line}"
        for module in INNER
        for file in sorted((SOURCES / module).glob("*.swift"))
        for line in re.findall(r"^public (?:func|let|var|extension|typealias) .*", file.read_text(), re.MULTILINE)
    ]
    assert loose == []


def test_files_to_copy_see_what_an_app_sees() -> None:
    """Their targets are in the package on Linux, where `package` names would be theirs, too."""
    manifest = (ROOT / "Package.swift").read_text(encoding="utf-8")
    targets = re.findall(r"\.target\((?:[^()]|\([^()]*\))*?swift/Examples(?:[^()]|\([^()]*\))*\)", manifest)
    assert len(targets) == 5
    assert [target for target in targets if "packageAccess: false" not in target] == []
    examples = [*(ROOT / "swift" / "Examples").rglob("*.swift")]
    texts = "".join(file.read_text(encoding="utf-8") for file in examples)
    modules = set(re.findall(r"^import (Shardmill\w*)", texts, re.MULTILINE))
    assert modules == {"Shardmill"}
