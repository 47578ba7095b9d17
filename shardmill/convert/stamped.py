"""Stamped conversion: coremltools converts a few small layers once, and every part is composed from the result.

Layers of one kind share one graph, and only their weights differ. So a part's program is stamped from the templates of
its layers' kinds, and its weights are streamed from the checkpoint into the weight file. Plain conversion gives the
same package, byte for byte, with one exception. Plain coremltools drops or merges some operations because of a weight's
values: a norm weight of nothing but ones, or two layers with the same norm weight. Here programs never depend on
weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.convert import package, stream
from shardmill.convert.codes import Codes
from shardmill.convert.package import WEIGHT_FILE, by_function, combined, share_places
from shardmill.convert.placing import fill_inline, place
from shardmill.convert.template import sample
from shardmill.convert.template.pattern import main_block
from shardmill.convert.trace import enumerate_shapes
from shardmill.forms.form import FP16, INT8, Form, form, spread
from shardmill.models.contract import stem
from shardmill.models.interface import ENUMERATED, FIXED, MAIN
from shardmill.plan import Part

HALF, QUANTIZED, PALETTIZED = "_to_fp16", "_to_fp16_quantized", "_to_fp16_palettized"


def _reform(spec: Any, forms: Mapping[str, str]) -> None:
    """Change the forms of a program's matrices, in place.

    Args:
        spec: a program whose matrices are all INT8.
        forms: the new forms of its matrices, by path.
    """
    wanted = {f"{stem(path)}{QUANTIZED}": form(name) for path, name in forms.items() if name != INT8}
    renamed: dict[str, str] = {}
    for operation in main_block(spec).operations:
        old = operation.outputs[0].name if operation.outputs else ""
        if old in wanted:
            _reform_operation(operation, wanted[old], old.removesuffix(QUANTIZED))
            renamed[old] = operation.outputs[0].name
            continue
        for key in operation.inputs:
            for argument in operation.inputs[key].arguments:
                if argument.name in renamed:
                    argument.name = renamed[argument.name]


def _reform_operation(operation: Any, wanted: Form, name: str) -> None:
    """Change the form of a matrix in the operation that expands it from INT8."""
    if wanted.kind == "int":
        _retyped(operation.inputs["data"].arguments[0].value, "INT4")
        return
    data = _copied(operation.inputs["data"].arguments[0].value)
    lut = _copied(operation.inputs["scale"].arguments[0].value)
    operation.ClearField("inputs")
    if wanted.kind == "fp16":
        operation.type = "const"
        _retyped(data, "FLOAT16")
        operation.attributes["val"].CopyFrom(data)
        _call(operation, f"{name}{HALF}")
        return
    operation.type = "constexpr_lut_to_dense"
    _retyped(data, f"UINT{wanted.bits}")
    rows = data.type.tensorType.dimensions[0].constant.size
    _reshaped(lut, (wanted.tables(rows), *[1] * (data.type.tensorType.rank - 1), 2**wanted.bits, 1))
    for key, value in (("indices", data), ("lut", lut)):
        operation.inputs[key].arguments.add().value.CopyFrom(value)
    _call(operation, f"{name}{PALETTIZED}")


def _copied(value: Any) -> Any:
    copy = type(value)()
    copy.CopyFrom(value)
    return copy


def _retyped(value: Any, dtype: str) -> None:
    """Set the type of the numbers of a protobuf value."""
    from coremltools.proto import MIL_pb2

    value.type.tensorType.dataType = getattr(MIL_pb2, dtype)


def _reshaped(value: Any, shape: tuple[int, ...]) -> None:
    """Set the shape of a protobuf value."""
    kind = value.type.tensorType
    kind.rank = len(shape)
    del kind.dimensions[:]
    for size in shape:
        kind.dimensions.add().constant.size = size


def _call(operation: Any, name: str) -> None:
    """Set the name of an operation and of its result."""
    operation.outputs[0].name = name
    operation.attributes["name"].immediateValue.tensor.strings.values[0] = name


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
        forms: the forms of the part's matrices by path, or one form for all, as in `trace.convert`.
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
    base = FP16 if set(chosen.values()) <= {FP16} else INT8
    one_each = dict(by_function(part)) or {MAIN: part}
    specs = {name: sample.program(one, base, cache) for name, one in one_each.items()}
    known = Codes(codes, part, chosen) if codes else None
    for name, each in specs.items():
        if base == INT8:
            _reform(each, chosen)
        fill_inline(each, one_each[name], source, known)
    spec, *others = specs.values()
    blobs, contents = place(spec, part, chosen, known)
    if part.calls.shapes == FIXED:
        share_places(spec, others)
        spec = combined(specs)
    if part.calls.shapes == ENUMERATED:
        enumerate_shapes(spec, part.calls.widths)
    with tempfile.TemporaryDirectory() as empty:
        ct.utils.save_spec(spec, str(path), weights_dir=empty)
    stream.write_weights(path / WEIGHT_FILE, blobs, contents, source, threads)
    package.canonicalize(path)
