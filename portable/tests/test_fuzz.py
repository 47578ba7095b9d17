"""Damaged models: whatever a mutation does, loading and running either works or raises PortableError, soon."""

from __future__ import annotations

import random
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from portable_coreml.errors import PortableError, ProgramError
from portable_coreml.files.bundle import compile_model
from portable_coreml.files.read_text import read_text
from portable_coreml.proxy import MLModelProxy

from tests.conftest import PATIENCE, step_inputs

MUTATIONS = 60


def attempt(path: Path) -> str:
    """Loads and runs a model; the error's text, or "" where it still works. Any other exception passes through."""
    start = time.process_time()
    try:
        MLModelProxy(str(path)).predict(step_inputs(32, 8, 0, 1, 0))
    except PortableError as error:
        assert time.process_time() - start < PATIENCE
        return str(error)
    return ""


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flips, cuts, doubles or replaces a piece."""
    at, size = rng.randrange(len(data)), rng.randrange(1, 12)
    how = rng.randrange(4)
    if how == 0:
        return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
    if how == 1:
        return data[:at] + data[at + size :]
    if how == 2:
        return data[:at] + data[at : at + size] + data[at:]
    return data[:at]


@pytest.mark.parametrize("name", ["model.mil", "coremldata.bin", "weights/weight.bin"])
def test_mutated_bundles_fail_cleanly(attention_package: Path, tmp_path: Path, name: str) -> None:
    """Random damage to each file of a compiled bundle."""
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    target = bundle / name
    data, rng = target.read_bytes(), random.Random(name)
    target.unlink()  # it is a hard link to the package's file
    failures = 0
    for _ in range(MUTATIONS):
        target.write_bytes(mutate(data, rng))
        failures += bool(attempt(bundle))
    if name == "model.mil":
        assert failures > MUTATIONS // 4
    target.write_bytes(data)
    assert attempt(bundle) == ""


def test_mutated_specifications_fail_cleanly(attention_package: Path, tmp_path: Path) -> None:
    """Random damage to the protobuf of a package."""
    package = Path(shutil.copytree(attention_package, tmp_path / "m.mlpackage"))
    target = next(package.rglob("*.mlmodel"))
    data, rng, failures = target.read_bytes(), random.Random(7), 0
    for _ in range(MUTATIONS):
        target.write_bytes(mutate(data, rng))
        failures += bool(attempt(package))
    assert failures > MUTATIONS // 4


X, HIDDEN = "tensor<fp16, [1, 32, ?, 1]> x", "tensor<fp16, [1, 32, ?, 1]> hidden"
REWRITES = {
    "dangling name": ("x = x", "x = nobody", "'nobody', which is not defined"),
    "blob past the end": ("uint64(64)", "uint64(640000)", "outside the file"),
    "blob at a crooked offset": ("uint64(64)", "uint64(65)", "outside the file"),
    "path that leaves the bundle": ("@model_path/", "@model_path/../../", "leaves the model's directory"),
    "wrong shape": ("tensor<fp16, [1, 32, ?]>", "tensor<fp16, [1, 31, ?]>", "the program declares"),
    "huge weight": ("[32, 32, 1, 1]", "[32000, 32000, 32000, 1]", "claims"),
    "name defined twice": (HIDDEN, X, "twice|not defined"),
}


@pytest.mark.parametrize("what", sorted(REWRITES))
def test_malformed_programs_are_named(attention_package: Path, tmp_path: Path, what: str) -> None:
    """Text that parses but does not make a program: the error says what is wrong."""
    old, new, message = REWRITES[what]
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    text = (bundle / "model.mil").read_text()
    assert old in text
    (bundle / "model.mil").write_text(text.replace(old, new, -1 if what == "huge weight" else 1))
    error = attempt(bundle)
    assert re.search(message, error), error


def test_an_endless_loop_ends() -> None:
    """A while_loop whose condition never fails is cut off with its name."""
    from portable_coreml.run import execute
    from portable_coreml.run.execute import Executable

    text = (
        "program(1.3){ func main<ios18>(tensor<fp32, [1]> x) { bool go = const()[val = bool(true)]; "
        "tensor<fp32, [1]> y = while_loop(loop_vars = x) (tensor<fp32, [1]> a) { } -> (go) "
        "(tensor<fp32, [1]> b) { } -> (b); } -> (y); }"
    )
    function = read_text(text).functions["main"]
    limit, execute.MAX_ITERATIONS = execute.MAX_ITERATIONS, 10
    try:
        made = Executable(function, lambda value: np.asarray(value.data), "fp32")
        with pytest.raises(PortableError, match="while_loop 'y'"):
            import torch

            made.run({"x": torch.zeros(1)}, {})
    finally:
        execute.MAX_ITERATIONS = limit


def test_weight_records_are_checked(tmp_path: Path) -> None:
    """A record that claims more than the file holds never reaches coremltools' reader, which would trust it."""
    from portable_coreml.files.blob import RECORD, SENTINEL, WeightFile
    from portable_coreml.program import TensorType

    path = tmp_path / "weight.bin"
    path.write_bytes(bytes(64) + RECORD.pack(SENTINEL, 1, 1 << 40, 128) + bytes(200))
    for offset, message in ((64, "damaged"), (0, "damaged"), (1 << 40, "outside"), (63, "outside")):
        with pytest.raises(ProgramError, match=message):
            WeightFile(path).read(offset, TensorType("fp16", (4,)))
