"""The graph contract, read from the programs themselves."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoders
import oracle
import pytest
import sympy
import templates
import tiny
import torch
from coremltools.converters.mil.mil import Program
from coremltools.proto import FeatureTypes_pb2
from models import tiny_encoders
from models.tiny_configs import tiny_config
from models.tiny_families import SLOTS

from shardmill.convert import package, trace
from shardmill.convert.stamped import convert_stamped
from shardmill.models import family
from shardmill.models.caches import T
from shardmill.models.contract import GraphSpec
from shardmill.models.part_kinds import constants, inputs, stem

FP16 = FeatureTypes_pb2.ArrayFeatureType.FLOAT16


def features(rows: Any) -> dict[str, tuple[int, ...]]:
    """Name -> default shape; all must be fp16 arrays."""
    arrays = {row.name: row.type.multiArrayType for row in rows}
    assert {array.dataType for array in arrays.values()} <= {FP16}
    return {name: tuple(array.shape) for name, array in arrays.items()}


def operations(spec: Any) -> list[Any]:
    (block,) = spec.mlProgram.functions["main"].block_specializations.values()
    return list(block.operations)


def test_a_layers_part_has_the_contract_s_inputs_outputs_and_states(built: tiny.Build) -> None:
    spec = package.load_spec(built.packages["layers_00_02"])
    assert features(spec.description.input) == {
        "x": (1, 96, 1, 1),
        "rope_cos": (1, 12),
        "rope_sin": (1, 12),
        "attn_mask": (1, 1, 1, 64),
        "kv_write_mask": (1, 1, 64, 1),
    }
    assert list(features(spec.description.output)) == ["hidden"]
    states = {row.name: tuple(row.type.stateType.arrayType.shape) for row in spec.description.state}
    assert states == dict.fromkeys(("k_0", "v_0", "k_1", "v_1"), (1, 1, 64, 32))


def test_states_are_named_by_absolute_layer(built: tiny.Build) -> None:
    spec = package.load_spec(built.packages["layers_03_04"])
    assert [row.name for row in spec.description.state] == ["k_3", "v_3"]


def test_a_head_part_has_the_contract_s_input_and_output(built: tiny.Build) -> None:
    spec = package.load_spec(built.packages["head_1"])
    assert features(spec.description.input) == {"hidden": (1, 96, 1, 1)}
    assert list(features(spec.description.output)) == ["logits"]
    assert not spec.description.state


def test_every_input_shares_one_range_of_tokens(built: tiny.Build) -> None:
    """One symbol: a stateful program that mixes fixed and flexible inputs is known to fail (rule D3)."""
    spec = package.load_spec(built.packages["layers_00_02"])
    ranges = []
    for row in spec.description.input:
        sizes = row.type.multiArrayType.shapeRange.sizeRanges
        flexible = [(s.lowerBound, s.upperBound) for s in sizes if s.lowerBound != s.upperBound]
        assert len(flexible) == 1, row.name
        ranges += flexible
    assert set(ranges) == {(1, 4)}
    symbols = {
        dimension.unknown.variadic or dimension.WhichOneof("dimension")
        for row in spec.mlProgram.functions["main"].inputs
        for dimension in row.type.tensorType.dimensions
        if dimension.WhichOneof("dimension") != "constant"
    }
    assert len(symbols) == 1


def test_every_projection_is_a_1x1_convolution_of_int8_weights_with_a_scale_per_channel(built: tiny.Build) -> None:
    for name in ("layers_02_03", "head_0"):
        ops = operations(package.load_spec(built.packages[name]))
        kinds = [op.type for op in ops]
        assert kinds.count("conv") == {"layers_02_03": 4, "head_0": 1}[name]
        assert "linear" not in kinds
        dequantised = {op.outputs[0].name: op for op in ops if op.type == "constexpr_blockwise_shift_scale"}
        for op in ops:
            if op.type != "conv":
                continue
            weight = dequantised[op.inputs["weight"].arguments[0].name]
            data, scales = (weight.inputs[key].arguments[0] for key in ("data", "scale"))
            shapes = [shape_of(ops, argument) for argument in (data, scales)]
            assert shapes[1] == (shapes[0][0], 1, 1, 1)
            assert shapes[0][2:] == (1, 1)
            assert "offset" not in weight.inputs  # symmetric


def shape_of(ops: list[Any], argument: Any) -> tuple[int, ...]:
    """Of a constant, given in place or by name."""
    kind = argument.value.type
    if not argument.HasField("value"):
        (kind,) = [o.type for op in ops for o in op.outputs if o.name == argument.name]
    return tuple(d.constant.size for d in kind.tensorType.dimensions)


def test_no_operation_needs_a_runtime_index(built: tiny.Build) -> None:
    """The cache is written by arithmetic; what picks by index leaves the Neural Engine."""
    kinds = {op.type for name in built.packages for op in operations(package.load_spec(built.packages[name]))}
    assert not kinds & {"slice_update", "scatter", "scatter_nd", "scatter_along_axis", "gather", "gather_nd", "shape"}
    assert {"read_state", "write_state"} <= kinds or {"read_state", "coreml_update_state"} <= kinds


def test_no_tensor_has_more_than_four_axes(built: tiny.Build) -> None:
    for name, path in built.packages.items():
        for op in operations(package.load_spec(path)):
            assert all(output.type.tensorType.rank <= 4 for output in op.outputs), (name, op.type)


def test_one_token_a_pass_is_a_fixed_shape(built: tiny.Build, tmp_path: Path) -> None:
    part = built.parts["head_0"].changed(tokens=1)
    spec = package.load_spec(tiny.convert(part, built.source, tmp_path / "p.mlpackage"))
    array = spec.description.input[0].type.multiArrayType
    assert tuple(array.shape) == (1, 96, 1, 1)
    assert not array.HasField("shapeRange")


def test_fp16_weights_stay_as_they_are(built: tiny.Build, tmp_path: Path) -> None:
    from shardmill.convert.weights import PartWeights

    part = built.parts["head_0"]
    path = tiny.convert(part, built.source, tmp_path / "p.mlpackage", "fp16")
    assert "constexpr_blockwise_shift_scale" not in {op.type for op in operations(package.load_spec(path))}
    stored = tiny.constants(path)["lm_head_weight"].flatten(1)
    original = PartWeights(part, built.source)["lm_head.weight"]
    assert torch.equal(stored, original.half().float())


@pytest.mark.parametrize(("kind", "count"), [("layers", 5), ("head", 1)])
def test_input_shapes_leave_room_for_any_number_of_tokens(built: tiny.Build, kind: str, count: int) -> None:
    part = next(part for part in built.parts.values() if part.kind == kind)
    shapes = inputs(part.spec)
    assert len(shapes) == count
    assert all(shape.count(T) == 1 for shape in shapes.values())
    assert trace.sized((1, T, 3), 4) == (1, 4, 3)


@pytest.mark.thorough(but=["layers"])
@pytest.mark.parametrize("kind", ["layers", "head"])
def test_a_quick_conversion_gives_the_same_program(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[None] = []
    monkeypatch.setattr(gc, "collect", lambda *_: searches.append(None))
    a = family("llama").describe(tiny_config("llama"), SLOTS).architecture
    layers = tuple(enumerate(a.kinds[:2])) if kind == "layers" else ()
    spec = GraphSpec(kind, a.graph, layers, tokens=4, slots=SLOTS, rows=0 if layers else 32)
    own = (Program.validate, Program.__str__, sympy.solve, gc.collect)
    quick = trace.convert(spec)
    assert not searches
    monkeypatch.setattr(trace, "hurried", nullcontext)
    assert trace.convert(spec) == quick
    assert searches  # by coremltools alone
    assert (Program.validate, Program.__str__, sympy.solve, gc.collect) == own


def test_weights_are_inputs_for_coremltools_and_constants_without_values_afterwards(built: tiny.Build) -> None:
    part = built.parts["layers_00_02"]
    spec = trace.convert(replace(part.spec, graph=replace(part.spec.graph, ffn=4096)))
    taken = [value.name for value in spec.mlProgram.functions["main"].inputs]
    assert list(features(spec.description.input)) == list(inputs(part.spec)) == taken[: -len(spec.description.state)]
    held = {op.outputs[0].name: package.stored_values(op) for op in operations(spec) if package.stored_values(op)}
    assert held.keys() == {f"{stem(path)}_to_fp16" for path in constants(part.spec)}
    assert {value.blobFileValue.offset for values in held.values() for value in values} == {0}


def test_no_convolution_is_computed_while_a_layer_is_traced() -> None:
    """Whose weights would be copied, then; it has the shape of the real one, and the real one is back afterwards."""
    convolution, x = torch.nn.Conv2d(3, 5, 1), torch.ones(1, 3, 4, 1)
    with torch.no_grad():
        with trace.unmultiplied():
            inside = convolution(x)
        outside = convolution(x)
    assert not inside.any() and outside.all() and inside.shape == outside.shape


def test_what_is_solved_at_sight_is_what_sympy_finds() -> None:
    """An equation that is not n a = n b goes to sympy itself."""
    a, b, c = sympy.symbols("a b c", integer=True)
    equations = (8 * a - 8 * b, 8 * b - 8 * a, 8 * a - 4 * b, 8 * a * c - 8 * b, 8 * b - 16, 8 * b**2 - 8 * a, a - a)
    found = [sympy.solve([equation], [b], dict=True) for equation in equations]
    assert found[0] == found[1] == [{b: a}] != found[2]
    with trace.hurried():
        assert [sympy.solve([equation], [b], dict=True) for equation in equations] == found


@pytest.mark.thorough
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "model_type",
    ["modernbert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3_text", "embedding_gemma2_text"))],
)
def test_a_stamped_encoder_of_two_kinds_is_plain_coremltools(model_type: str, tmp_path: Path) -> None:
    source, parts, _ = encoders.parts_of(tiny_encoders.write_tiny(model_type, tmp_path / "checkpoint"), tmp_path)
    part = next(part for part in parts.values() if part.kind == "encoder")
    assert len({kind for _, kind in part.spec.layers}) == 2
    oracle.convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    plain, stamped = (package.load_spec(tmp_path / f"{name}.mlpackage") for name in ("plain", "stamped"))
    assert plain == stamped
