"""`shardmill lint` on packages written to disk: each known way off the Neural Engine gives its rule and exit code 1,
and the same program without it gives none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from shardmill.cli import app

from .sparse import spread

SLOTS = 32
Builder = Callable[[Path, bool], None]


def linted(path: Path, *options: str) -> tuple[set[str], int]:
    """(rules of severity error, exit code)."""
    result = CliRunner().invoke(app, ["lint", str(path), "--json", *options])
    return {row["rule"] for row in json.loads(result.stdout) if row["severity"] == "error"}, result.exit_code


def projection(tail: Callable[[Any], Any] | None = None, dtype: Any = np.float16) -> Any:
    """An MLModel: x [1, 64, 1, 64] through a 1x1 convolution and `tail`."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    weight = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(dtype)
    kind = types.fp32 if dtype == np.float32 else types.fp16

    @mb.program(input_specs=[mb.TensorSpec((1, 64, 1, 64), dtype=kind)], opset_version=ct.target.iOS18)
    def program(x: Any) -> Any:
        y = mb.conv(x=x, weight=weight)
        return y if tail is None else tail(y)

    precision = ct.precision.FLOAT32 if dtype == np.float32 else ct.precision.FLOAT16
    return ct.convert(
        program, minimum_deployment_target=ct.target.iOS18, compute_precision=precision, skip_model_load=True
    )


def per_block_scales(path: Path, broken: bool) -> None:
    import coremltools.optimize.coreml as cto

    granularity = {"granularity": "per_block", "block_size": 32} if broken else {"granularity": "per_channel"}
    settings = cto.OpLinearQuantizerConfig(mode="linear_symmetric", weight_threshold=0, **granularity)
    config = cto.OptimizationConfig(global_config=settings)
    cto.linear_quantize_weights(projection(), config).save(str(path))


def argmax_tail(path: Path, broken: bool) -> None:
    from coremltools.converters.mil import Builder as mb

    def tail(logits: Any) -> Any:
        return mb.reduce_argmax(x=logits, axis=1, keep_dims=True) if broken else mb.softmax(x=logits, axis=1)

    projection(tail).save(str(path))


def embedding_gather(path: Path, broken: bool) -> None:
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    table = np.random.default_rng(0).standard_normal((128, 64)).astype(np.float16)
    kind, shape = (types.int32, (4,)) if broken else (types.fp16, (4, 128))

    @mb.program(input_specs=[mb.TensorSpec(shape, dtype=kind)], opset_version=ct.target.iOS18)
    def program(tokens: Any) -> Any:  # token ids, or one-hot rows made by the host
        return mb.gather(x=table, indices=tokens, axis=0) if broken else mb.matmul(x=tokens, y=table)

    ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(str(path))


def wide_io(path: Path, broken: bool) -> None:
    projection(dtype=np.float32 if broken else np.float16).save(str(path))


def cached(path: Path, width: int = 64, enumerated: bool = False, fixed: bool = False) -> None:
    """Rows written by mask into a state [1, 1, SLOTS, width]: one RangeDim on all inputs, or enumerated shapes, or one
    more input of a fixed shape.
    """
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol, types

    tokens, symbol, target = ct.RangeDim(1, 4, default=1), get_new_symbol(), ct.target.iOS18
    shapes = [lambda t: (1, 1, t, width), lambda t: (1, 1, SLOTS, t)] + [lambda t: (1, 1, SLOTS, width)] * fixed
    specs = [mb.TensorSpec(shape(symbol), dtype=types.fp16) for shape in shapes]
    state = mb.StateTensorSpec((1, 1, SLOTS, width), dtype=types.fp16)

    def update(cache: Any, x: Any, write: Any, bias: Any = None) -> Any:
        keep = mb.sub(x=np.float16(1), y=mb.reduce_sum(x=write, axes=[-1], keep_dims=True))
        value = mb.add(x=mb.mul(x=mb.read_state(input=cache), y=keep), y=mb.matmul(x=write, y=x))
        value = value if bias is None else mb.add(x=value, y=bias)
        return mb.reduce_mean(x=mb.coreml_update_state(state=cache, value=value), axes=[2], keep_dims=True)

    def plain(cache: Any, x: Any, write: Any) -> Any:
        return update(cache, x, write)

    def with_bias(cache: Any, x: Any, write: Any, bias: Any) -> Any:
        return update(cache, x, write, bias)

    kinds = [ct.EnumeratedShapes([s(1), s(4)]) if enumerated else s(tokens) for s in shapes]
    inputs = [ct.TensorType(n, kind, np.float16) for n, kind in zip(("x", "write", "bias"), kinds, strict=False)]
    program = mb.program(input_specs=[state, *specs], opset_version=target)(with_bias if fixed else plain)
    ct.convert(program, inputs=inputs, minimum_deployment_target=target, skip_model_load=True).save(str(path))


