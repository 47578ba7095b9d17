"""What coremltools compresses runs as what coremltools itself expands: the forms of weights, at every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize as cto
import limits
import numpy as np
import pytest
import torch

OUT, IN = 32, 48
LINEAR, TABLES = cto.coreml.OpLinearQuantizerConfig, cto.coreml.OpPalettizerConfig
GROUPED: dict[str, Any] = {"mode": "uniform", "nbits": 4, "granularity": "per_grouped_channel", "weight_threshold": 0}
FORMS = {
    "int8": LINEAR(mode="linear_symmetric", dtype="int8", weight_threshold=0),
    "int4": LINEAR(mode="linear_symmetric", dtype="int4", granularity="per_channel", weight_threshold=0),
    "palette4": TABLES(mode="uniform", nbits=4, weight_threshold=0),
    "palette6": TABLES(mode="uniform", nbits=6, weight_threshold=0),
    "palette8": TABLES(mode="uniform", nbits=8, weight_threshold=0),
    "palette4 in groups": TABLES(**GROUPED, group_size=8),
    "palette4, scaled": TABLES(**GROUPED, group_size=0, enable_per_channel_scale=True),
    "palette4 in groups, scaled": TABLES(**GROUPED, group_size=8, enable_per_channel_scale=True),
}
TARGETS = {"iOS18": ct.target.iOS18, "iOS26": ct.target.iOS26}
SCALE, TABLE = "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"


def converted(kind: str, target: Any) -> Any:
    """A matrix whose rows differ in size, behind coremltools' own conversion."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(IN, OUT) if kind == "linear" else torch.nn.Conv2d(IN, OUT, 1)
    shape = (3, IN) if kind == "linear" else (1, IN, 2, 3)
    with torch.no_grad():
        layer.weight *= torch.logspace(-2, 1, OUT).view(-1, *[1] * (layer.weight.dim() - 1))
    traced = torch.jit.trace(layer.eval(), torch.zeros(shape))
    inputs = [ct.TensorType("x", shape)]
    return ct.convert(traced, inputs=inputs, minimum_deployment_target=target, skip_model_load=True)


def compressed(model: Any, form: str) -> Any:
    """The model with its matrix in a form."""
    config = cto.coreml.OptimizationConfig(global_config=FORMS[form])
    if isinstance(FORMS[form], LINEAR):
        return cto.coreml.linear_quantize_weights(model, config)
    return cto.coreml.palettize_weights(model, config)


def predicted(model: Any, path: Path) -> np.ndarray:
    """What comes out of the package through the portable engine."""
    model.save(str(path))
    loaded = ct.models.MLModel(str(path), compute_units=ct.ComputeUnit.CPU_ONLY)
    (name,) = loaded.get_spec().description.input
    shape = tuple(name.type.multiArrayType.shape)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    (found,) = loaded.predict({name.name: x}).values()
    return np.asarray(found)


@pytest.mark.thorough(
    but=[
        "int8-iOS18-linear",
        "int8-iOS26-conv",
        "int4-iOS18-linear",
        "int4-iOS26-conv",
        "palette4-iOS18-linear",
        "palette4-iOS26-conv",
        "palette6-iOS18-linear",
        "palette6-iOS26-conv",
        "palette8-iOS18-linear",
        "palette8-iOS26-conv",
        "palette4 in groups-iOS18-linear",
        "palette4 in groups-iOS26-conv",
        "palette4, scaled-iOS18-linear",
        "palette4, scaled-iOS26-conv",
        "palette4 in groups, scaled-iOS18-linear",
        "palette4 in groups, scaled-iOS26-conv",
    ]
)
@pytest.mark.parametrize("kind", ["linear", "conv"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_a_compressed_matrix_is_its_expansion(form: str, target: str, kind: str, tmp_path: Path) -> None:
    """coremltools.optimize's decompression is the witness."""
    model = compressed(converted(kind, TARGETS[target]), form)
    whole = cto.coreml.decompress_weights(model)
    operations = {op.op_type for op in whole._mil_program.functions["main"].operations}
    assert not operations & {SCALE, TABLE}, "it was not expanded"
    found, expected = predicted(model, tmp_path / "a.mlpackage"), predicted(whole, tmp_path / "b.mlpackage")
    limits.numbers_agree("the product", found, expected, limits.roundings("fp16"))  # weights are rounded on either way


@pytest.mark.parametrize("target", TARGETS)
def test_scales_of_a_palette_stand_where_the_target_wants_them(target: str) -> None:
    """Below iOS26 a table is scaled before it is looked up, from iOS26 on the other way round: both orders occur."""
    model = compressed(converted("linear", TARGETS[target]), "palette4, scaled")
    operations = [op.op_type for op in model._mil_program.functions["main"].operations]
    order = [name for name in operations if name in (SCALE, TABLE)]
    assert order == ([SCALE, TABLE] if target == "iOS18" else [TABLE, SCALE])
