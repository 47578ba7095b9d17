"""Compares two compiled bundles of one package, file by file."""

from __future__ import annotations

import difflib
import filecmp
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from portable_coreml.errors import ProgramError
from portable_coreml.files.bundle import frame, is_bundle, read_core_data
from portable_coreml.files.model import mil_program, parse_spec, spec_file


@dataclass(frozen=True)
class BundleDifference:
    """One file in which two compiled bundles differ, and how."""

    file: str
    what: str


def compare_compiled(first: Path, second: Path) -> tuple[BundleDifference, ...]:
    """Return how two compiled bundles of one package differ, apart from buildInfo and the order of map entries.

    For the first person who has both compilers: `coremlc`'s bundle and ours should give no difference. Raises
    ProgramError if one of the two is not a bundle.
    """
    for bundle in (first, second):
        if not is_bundle(bundle):
            raise ProgramError(f"{bundle} is not a compiled bundle; give an .mlmodelc folder")
    paths = {p.relative_to(b) for b in (first, second) for p in b.rglob("*") if p.is_file()}
    names = sorted(str(name) for name in paths if not name.name.startswith("."))  # Snakemake's mark, the Finder's
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
    """Return headers and trailers of two coremldata.bin whose descriptions are equal."""
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


@dataclass(frozen=True)
class ShownFeature:
    """An input, output or state. `shape` reads [1, 96, 1..4, 1] for a range, [1, 2] | [1, 4] for listed shapes."""

    name: str
    dtype: str
    shape: str


@dataclass(frozen=True)
class ShownFunction:
    """One function of a program; `operations` are (type, count), most frequent first, nested blocks included."""

    name: str
    opset: str
    inputs: tuple[ShownFeature, ...]
    outputs: tuple[ShownFeature, ...]
    states: tuple[ShownFeature, ...]
    operations: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Weights:
    """All tensors of one dtype that lie in weight files; a tensor that several operations share counts once."""

    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Contents:
    """What a package holds; `bytes` is its size on disk."""

    path: str
    specification: int
    bytes: int
    functions: tuple[ShownFunction, ...]
    weights: tuple[Weights, ...]


def read_contents(path: Path) -> Contents:
    """Return the contents of the .mlpackage or .mlmodel at `path`. Raises ProgramError if there is no ML Program."""
    if path.suffix == ".mlmodelc" or is_bundle(path):
        raise ProgramError(f"{path}: a compiled model; inspect the .mlpackage that it was compiled from")
    spec = parse_spec(spec_file(path))
    functions = mil_program(spec, path).functions
    try:
        described = tuple(_function(name, functions[name], spec.description) for name in sorted(functions))
        stored = weights(op for name in functions for op in operations(_block(functions[name])))
    except ValueError as error:  # protobuf lets any number through where a type's number belongs
        raise ProgramError(f"{path}: damaged: {error}") from error
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return Contents(
        path=str(path),
        specification=spec.specificationVersion,
        bytes=sum(file.stat().st_size for file in files),
        functions=described,
        weights=stored,
    )


def _function(name: str, function: Any, description: Any) -> ShownFunction:
    described = next((d for d in description.functions if d.name == name), description)
    counts = Counter(op.type for op in operations(_block(function)))
    return ShownFunction(
        name=name,
        opset=function.opset,
        inputs=features(described.input),
        outputs=features(described.output),
        states=features(described.state),
        operations=tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
    )


def features(described: Iterable[Any]) -> tuple[ShownFeature, ...]:
    """Return features of a model description."""
    return tuple(ShownFeature(feature.name, *_type(feature.type)) for feature in described)


def _type(kind: Any) -> tuple[str, str]:
    which = kind.WhichOneof("Type") or "unknown"
    if which == "stateType":
        kind, which = kind.stateType, kind.stateType.WhichOneof("Type")
        array = kind.arrayType
    elif which == "multiArrayType":
        array = kind.multiArrayType
    elif which == "imageType":
        return "image", f"[{kind.imageType.height}, {kind.imageType.width}]"
    else:
        return which.removesuffix("Type"), ""
    return type(array).ArrayDataType.Name(array.dataType).lower(), _shape(array)


def _shape(array: Any) -> str:
    flexibility = array.WhichOneof("ShapeFlexibility")
    if flexibility == "enumeratedShapes":
        return " | ".join(_joined(str(size) for size in shape.shape) for shape in array.enumeratedShapes.shapes)
    if flexibility == "shapeRange":
        return _joined(_bounds(size) for size in array.shapeRange.sizeRanges)
    return _joined(str(size) for size in array.shape) if array.shape else "not declared"


def _bounds(size: Any) -> str:
    if size.upperBound == size.lowerBound:
        return str(size.lowerBound)
    return f"{size.lowerBound}..{size.upperBound if size.upperBound >= 0 else ''}"  # -1: no upper bound


def _joined(sizes: Iterable[str]) -> str:
    return f"[{', '.join(sizes)}]"


def _block(function: Any) -> Any:
    return function.block_specializations[function.opset]


def operations(block: Any) -> Iterator[Any]:
    """Yield every operation of a block and of its nested blocks."""
    for op in block.operations:
        yield op
        for nested in op.blocks:
            yield from operations(nested)


def weights(ops: Iterable[Any]) -> tuple[Weights, ...]:
    """Return the tensors in weight files by dtype, largest first."""
    tensors = {(v.blobFileValue.fileName, v.blobFileValue.offset): v.type.tensorType for op in ops for v in _stored(op)}
    sizes: dict[str, list[int]] = {}
    for tensor in tensors.values():
        sizes.setdefault(_dtype(tensor), []).append(math.prod(d.constant.size for d in tensor.dimensions))
    rows = (
        Weights(dtype, len(counts), sum(counts), sum((count * _word_bits(dtype) + 7) // 8 for count in counts))
        for dtype, counts in sizes.items()
    )
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.dtype)))


def _stored(op: Any) -> Iterator[Any]:
    bound = (binding.value for argument in op.inputs.values() for binding in argument.arguments)
    return (value for value in (*op.attributes.values(), *bound) if value.WhichOneof("value") == "blobFileValue")


def _dtype(tensor: Any) -> str:
    from coremltools.proto import MIL_pb2

    return str(MIL_pb2.DataType.Name(tensor.dataType)).lower()


def _word_bits(dtype: str) -> int:
    """Return bits of one element, as the type's name says; a boolean takes a byte."""
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8
