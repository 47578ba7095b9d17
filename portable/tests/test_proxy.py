"""The classes under coremltools' own: whose state a model takes."""

from __future__ import annotations

from pathlib import Path

import coremltools as ct
import portable_coreml
import pytest
from coremltools.converters import mil
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from tests.conftest import step_inputs


def counter(name: str, width: int, path: Path) -> Path:
    """A program that adds x [1, width] to a state of that name, saved at `path`."""
    function = mil.Function(
        {"x": mb.placeholder((1, width), types.fp16), name: mb.state_tensor_placeholder((1, width), types.fp16)},
        ct.target.iOS18,
    )
    program = mil.Program()
    with function:
        memory = function.inputs[name]
        total = mb.add(x=function.inputs["x"], y=mb.read_state(input=memory))
        function.set_outputs([mb.coreml_update_state(state=memory, value=total, name="total")])
    program.add_function("main", function)
    ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True).save(str(path))
    return path


@pytest.fixture
def others(tmp_path: Path) -> dict[str, Path]:
    """Models with a state of another name, of the same name and shape, and of the same name and another shape."""
    return {
        "another name": counter("count", 8, tmp_path / "count.mlpackage"),
        "the same name and shape": counter("memory", 8, tmp_path / "twin.mlpackage"),
        "another shape": counter("memory", 16, tmp_path / "wide.mlpackage"),
    }


def test_a_state_of_another_model_is_refused(others: dict[str, Path], tmp_path: Path) -> None:
    """Also where its names and shapes would do: what another model has remembered means nothing here."""
    model = ct.models.MLModel(str(counter("memory", 8, tmp_path / "mine.mlpackage")))
    for what, path in others.items():
        state = ct.models.MLModel(str(path)).make_state()
        with pytest.raises(
            portable_coreml.PortableError, match=f"another loaded model, of {path}; use make_state"
        ) as e:
            model.predict({"x": [[1.0] * 8]}, state)
        assert isinstance(e.value, portable_coreml.InputError), what
    own = model.make_state()
    assert [float(model.predict({"x": [[1.0] * 8]}, own)["total"].max()) for _ in range(2)] == [1, 2]


def test_a_model_at_another_precision_is_another_model(attention_package: Path) -> None:
    """Its states are rounded to fp16, this one's are not."""
    full = ct.models.MLModel(str(attention_package))
    portable_coreml.install("fp16")
    state = ct.models.MLModel(str(attention_package)).make_state()
    with pytest.raises(portable_coreml.InputError, match="another loaded model"):
        full.predict(step_inputs(32, 8, 0, 1, 0), state)
