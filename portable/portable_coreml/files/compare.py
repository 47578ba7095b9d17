"""Compares two compiled bundles of one package, file by file."""

from __future__ import annotations

import difflib
import filecmp
from dataclasses import dataclass
from pathlib import Path

from portable_coreml.errors import ProgramError
from portable_coreml.files.bundle import frame, is_bundle, read_core_data


@dataclass(frozen=True)
class BundleDifference:
    """One file in which two compiled bundles differ, and how."""

    file: str
    what: str


def compare_compiled(first: Path, second: Path) -> tuple[BundleDifference, ...]:
    """How two compiled bundles of one package differ, apart from buildInfo and the order of map entries.

    For the first person who has both compilers: `coremlc`'s bundle and ours should give no difference. Raises
    ProgramError if one of the two is not a bundle.
    """
    for bundle in (first, second):
        if not is_bundle(bundle):
            raise ProgramError(f"{bundle} is not a compiled bundle; give an .mlmodelc folder")
    found = {p.relative_to(b) for b in (first, second) for p in b.rglob("*") if p.is_file()}
    names = sorted(str(name) for name in found if not name.name.startswith("."))  # Snakemake's mark, the Finder's
    return tuple(BundleDifference(name, what) for name in names if (what := _compare_file(name, first, second)))


def _compare_file(name: str, first: Path, second: Path) -> str:
    one, two = first / name, second / name
    if not one.is_file() or not two.is_file():
        return f"only in {(first if one.is_file() else second).name}"
    if name == "metadata.json" or filecmp.cmp(one, two, shallow=False):
        return ""
    if name == "model.mil":
        return _compare_text(*(path.read_text(encoding="utf-8", errors="replace") for path in (one, two)))
    if name == "coremldata.bin" and read_core_data(one) == read_core_data(two):
        return _compare_frames(frame(one), frame(two))
    return f"{one.stat().st_size} and {two.stat().st_size} bytes, not the same"


def _compare_frames(one: tuple[bytes, bytes], two: tuple[bytes, bytes]) -> str:
    """Headers and trailers of two coremldata.bin whose descriptions are equal."""
    for what, mine, theirs in zip(("headers", "trailers"), one, two, strict=True):
        if mine != theirs:
            at = next(i for i in range(len(mine) + 1) if mine[: i + 1] != theirs[: i + 1])
            pair = " and ".join(side[at : at + 1].hex() or "nothing" for side in (mine, theirs))
            return f"the {what} differ, first at their byte {at}: {pair}"
    return ""


def _compare_text(one: str, two: str) -> str:
    texts = [text.rstrip("\n").split("\n") for text in (one, two)]
    mine, theirs = ([line for line in lines if not line.startswith("[buildInfo")] for lines in texts)
    changed = [line for line in difflib.unified_diff(mine, theirs, lineterm="", n=0) if line[:1] in "+-"][2:]
    return "" if not changed else f"{len(changed)} lines differ, the first: {changed[0][:200]}"
