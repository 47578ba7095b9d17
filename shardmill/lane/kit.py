"""An unpacked kit: the content of kit.json, and a check that every file is the one that was packed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CORE_ML_TOOLS = "9.0"
NATIVE = "coremltools.libcoremlpython"
HOW = "python3.12 -m venv .venv && .venv/bin/pip install coremltools==9.0 numpy && .venv/bin/python measure.py"
PATIENCE = 600.0  # seconds that the first import of coremltools may take


def lacking(script: Path, engine: str | None) -> str:
    """Return in one line why this Python can't measure, and the remedy; "" if it can.

    Args:
        script: measure.py.
        engine: module that takes Core ML's place, or None.
    """
    why = _why(engine)
    if not why:
        return ""
    python = script.parent / ".venv/bin/python"
    other = python.is_file() and Path(sys.prefix).resolve() != python.parents[1].resolve()
    return f"{sys.executable}: {why}; {f'use {python} {script.name}' if other else HOW}"


def _why(engine: str | None) -> str:
    """Return what is missing or does not work."""
    try:
        found = version("coremltools")
    except PackageNotFoundError:
        found = ""
    for name in ("numpy", "coremltools"):
        if find_spec(name) is None:
            return f"{name} is not installed for this Python {sys.version.split()[0]}"
    if found.split(".")[:1] != CORE_ML_TOOLS.split(".")[:1]:
        return f"coremltools is {found or 'of no known version'}, and {CORE_ML_TOOLS} is needed"
    wanted = engine or NATIVE  # in a separate process, since importing a native module may end the process
    tried = subprocess.run(
        [sys.executable, "-c", f"import {wanted}"], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if tried.returncode:
        said = tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"]
        return f"{wanted} can't be imported ({said[-1]})"
    return ""


FORMAT = 1
KIT = "kit.json"
UNHINTED, CPU, PORTABLE = "unhinted", "cpu", "portable"  # ways to load a program besides its build's way


class LaneError(Exception):
    """An error in one line for the person who measures."""


@dataclass(frozen=True)
class Unit:
    """One program of a part, for some widths. A part has several if its widths are separate programs.

    Attributes:
        name: the part's name, with the program's index if there are several.
        part: the part as kit.json describes it.
        program: `path` of the package, `function` in it or null, `widths`, `fixed`, `weights` in bytes.
            Also `of`, if another variant has the same program; `alone`, if the function has a separate bundle;
            `reshape_frequency`, the hint of flexible shapes; `bundle`, the portable compiler's, file by file, or null.
        variant: the variant under whose name the program is compiled and measured.
    """

    name: str
    part: dict[str, Any]
    program: dict[str, Any]
    variant: str

    @property
    def called(self) -> str | None:
        """Return the function's name in the compiled program; None for the only one."""
        return None if self.program.get("alone") else self.program["function"]


@dataclass(frozen=True)
class Kit:
    """An unpacked kit.

    Attributes:
        folder: the folder of the kit.
        digest: sha256 of kit.json, which names the sha256 of every other file.
        content: the content of kit.json.
    """

    folder: Path
    digest: str
    content: dict[str, Any]

    @property
    def variants(self) -> dict[str, dict[str, Any]]:
        """Return the variants by name, in the kit's order."""
        return {variant["name"]: variant for variant in self.content["variants"]}

    def units(self, variant: str) -> dict[str, Unit]:
        """Return the programs of a variant by name, in the order of a pass."""
        found = {}
        for part in self.variants[variant]["parts"]:
            several = len(part["programs"]) > 1
            for place, program in enumerate(part["programs"]):
                name = f"{part['name']}.{place}" if several else part["name"]
                found[name] = Unit(name, part, program, program.get("of", variant))
        return found


def read_kit(folder: Path) -> Kit:
    """Read the kit in a folder. Raises LaneError if it is missing or has another format."""
    try:
        raw = (folder / KIT).read_bytes()
        content = json.loads(raw)
    except (OSError, ValueError, RecursionError) as error:
        raise LaneError(f"{folder / KIT} can't be read ({error}); unpack the kit again") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise LaneError(f"{folder / KIT} is not of format {FORMAT}; unpack the kit again")
    variants = content.get("variants")
    named = isinstance(variants, list) and all(isinstance(one, dict) and "name" in one for one in variants)
    if not named or not isinstance(content.get("files"), dict):
        raise LaneError(f"{folder / KIT} does not name variants and files; unpack the kit again")
    return Kit(folder, hashlib.sha256(raw).hexdigest(), content)


def check_kit(kit: Kit) -> None:
    """Raise LaneError, naming the first file that differs from the packed one."""
    for name, sha in kit.content["files"].items():
        path = kit.folder / name
        if not path.is_file():
            raise LaneError(f"{path} is missing; unpack the kit again")
        if _sha256(path) != sha:
            raise LaneError(f"{path} is not the file that was packed; unpack the kit again")


def _sha256(path: Path) -> str:
    known = hashlib.sha256()
    with open(path, "rb") as file:
        for block in _blocks(file):
            known.update(block)
    return known.hexdigest()


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(1 << 22):
        yield block
