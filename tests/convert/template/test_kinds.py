"""Parts whose layers differ in kind: stamped, they are plain coremltools' byte for byte, in whichever order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardmill.convert import package, trace
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.template import sample
from shardmill.convert.weights import PartWeights

from ..small import layers_part, write_family

# Sliding layers as well as those without rotary embedding: three kinds.
THREE = {
    "num_hidden_layers": 6,
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": [f"{kind}_attention" for kind in ("full", "sliding", "sliding", "full", "sliding", "sliding")],
    "no_rope_layers": [1, 1, 0, 1, 0, 1],
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("smollm3", {}),
    "three kinds": ("smollm3", THREE),
    "gemma3_text": ("gemma3_text", {}),
    "lfm2": ("lfm2", {}),
}
CASES = [
    pytest.param("smollm3", 2, 4, "int8", 1, id="one layer with rotary embedding, one without"),
    pytest.param("smollm3", 3, 4, "fp16", 1, id="one layer, without rotary embedding"),
    pytest.param("gemma3_text", 1, 4, "fp16", 1, id="two masks and two rotary tables"),
    pytest.param("lfm2", 0, 2, "fp16", 2, id="convolutions only"),
    pytest.param("lfm2", 1, 4, "int8", 1, id="convolutions around attention"),
    pytest.param("three kinds", 2, 5, "fp16", 1, id="three kinds"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by name."""
    made = tmp_path_factory.mktemp("kinds")
    for name, (model_type, changes) in MODELS.items():
        write_family(made / name, model_type, **changes)
    return made


def files(package: Path) -> dict[str, bytes]:
    return {f.relative_to(package).as_posix(): f.read_bytes() for f in package.rglob("*") if f.is_file()}


@pytest.mark.parametrize(("model", "start", "end", "quantization", "stretches"), CASES)
def test_any_sequence_of_kinds_is_plain_coremltools_byte_for_byte(
    model: str, start: int, end: int, quantization: str, stretches: int, folder: Path, tmp_path: Path
) -> None:
    source = folder / model
    part = layers_part(source, start, end)
    assert sample.stretches(part) == stretches
    package.save(trace.convert(part, PartWeights(part, source), quantization), tmp_path / "plain.mlpackage")
    convert_stamped(part, source, quantization, tmp_path / "stamped.mlpackage")
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


def test_a_mixed_part_s_template_serves_every_part_of_its_order_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in the model it starts."""
    asked: list[object] = []
    monkeypatch.setattr(sample, "known_template", lambda *form: asked.append(form))
    part = layers_part(folder / "lfm2", 1, 3)  # a convolution, then attention
    other = layers_part(folder / "lfm2", 2, 4)  # the other way round
    for each in (part, replace(part, start=41, end=43), other):
        sample.template(each, "int8", None)
    assert asked[0] == asked[1] != asked[2]
