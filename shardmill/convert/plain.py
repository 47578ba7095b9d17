"""Plain conversion: coremltools makes the whole package of a part."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

from shardmill.convert import blob, package, trace
from shardmill.convert.codes import Codes
from shardmill.convert.package import WEIGHT_FILE, by_function, save_combined
from shardmill.convert.placing import weight_sites
from shardmill.convert.stream import PrequantizedWeight, stream
from shardmill.convert.weights import PartWeights
from shardmill.errors import ShardmillError
from shardmill.forms.form import FP16, spread
from shardmill.models.contract import stem
from shardmill.models.interface import FIXED
from shardmill.plan import Part

RECORD = 64  # bytes of a blob's record; the blob's data follows


def convert_plain(
    part: Part, source: Path, forms: str | Mapping[str, str], path: Path, codes: Path | None = None
) -> None:
    """Write the canonical .mlpackage of a part at `path`, which must not exist; see `stamped.convert_stamped`.

    Also raises ShardmillError if coremltools leaves out a constant: one of two equal constants, or a gain of ones.
    """
    chosen = spread(forms, part.shapes)
    known = Codes(codes, part, chosen) if codes else None
    if part.calls.shapes == FIXED:
        _convert_functions(part, source, chosen, path)
    else:
        package.save(trace.convert(part, PartWeights(part, source), chosen), path)
    places = _places(path, part)
    if known:
        _impose(path, part, chosen, known, places)


def _convert_functions(part: Part, source: Path, forms: Mapping[str, str], path: Path) -> None:
    """Write the package of a part of fixed shapes, with all its functions."""
    with tempfile.TemporaryDirectory() as folder:
        packages = {name: Path(folder) / f"{name}.mlpackage" for name, _ in by_function(part)}
        for name, one in by_function(part):
            package.save(trace.convert(one, PartWeights(one, source), forms), packages[name])
        save_combined(packages, path)


def _places(path: Path, part: Part) -> dict[str, list[int]]:
    """Return where the data of each of a part's constants begins.

    Raises ShardmillError for a constant that the package lacks.

    No later check could tell whether such a constant is the checkpoint's.
    """
    places = {
        name: [value.blobFileValue.offset + RECORD for value in values]
        for name, values in weight_sites(package.load_spec(path))
    }
    gone = [name for name, shape in part.shapes.items() if stem(name) not in places and prod(shape) >= blob.SMALLEST]
    if gone:
        raise ShardmillError(
            f"{part.name}: coremltools leaves out {gone[0]}, which is equal to another constant or changes nothing: "
            "use `convert: {method: stamped}`"
        )
    return places


def _impose(path: Path, part: Part, forms: Mapping[str, str], codes: Codes, places: Mapping[str, list[int]]) -> None:
    """Overwrite the numbers of a package with codes."""
    contents: list[PrequantizedWeight] = []
    for constant, shape in part.shapes.items():
        contents += codes.contents(constant, forms.get(constant, FP16), shape, places.get(stem(constant), []))
    descriptor = os.open(path / WEIGHT_FILE, os.O_RDWR)
    try:
        stream(descriptor, contents, path, 1)
    finally:
        os.close(descriptor)