def odd_state_width(path: Path, broken: bool) -> None:
    cached(path, width=270 if broken else 288)


def enumerated_shapes_with_state(path: Path, broken: bool) -> None:
    cached(path, enumerated=broken)


def fixed_input_beside_ranges(path: Path, broken: bool) -> None:
    cached(path, fixed=broken)


CASES: dict[str, tuple[Builder, set[str]]] = {
    "per-block scales": (per_block_scales, {"W6"}),
    "an argmax tail": (argmax_tail, {"O3", "T2"}),
    "an embedding lookup": (embedding_gather, {"O5", "T2", "T3"}),
    "fp32 inputs and outputs": (wide_io, {"T1"}),
    "a state 270 wide": (odd_state_width, {"S8"}),
    "enumerated shapes with a state": (enumerated_shapes_with_state, {"D5"}),
    "a fixed input beside ranges": (fixed_input_beside_ranges, {"D3"}),
}


@pytest.mark.parametrize("what", sorted(CASES))
def test_what_leaves_the_engine_is_named(tmp_path: Path, what: str) -> None:
    """Exactly the rules that are broken, and none for the same program without the mistake."""
    make, rules = CASES[what]
    for broken in (True, False):
        make(tmp_path / f"{broken}.mlpackage", broken)
    assert linted(tmp_path / "True.mlpackage") == (rules, 1)
    assert linted(tmp_path / "False.mlpackage") == (set(), 0)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 layers in INT8 in one program, as `convert` makes it."""
    from shardmill.convert.stamped import convert_stamped

    folder = tmp_path_factory.mktemp("deep")
    source = tiny.fetched(tiny.write_checkpoint(folder / "checkpoint", layers=24), folder / "source")
    parts, _ = tiny.split(source, topology=[[0, 24]])
    path = folder / "layers_00_24.mlpackage"
    convert_stamped(parts["layers_00_24"], source, "int8", path, folder / "cache", 1)
    return path


@pytest.mark.thorough
def test_a_shard_over_a_systems_limit_is_named(deep: Path) -> None:
    """24 layers of Phi-4-mini's size, 100.8 MB each, are over every limit; 20 are not, but on macOS 27 and iOS 18."""
    assert linted(deep) == (set(), 0)
    spread(deep, 20 * 100_800_000)
    assert linted(deep) == (set(), 0)
    assert linted(deep, "--ios") == ({"W2"}, 1)
    assert linted(deep, "--system", "macOS 26", "--system", "iOS 26") == (set(), 0)
    assert linted(deep, "--system", "macOS 26", "--system", "macOS 27") == ({"W1"}, 1)
    spread(deep, 24 * 100_800_000)
    assert linted(deep) == ({"W1", "W2"}, 1)
    assert linted(deep, "--system", "macOS 26") == ({"W1"}, 1)
    assert next(deep.rglob("weight.bin")).stat().st_blocks * 512 < 50_000_000  # it is a sparse file


def test_a_system_that_is_not_known_is_refused_in_a_line(deep: Path) -> None:
    said = CliRunner().invoke(app, ["lint", str(deep), "--system", "macOS 14"])
    assert said.exit_code == 1
    assert said.stderr == (
        "shardmill: macOS 14: no system whose limits are known; there are macOS 15, macOS 26, macOS 27, iOS 18, "
        "iOS 26, iOS 27\n"
    )


def test_the_table_says_what_to_do(tmp_path: Path) -> None:
    """For people: the rule, what breaks it, the remedy, and how many errors; nothing of coremltools' own remarks."""
    wide_io(tmp_path / "m.mlpackage", True)
    result = CliRunner().invoke(app, ["lint", str(tmp_path / "m.mlpackage")], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    for text in ("T1", "input 'x' is fp32", "declare inputs and outputs fp16", "W5", "kB", "2 errors"):
        assert text in result.stdout, result.stdout
    assert "libcoremlpython" not in result.output


def test_a_path_that_is_no_model_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["lint", str(tmp_path)])
    assert result.exit_code != 0
    assert str(tmp_path) in str(result.output) + str(result.exception)


def test_a_table_of_several_functions_names_them(tmp_path: Path) -> None:
    """Or one could not tell which of them a row is about."""
    import coremltools as ct

    both = ct.utils.MultiFunctionDescriptor()
    for name in ("one", "two"):
        projection().save(str(tmp_path / f"{name}.mlpackage"))
        both.add_function(str(tmp_path / f"{name}.mlpackage"), "main", name)
    both.default_function_name = "one"
    ct.utils.save_multifunction(both, str(tmp_path / "both.mlpackage"))
    result = CliRunner().invoke(app, ["lint", str(tmp_path / "both.mlpackage")], env={"COLUMNS": "200"})
    assert "one: (program)" in result.stdout and "two: (program)" in result.stdout, result.stdout
