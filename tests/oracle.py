"""What stamping is compared with: coremltools converts whole parts, then their programs get the normal form."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shardmill.convert import trace
from shardmill.convert.codes import Codes
from shardmill.convert.normal import STATE, WEIGHT, normal_form
from shardmill.convert.package import (
    MODEL_FILE,
    WEIGHT_FILE,
    canonicalize,
    load_spec,
    main_block,
    named_arguments,
    weight_sites,
)
from shardmill.convert.palette import histogram, indices, palette_table
from shardmill.convert.placing import inline_constants
from shardmill.convert.stacks import stack_inputs
from shardmill.convert.stamped import by_function, enumerate_shapes
from shardmill.convert.stream import PrequantizedWeight, stream
from shardmill.convert.template import WHOLE
from shardmill.convert.weights import PartWeights
from shardmill.forms.form import FP16, Form, form, spread
from shardmill.models.interface import ENUMERATED, FIXED
from shardmill.models.part_kinds import stem
from shardmill.models.parts import build
from shardmill.plan import Part

RECORD = 64  # bytes of a blob's record; the blob's data follows
# These passes fold constants of the graph into weights, which would then no longer be the checkpoint's rows.
FOLDING = {
    "common::fuse_conv_scale",
    "common::fuse_conv_bias",
    "common::fuse_conv_batchnorm",
    "common::fuse_elementwise_to_batchnorm",
}


def convert_plain(
    part: Part, source: Path, forms: str | Mapping[str, str], path: Path, codes: Path | None = None
) -> None:
    """Write the canonical package of a part as `convert_stamped` does, by coremltools alone."""
    chosen = spread(forms, part.shapes)
    if part.spec.calls.shapes == FIXED:
        with tempfile.TemporaryDirectory() as folder:
            packages = {name: Path(folder) / f"{name}.mlpackage" for name, _ in by_function(part.spec)}
            for name, spec in by_function(part.spec):
                one = replace(part, spec=spec)
                save(converted(one, PartWeights(one, source), chosen), packages[name])
            save_combined(packages, path)
    else:
        save(converted(part, PartWeights(part, source), chosen), path)
    if codes:
        _impose(path, part, chosen, Codes(codes, part, chosen))


def save(model: Any, path: Path) -> None:
    """Write an MLModel as a canonical package at `path`."""
    model.save(str(path))
    canonicalize(path)


def converted(part: Part, weights: Mapping[str, Tensor], forms: str | Mapping[str, str]) -> Any:
    """The MLModel of a part; if its shapes are fixed, of one width. `weights` in fp32 by the contract's paths."""
    chosen = spread(forms, part.shapes)
    passes = trace.passes()
    passes.remove_passes(FOLDING)
    model = trace.converted(part.spec, build(part.spec, weights), {}, passes)
    if not set(chosen.values()) <= {FP16}:
        model = compressed(model, chosen)
    spec = normalised(model.get_spec(), part)
    if part.spec.calls.shapes == ENUMERATED:
        enumerate_shapes(spec, part.spec.calls.widths)
    return ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True)


def normalised(spec: Any, part: Part) -> Any:
    """A part's program in normal form, with the numbers that coremltools put into the program itself."""
    short = inline_constants(part)
    values = {op.outputs[0].name: op.attributes["val"] for op in main_block(spec).operations if op.type == "const"}
    values = {name: type(value).FromString(value.SerializeToString()) for name, value in values.items()}
    block = main_block(spec)
    for op in block.operations:
        if op.type == "const" and op.outputs[0].name in short:
            op.attributes["val"].blobFileValue.SetInParent()
    operations = list(
        normal_form(spec, pieces_of if part.kind == "layers" else one_piece).operations(
            spec.description.input[0].name, block.outputs[0], part.spec.taps
        )
    )
    del block.operations[:]
    block.operations.extend(operations)
    stack_inputs(spec, part.spec)
    for op in block.operations:
        if op.type == "const" and op.outputs[0].name in short:
            op.attributes["val"].CopyFrom(values[op.outputs[0].name])
    return spec


def compressed(model: Any, forms: Mapping[str, str]) -> Any:
    """An MLModel of fp16 weights with its matrices in other forms; `forms` maps a matrix's path to its form."""
    by_name = {f"{stem(path)}_to_fp16": form(name) for path, name in forms.items()}
    kinds = {found.kind for found in by_name.values()}
    if "int" in kinds:
        if len(set(by_name.values())) == 1:
            every = integers(next(iter(by_name.values())).bits)
            return cto.linear_quantize_weights(model, cto.OptimizationConfig(op_type_configs={"conv": every}))
        named = {name: integers(f.bits) if f.kind == "int" else None for name, f in by_name.items()}
        model = cto.linear_quantize_weights(model, cto.OptimizationConfig(op_name_configs=named))
    if "palette" in kinds:
        named = {name: _palettizer(f) if f.kind == "palette" else None for name, f in by_name.items()}
        model = cto.palettize_weights(model, cto.OptimizationConfig(op_name_configs=named))
    return model


