"""Programs that parse and mean harm: absurd sizes, nesting without end, references in circles, arguments that make no
sense. Each is an error that says what is wrong, soon and in little memory.
"""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from portable_coreml.errors import PortableError
from portable_coreml.files.bundle import HEADER, ML_PROGRAM, TRAILER
from portable_coreml.proxy import MLModelProxy
from portable_coreml.run.lowered import MAX_ELEMENTS

from tests.conftest import PATIENCE

X = "tensor<fp32, [2, 2]> x"
Y = "tensor<fp32, [2, 2]> y"
PROGRAMS = {
    "a fill": ("tensor<fp32, [?, ?]> y = fill(shape = tensor<int32, [2]>([100000, 100000]));", "larger than"),
    "a tile": ("tensor<fp32, [?, ?]> y = tile(reps = tensor<int32, [2]>([60000, 60000]), x = x);", "larger than"),
    "a long range": (
        "tensor<fp32, [?]> y = range_1d(end = fp32(0x1p+36), start = fp32(0x0p+0), step = fp32(0x1p-10));",
        "larger than",
    ),
    "a wide pad": (
        "tensor<fp32, [?, ?]> y = pad(x = x, pad = tensor<int32, [2]>([1000000000, 1000000000]), "
        'mode = string("reflect"));',
        "larger than",
    ),
    "a declared size": (f"tensor<fp32, [4611686018427387904, 8]> z = relu(x = x); {Y} = relu(x = x);", "declares"),
    "a cycle": (f"{Y} = relu(x = z); tensor<fp32, [2, 2]> z = relu(x = y);", "'z', which is not defined before"),
    "itself": (f"{Y} = relu(x = y);", "'y', which is not defined before"),
    "types in types": (f"{Y} = relu(x = {'list<' * 100000}fp32{', ?>' * 100000}());", "levels of nesting"),
    "blocks in blocks": (f"{Y} = cond(pred = x) " + f"() {{ {Y} = cond(pred = x) " * 20000, "levels of nesting"),
    "parentheses": (f"{Y} = concat(values = {'(' * 200000}x{')' * 200000});", "expected a name"),
    "brackets": ("tensor<fp32, [2]> y = const()[val = tensor<fp32, [2]>(" + "[" * 1000000 + ")];", "brackets"),
    "an open string": ('string s = const()[val = string("' + '\\"' * 200000, "unreadable"),
    "an unknown type name": (f'{Y} = cast(dtype = string("fp33"), x = x);', "'cast'.*fp33"),
    "a string for a tensor": (f'{Y} = add(x = x, y = string("a"));', "a string, not a tensor"),
    "an axis that is not there": (f"{Y} = softmax(x = x, axis = int32(2000000000));", "'softmax'"),
    "a step of nothing": (
        "tensor<fp32, [?]> y = range_1d(end = fp32(0x1p+3), start = fp32(0x0p+0), step = fp32(0x0p+0));",
        "'range_1d'",
    ),
    "a split in no parts": (f"{Y} = split(x = x, axis = int32(0), num_splits = int32(0));", "'split'"),
    "a number where a weight should be": (f"{Y} = conv(x = x, weight = x);", "'conv'"),
}  # fmt: skip


def bundle(folder: Path, lines: str, parameter: str = X) -> Path:
    """A compiled bundle of one function with one input x [2, 2] and one output y."""
    from coremltools.proto import Model_pb2

    description = Model_pb2.ModelDescription()
    for feature in (description.input.add(name="x"), description.output.add(name="y")):
        feature.type.multiArrayType.dataType = 65568  # float32
        feature.type.multiArrayType.shape.extend([2, 2])
    payload = description.SerializeToString()
    path = folder / "m.mlmodelc"
    path.mkdir()
    header = HEADER.pack(ML_PROGRAM, 9, 7, b"generic", 9, len(payload))
    (path / "coremldata.bin").write_bytes(header + payload + TRAILER)
    (path / "model.mil").write_text(f"program(1.3){{ func main<ios18>({parameter}) {{ {lines} }} -> (y); }}")
    return path


def refused(path: Path) -> str:
    """The error of loading and running a bundle, which takes less memory than one value may have."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(PortableError) as error:
        MLModelProxy(str(path)).predict({"x": np.ones((2, 2), np.float32)})
    assert time.process_time() - start < PATIENCE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 * MAX_ELEMENTS / 1024  # KiB
    return str(error.value)


@pytest.mark.parametrize("what", sorted(PROGRAMS))
def test_harmful_programs_are_refused(tmp_path: Path, what: str) -> None:
    lines, message = PROGRAMS[what]
    error = refused(bundle(tmp_path, lines))
    assert re.search(message, error), error


def test_an_input_of_absurd_size_is_refused(tmp_path: Path) -> None:
    """A parameter and a state that no memory holds."""
    huge = "[9223372036854775807, 9223372036854775807]"
    assert "the program takes" in refused(bundle(tmp_path, f"{Y} = relu(x = x);", f"tensor<fp32, {huge}> x"))
    (tmp_path / "state").mkdir()
    states = f"state<tensor<fp16, {huge}>> k, {X}"
    assert "larger than" in refused(bundle(tmp_path / "state", f"{Y} = relu(x = x);", states))


def test_a_loop_that_grows_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor doubled in every turn: stopped at the largest size of a value."""
    from portable_coreml.run import lowered

    monkeypatch.setattr(lowered, "MAX_ELEMENTS", 1 << 16)
    lines = (
        "bool go = const()[val = bool(true)]; tensor<fp32, [?, 2]> y = while_loop(loop_vars = x) "
        "(tensor<fp32, [?, 2]> a) { } -> (go) (tensor<fp32, [?, 2]> b) { tensor<fp32, [?, 2]> c = "
        "concat(axis = int32(0), interleave = bool(false), values = (b, b)); } -> (c);"
    )
    assert "'c' of shape [65536, 2] is larger" in refused(bundle(tmp_path, lines))
