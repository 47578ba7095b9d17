"""Models that Core ML refuses to load are refused here when they are loaded, not at the first prediction."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files.bundle import compile_model, load_model
from portable_coreml.files.model import pick_function
from portable_coreml.judge.loadable import default_shapes
from portable_coreml.proxy import MLModelProxy


def test_a_default_that_the_program_cannot_take_is_refused_at_load(build_program: Callable[..., Any]) -> None:
    """Two inputs that must be alike, one with a RangeDim whose default differs: as Core ML, not before a prediction
    but when the model is loaded.
    """
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol

    for default in (4, 2):
        program = {"x": (2, 4), "y": (2, get_new_symbol())}
        inputs = [ct.TensorType("x", (2, 4)), ct.TensorType("y", (2, ct.RangeDim(1, 8, default)))]
        model = build_program(lambda x, y: mb.stack(values=[x, y], axis=0), program, inputs=inputs)
        if default == 4:
            assert next(iter(model.predict({n: np.ones((2, 4), np.float32) for n in "xy"}).values())).shape == (2, 2, 4)
            continue
        with pytest.raises(ProgramError, match=r"x \[2, 4\], y \[2, 2\].*'stack'"):
            MLModelProxy(model.package_path)


def test_descriptions_that_contradict_the_program_are_refused(attention_package: Path, tmp_path: Path) -> None:
    """A default outside its own range, and one that the program's parameter can't have; another one was sound."""
    from coremltools.proto import Model_pb2

    for wrong, message in ((9, "default shape .* allowed"), (1, "the program takes")):
        package = Path(shutil.copytree(attention_package, tmp_path / f"{wrong}.mlpackage"))
        MLModelProxy(str(package))
        path = next(package.rglob("*.mlmodel"))
        spec = Model_pb2.Model.FromString(path.read_bytes())
        array = next(m for m in spec.description.input if m.name == "x").type.multiArrayType
        if wrong == 1:
            array.shape[1] = 31
            array.shapeRange.sizeRanges[1].lowerBound = 31
        else:
            array.shape[2] = wrong
        path.write_bytes(spec.SerializeToString())
        with pytest.raises(ProgramError, match=message):
            MLModelProxy(str(package))


def test_a_bundle_has_the_defaults_of_its_package(attention_package: Path, tmp_path: Path) -> None:
    bundle = compile_model(attention_package, tmp_path / "m.mlmodelc")
    first, second = (default_shapes(*pick_function(load_model(p), "")) for p in (attention_package, bundle))
    assert first == second == {"x": (1, 32, 1, 1), "attn_mask": (1, 1, 1, 8), "write": (1, 1, 8, 1)}


def test_a_stateful_model_with_a_fixed_input_beside_ranges_is_refused(attention_package: Path, tmp_path: Path) -> None:
    """Core ML's process ends there (D3). The error names the input and what to do."""
    from coremltools.proto import Model_pb2

    package = Path(shutil.copytree(attention_package, tmp_path / "m.mlpackage"))
    path = next(package.rglob("*.mlmodel"))
    spec = Model_pb2.Model.FromString(path.read_bytes())
    next(m for m in spec.description.input if m.name == "write").type.multiArrayType.ClearField("shapeRange")
    path.write_bytes(spec.SerializeToString())
    with pytest.raises(ProgramError, match="D3.*'write' has a fixed shape.*RangeDim"):
        MLModelProxy(str(package))