def integers(bits: int) -> Any:
    """The configuration for symmetric integers with one scale per output channel (rules W6 and W7)."""
    return cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype=f"int{bits}", granularity="per_channel", weight_threshold=0
    )


def _palettizer(wanted: Form) -> Any:
    """The configuration for palettes with our tables, which coremltools stores."""

    def look_up(values: NDArray[np.float16]) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
        entries = palette_table(histogram(values), 2**wanted.bits)
        return entries, indices(entries, values.ravel())

    size = {"granularity": "per_grouped_channel", "group_size": wanted.group, "channel_axis": 0} if wanted.group else {}
    return cto.OpPalettizerConfig(mode="custom", lut_function=look_up, weight_threshold=0, **size)


def save_combined(packages: Mapping[str, Path], path: Path) -> None:
    """Combine packages of one function each into a canonical package, by coremltools.

    coremltools numbers the updates of states anew when it reads a program; here all operations keep their names from
    the packages, which are given by the name of their function in the result.
    """
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, source in packages.items():
        descriptor.add_function(str(source), "main", name)
    descriptor.default_function_name = next(iter(packages))
    ct.utils.save_multifunction(descriptor, str(path))
    spec = load_spec(path)
    for name, source in packages.items():
        function = spec.mlProgram.functions[name]
        operations = function.block_specializations[function.opset].operations
        for made, known in zip(operations, main_block(load_spec(source)).operations, strict=True):
            made.attributes["name"].CopyFrom(known.attributes["name"])
    (path / MODEL_FILE).write_bytes(spec.SerializeToString(deterministic=True))
    canonicalize(path)


def _impose(path: Path, part: Part, forms: Mapping[str, str], codes: Codes) -> None:
    """Overwrite the numbers of a package with codes."""
    places = {
        name: [value.blobFileValue.offset + RECORD for value in values]
        for name, values in weight_sites(load_spec(path))
    }
    contents: list[PrequantizedWeight] = []
    for constant, shape in part.shapes.items():
        contents += codes.contents(constant, forms.get(constant, FP16), shape, places.get(stem(constant), []))
    descriptor = os.open(path / WEIGHT_FILE, os.O_RDWR)
    try:
        stream(descriptor, contents, path, 1)
    finally:
        os.close(descriptor)


def one_piece(steps: Sequence[Any], *_: Any) -> dict[str, Sequence[Any]]:
    """The operations of a program that is no sequence of layers."""
    return {WHOLE: steps}


def pieces_of(
    steps: Sequence[Any], weights: Collection[str], states: Collection[str], stream: str
) -> dict[str, Sequence[Any]]:
    """The operations of each layer by the name of its piece.

    A layer ends at the last place before the next layer's first weight or state where only one value leads on, caches
    aside.

    Args:
        steps: operations in order, without constants and without steps that depend on neither stream, state nor weight.
        weights: names of the program's weights.
        states: names of the program's states, or of the inputs in their place.
        stream: name of the input that the first piece reads.

    Raises:
        ValueError: if more than one value leads from a layer to the next.
    """
    own = {int(found[1]) for found in map(WEIGHT.match, weights) if found}  # lent caches belong to no layer here
    first: dict[int, int] = {}  # place of the first step that reads a layer's weight or state
    for place, step in enumerate(steps):
        for name in _reads(step):
            found = WEIGHT.match(name) if name in weights else STATE.fullmatch(name) if name in states else None
            if found and (int(found[1]) in own or not own):
                first.setdefault(int(found[1]), place)
    joints, indices, ends = list(_joints(steps, stream, _caches(steps, states))), sorted(first), [0]
    for index in indices[1:]:
        end = 1 + max((place for place in joints if place < first[index]), default=-1)
        if end <= ends[-1]:
            raise ValueError(f"layer {index}: more than one value leads to it")
        ends.append(end)
    bounds = pairwise([*ends, len(steps)])
    return {f"layer_{index}": steps[start:end] for index, (start, end) in zip(indices, bounds, strict=True)}


def _caches(steps: Sequence[Any], states: Collection[str]) -> set[str]:
    """The values that are a cache with the new tokens in it; a later layer may read them, too.

    Such a value is what is read from a state or, if the host has the caches, the sum of new rows and of a product with
    the old cache.
    """
    kept = {step.outputs[0].name for step in steps if step.type == "mul" and {*_reads(step)} & {*states}}
    sums = {step.outputs[0].name for step in steps if step.type == "add" and {*_reads(step)} & kept}
    return sums | {step.outputs[0].name for step in steps if step.type == "read_state"}


def _joints(steps: Sequence[Any], stream: str, caches: Collection[str]) -> Iterator[int]:
    """Yield the places of one-result operations after which neither the stream nor an earlier result is read.

    Results in `caches` do not count.
    """
    last = {name: place for place, step in enumerate(steps) for name in _reads(step) if name not in caches}
    open_until = last[stream]
    for place, step in enumerate(steps):
        if open_until <= place and len(step.outputs) == 1:
            yield place
        open_until = max([open_until, *(last.get(output.name, place) for output in step.outputs)])


def _reads(operation: Any) -> list[str]:
    """The names that an operation reads."""
    return [argument.name for _, argument in named_arguments(operation)]
