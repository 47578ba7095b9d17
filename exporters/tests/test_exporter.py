"""What users of transformers.exporters see: names, sizes, frozen inputs, files, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import architectures
import coremltools as ct
import limits
import pytest
import torch
from architectures import ALL, tensors
from transformers.exporters.auto import AutoHfExporter
from transformers.exporters.base import ExportedModel
from transformers_coreml import CoreMLConfig, CoreMLExporter, CoreMLRunner, export_model, runner

FP16 = limits.sums("fp16", 1, limits.LAYER * 2 + limits.HEAD)


def types(exported: ExportedModel) -> dict[str, str]:
    description = exported.program.get_spec().description
    kinds = runner.KINDS.ArrayDataType
    return {one.name: kinds.Name(one.type.multiArrayType.dataType) for one in (*description.input, *description.output)}


@pytest.fixture(scope="module")
def exported() -> ExportedModel:
    model, inputs = ALL["bert"].build()
    return export_model(model, inputs)


def test_inputs_and_outputs_have_the_model_s_names_and_fp16(exported: ExportedModel) -> None:
    assert types(exported) == {
        "input_ids": "INT32",
        "attention_mask": "INT32",
        "last_hidden_state": "FLOAT16",
        "pooler_output": "FLOAT16",
    }


def test_a_saved_program_is_called_as_the_model_is(exported: ExportedModel, tmp_path: Path) -> None:
    """Saved twice, since the second one takes the place of the first; and with its config."""
    model, inputs = ALL["bert"].build()
    for _ in range(2):
        exported.save_pretrained(tmp_path)
    assert (tmp_path / "model.mlpackage" / "Manifest.json").is_file() and (tmp_path / "config.json").is_file()
    loaded = ExportedModel.from_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs)
    for precision in (None, "fp32"):
        result = loaded.to(precision=precision)(**inputs)
        assert type(result) is type(expected)
        for name, wanted in expected.items():
            limits.numbers_agree(name, result[name], wanted, FP16)


def test_auto_classes_of_transformers_find_the_backend() -> None:
    assert isinstance(AutoHfExporter.from_config(CoreMLConfig()), CoreMLExporter)


def test_a_package_without_large_constants_is_read_again(tmp_path: Path) -> None:
    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    export_model(Twice().eval(), {"x": torch.ones(2, 3)}).save_pretrained(tmp_path)
    assert ExportedModel.from_pretrained(tmp_path)(x=torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2


def test_an_input_that_decides_sizes_is_frozen_and_another_one_refused() -> None:
    model, inputs = ALL["qwen3_5_vision"].build()
    exported = export_model(model, inputs, precision="fp32")
    assert [name for name in types(exported) if name in ("grid_thw", "hidden_states")] == ["hidden_states"]
    exported(hidden_states=inputs["hidden_states"])
    with pytest.raises(
        ValueError, match=r"grid_thw is \[\[1, 8, 8\]\] in this program, whatever is passed; export again"
    ):
        exported(hidden_states=inputs["hidden_states"], grid_thw=torch.tensor([[1, 4, 16]]))


def test_a_stated_size_may_vary() -> None:
    """Within its bounds, as Core ML's flexible shapes."""
    model, inputs = ALL["bert"].build()
    length = torch.export.Dim("length", min=1, max=32)
    exported = export_model(
        model, inputs, precision="fp32", dynamic_shapes={name: {1: length} for name in ("input_ids", "attention_mask")}
    )
    for count in (8, 32):
        given = architectures.tokens(count)
        with torch.no_grad():
            expected = tensors(model(**given))
        for found, wanted in zip(tensors(exported(**given)), expected, strict=True):
            limits.numbers_agree(f"{count} tokens", found, wanted, limits.model(2, 128))


def test_a_size_that_takes_another_branch_is_refused() -> None:
    """torch.export bakes the sample's branch, and the assertion that would catch it has no place in Core ML."""

    model, inputs = ALL["dinov2"].build()
    settings = {
        "dynamic_shapes": {"pixel_values": {2: 16 * torch.export.Dim("rows", min=1, max=9)}},
        "prefer_deferred_runtime_asserts_over_guards": True,
    }
    with pytest.raises(
        ValueError, match="the program holds only where .*: torch.export took the branch of the sample's"
    ):
        export_model(model, inputs, **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16"}, "precision is 'bf16', must be 'fp16' or 'fp32'"),
        ({"target": "iOS99"}, "target is 'iOS99', must be one of"),
        ({"dynamic": True}, "state the sizes that vary"),
        ({"quantizer": SimpleNamespace()}, "compress the program with coremltools.optimize.coreml"),
        ({"constants": ("mask",)}, "constants: the sample has no input 'mask'; it has input_ids, attention_mask"),
    ],
)
def test_what_can_not_be_exported_is_one_line(settings: dict[str, Any], message: str) -> None:
    model, inputs = ALL["bert"].build()
    with pytest.raises(ValueError, match=message) as failure:
        export_model(model, inputs, **settings)
    assert "\n" not in str(failure.value)


def test_a_missing_input_and_an_unknown_device_are_named(exported: ExportedModel) -> None:
    with pytest.raises(ValueError, match="the program takes attention_mask, which is not among input_ids"):
        exported(input_ids=torch.ones(1, 16, dtype=torch.long))
    with pytest.raises(ValueError, match="device is 'cuda', must be 'ane' or 'cpu'"):
        exported.to("cuda")


@pytest.mark.parametrize(("device", "units"), [(None, "CPU_AND_NE"), ("ane", "CPU_AND_NE"), ("cpu", "CPU_ONLY")])
def test_on_a_mac_core_ml_runs_it(
    device: str | None, units: str, exported: ExportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of portable-coreml is asked for there."""
    asked: list[Any] = []

    class Loaded:
        package_path = exported.program.package_path

        def __init__(self, path: str, compute_units: Any) -> None:
            asked.append((path, compute_units))

        def get_spec(self) -> Any:
            return exported.program.get_spec()

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(runner, "_install", lambda precision: pytest.fail("asked for the portable engine"))
    monkeypatch.setattr(ct.models, "MLModel", Loaded)
    component = exported.components["model"]
    CoreMLRunner.from_program(component.program, component.metadata, device)
    assert asked == [(component.program.package_path, ct.ComputeUnit[units])]


def test_without_core_ml_and_portable_coreml_the_remedy_is_named(
    exported: ExportedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "portable_coreml", None)
    with pytest.raises(RuntimeError, match="no Core ML here: install portable-coreml"):
        exported.to()


def test_coremltools_keeps_its_own_way_with_quotients() -> None:
    """The mend holds during a conversion only: other conversions of the process are not touched."""
    from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY

    before = _TORCH_OPS_REGISTRY.name_to_func_mapping["floordiv"]
    model, inputs = ALL["bert"].build()
    export_model(model, inputs)
    assert _TORCH_OPS_REGISTRY.name_to_func_mapping["floordiv"] is before
