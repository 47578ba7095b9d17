"""The classes under coremltools' own: whose state a model takes."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import coremltools as ct
import portable_coreml
import pytest
from coremltools.converters import mil
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from portable_coreml import proxy

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


def test_functions_of_one_program_share_a_state(tmp_path: Path) -> None:
    """As runtimes for Core ML use them: what one function has written the other one finds. No copy's is taken."""
    descriptor, named = ct.utils.MultiFunctionDescriptor(), ("first", "second")
    for name in named:
        path = counter("memory", 8, tmp_path / f"{name}.mlpackage")
        descriptor.add_function(str(path), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "first"
    for whose in ("mine", "other"):
        ct.utils.save_multifunction(descriptor, str(tmp_path / f"{whose}.mlpackage"))
    mine, other = (
        [ct.models.MLModel(str(tmp_path / f"{whose}.mlpackage"), function_name=name) for name in named]
        for whose in ("mine", "other")
    )
    state, data = mine[0].make_state(), {"x": [[1.0] * 8]}
    assert [float(one.predict(data, state)["total"].max()) for one in (*mine, *mine)] == [1, 2, 3, 4]
    for model in (*other, ct.models.MLModel(str(tmp_path / "mine.mlpackage"))):  # the same function, loaded again
        with pytest.raises(portable_coreml.InputError, match="another loaded model"):
            model.predict(data, state)


def test_functions_that_keep_other_states_do_not_share_one(tmp_path: Path) -> None:
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, width in (("narrow", 8), ("wide", 16)):
        path = counter("memory", width, tmp_path / f"{name}.mlpackage")
        descriptor.add_function(str(path), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "narrow"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "both.mlpackage"))
    narrow, wide = (
        ct.models.MLModel(str(tmp_path / "both.mlpackage"), function_name=name) for name in ("narrow", "wide")
    )
    with pytest.raises(portable_coreml.InputError, match="another loaded model"):
        wide.predict({"x": [[1.0] * 16]}, narrow.make_state())


@pytest.mark.parametrize(
    ("hints", "taken"),
    [
        ({"reshapeFrequency": "Infrequent", "allowLowPrecisionAccumulationOnGPU": "True"}, True),
        ({"reshapeFrequency": "infrequent"}, False),
        ({"reshape": "Infrequent"}, False),
    ],
)
def test_only_hints_that_core_ml_has_are_taken(hints: dict[str, str], taken: bool, attention_package: Path) -> None:
    """At another value the native module aborts; coremltools' own check is only of their types."""
    with nullcontext() if taken else pytest.raises(portable_coreml.InputError, match="no optimization hint"):
        proxy.MLModelProxy(str(attention_package), "CPU_AND_NE", "", hints)


def test_where_core_ml_is_it_takes_its_place_for_a_while(
    attention_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a Mac, where `install` does nothing: models loaded inside are this engine's, and those after it are not."""
    native, names = ModuleType("coremltools.libcoremlpython"), ("_MLModelProxy", "_macos_version")
    before = {name: getattr(ct.models.model, name) for name in names}
    monkeypatch.setitem(sys.modules, native.__name__, native)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not portable_coreml.install("fp32")
    with portable_coreml.emulated():
        assert portable_coreml.install("fp32") and portable_coreml.precision() == "fp32"
        model = ct.models.MLModel(str(attention_package))
        with pytest.raises(RuntimeError, match="already"), portable_coreml.emulated():
            pass
    assert sys.modules[native.__name__] is native and not portable_coreml.install("fp32")
    assert {name: getattr(ct.models.model, name) for name in names} == before
    assert model.predict(step_inputs(32, 8, 0, 1, 0), model.make_state())
