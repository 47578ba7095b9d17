"""Stamped conversion: coremltools converts one layer of each kind, and every part is composed from the result.

Layers of one kind share one graph, and only their weights differ. So a part's program is stamped from the templates of
its layers' kinds. Each matrix gets its form, and the weights are streamed from the checkpoint into the weight file.
coremltools alone gives the same package in normal form, byte for byte, with one exception. It drops or merges some
operations because of a weight's values: a norm weight of nothing but ones, or two layers with the same norm weight.
Here programs never depend on weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coremltools.proto import MIL_pb2

from shardmill.convert import stream, template
from shardmill.convert.codes import Codes
from shardmill.convert.package import (
    HALF,
    WEIGHT_FILE,
    StampError,
    call,
    canonicalize,
    copied,
    main_block,
    main_function,
    named_arguments,
    weight_sites,
)
from shardmill.convert.placing import fill_inline, place
from shardmill.forms.form import FP16, Form, form, spread
from shardmill.models.contract import GraphSpec
from shardmill.models.interface import ENUMERATED, FIXED, MAIN
from shardmill.models.part_kinds import stem
from shardmill.plan import Part


def convert_stamped(
    part: Part,
    source: Path,
    forms: str | Mapping[str, str],
    path: Path,
    cache: Path | None = None,
    threads: int = 1,
    codes: Path | None = None,
) -> None:
    """Write the canonical .mlpackage of a part at `path`, which must not exist.

    Args:
        part: the part.
        source: the checkpoint's folder.
        forms: the forms of the part's matrices by path, or one form for all.
        path: where the package goes.
        cache: a folder in which templates are kept between processes.
        threads: how many threads encode weights.
        codes: a file of codes (convert/codes.py) to use instead of rounding to nearest.

    Raises:
        CheckpointError: for a weight that fp16 can't hold.
        StampError: for a graph that can't be stamped. The caller must remove the files written until then.
        ShardmillError: for codes that do not fit the part.
    """
    import coremltools as ct

    chosen = spread(forms, part.shapes)
    by_name = dict(by_function(part.spec)) or {MAIN: part.spec}
    specs = {name: template.program(one, cache) for name, one in by_name.items()}
    known = Codes(codes, part, chosen) if codes else None
    for each in specs.values():
        set_forms(each, chosen)
        fill_inline(each, part, source, known)
    spec, *others = specs.values()
    blobs, contents = place(spec, part, chosen, known)
    if part.spec.calls.shapes == FIXED:
        share_places(spec, others)
        spec = _combined(specs)
    if part.spec.calls.shapes == ENUMERATED:
        enumerate_shapes(spec, part.spec.calls.widths)
    with tempfile.TemporaryDirectory() as empty:
        ct.utils.save_spec(spec, str(path), weights_dir=empty)
    stream.write_weights(path / WEIGHT_FILE, blobs, contents, source, threads)
    canonicalize(path)


def set_forms(spec: Any, forms: Mapping[str, str]) -> None:
    """Give the matrices of a program their forms, in place.

    Args:
        spec: a program whose weights are all constants of fp16.
        forms: the forms of its matrices, by path.
    """
    wanted = {f"{stem(path)}{HALF}": form(name) for path, name in forms.items() if name != FP16}
    renamed: dict[str, str] = {}
    for operation in main_block(spec).operations:
        old = operation.outputs[0].name if operation.outputs else ""
        if old in wanted:
            _set_form(operation, wanted[old])
            renamed[old] = operation.outputs[0].name
        for _, argument in named_arguments(operation):
            argument.name = renamed.get(argument.name, argument.name)
    if wanted:
        spec.mlProgram.ClearField("attributes")  # coremltools' own compression drops the record of the build's tools


def _set_form(operation: Any, wanted: Form) -> None:
    """Turn a constant of fp16 into the operation that expands a matrix of another form."""
    name, data = operation.outputs[0].name, copied(operation.attributes["val"])
    beside = copied(data)
    del operation.attributes["val"]
    rows, *others = (dimension.constant.size for dimension in data.type.tensorType.dimensions)
    ones = [1] * len(others)
    if wanted.kind == "int":
        operation.type, keys, ending = "constexpr_blockwise_shift_scale", ("data", "scale"), "_quantized"
        _retyped(data, f"INT{wanted.bits}")
        _reshaped(beside, (rows, *ones))
    else:
        operation.type, keys, ending = "constexpr_lut_to_dense", ("indices", "lut"), "_palettized"
        _retyped(data, f"UINT{wanted.bits}")
        _reshaped(beside, (wanted.tables(rows), *ones, 2**wanted.bits, 1))
    for key, value in zip(keys, (data, beside), strict=True):
        operation.inputs[key].arguments.add().value.CopyFrom(value)
    call(operation, f"{name}{ending}")


def _retyped(value: Any, dtype: str) -> None:
    """Set the type of the numbers of a protobuf value."""
    value.type.tensorType.dataType = getattr(MIL_pb2, dtype)


def _reshaped(value: Any, shape: tuple[int, ...]) -> None:
    """Set the shape of a protobuf value."""
    kind = value.type.tensorType
    kind.rank = len(shape)
    del kind.dimensions[:]
    for size in shape:
        kind.dimensions.add().constant.size = size


def by_function(part_spec: GraphSpec) -> Iterator[tuple[str, GraphSpec]]:
    """Yield the spec of each function of a part of fixed shapes, by the function's name.

    It is the part's spec, except for the width and, in a shorter context, the slots.
    """
    calls = part_spec.calls
    if calls.shapes != FIXED:
        return
    for slots, names in {part_spec.slots: calls.functions, **calls.shorter}.items():
        for width, name in names.items():
            alone = replace(calls, widths=(width,), contexts=())
            yield name, replace(part_spec, slots=slots, tokens=width, calls=alone)


def share_places(placed: Any, others: Iterable[Any]) -> None:
    """Give the weights of programs the same places in the weight file as the weights of another program.

    Raises:
        StampError: if the programs do not have the same weights.
    """
    known = {name: [value.blobFileValue.offset for value in values] for name, values in weight_sites(placed)}
    for spec in others:
        sites = dict(weight_sites(spec))
        if {name: len(values) for name, values in sites.items()} != {name: len(at) for name, at in known.items()}:
            strange = sorted({*sites} ^ {*known})
            raise StampError(f"{strange[:1]}: a weight that another function does not have")
        for name, values in sites.items():
            for value, offset in zip(values, known[name], strict=True):
                value.blobFileValue.offset = offset


def _combined(specs: Mapping[str, Any]) -> Any:
    """Combine models of one function each into one Model_pb2.Model, as coremltools' save_multifunction does.

    Args:
        specs: the models, by the name of their function in the result; the first is the default.
    """
    first = next(iter(specs.values()))
    made = type(first)(specificationVersion=first.specificationVersion)
    made.mlProgram.version = first.mlProgram.version
    for name, spec in specs.items():
        made.mlProgram.functions[name].CopyFrom(main_function(spec))
        described = made.description.functions.add(name=name)
        for field in ("input", "output", "state"):
            getattr(described, field).extend(getattr(spec.description, field))
    made.description.defaultFunctionName = next(iter(specs))
    made.description.metadata.SetInParent()
    return made


def enumerate_shapes(spec: Any, widths: Sequence[int]) -> None:
    """Describe the inputs of a Model_pb2.Model with a range of T by their shapes at these widths, in place."""
    for feature in spec.description.input:
        array = feature.type.multiArrayType
        ranges = [(bounds.lowerBound, bounds.upperBound) for bounds in array.shapeRange.sizeRanges]
        if all(low == high for low, high in ranges):  # a cache
            continue
        for width in widths:
            shape = [low if low == high else width for low, high in ranges]
            array.enumeratedShapes.shapes.add(shape=shape)
