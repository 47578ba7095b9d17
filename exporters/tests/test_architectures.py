"""Every architecture of the table: exported, run, and compared with transformers, in fp32 and fp16."""

from __future__ import annotations

from pathlib import Path

import limits
import pytest
import torch
from architectures import ALL, tensors
from transformers.exporters.base import ExportedModel
from transformers_coreml import export_model

DEPTH = 4  # layers of the deepest tiny models
LIMITS = {
    "fp32": limits.model(DEPTH, 1536),  # numbers of the widest patch
    # The engine rounds each result to fp16 once, whatever the length of its sum.
    "fp16": limits.sums("fp16", 1, limits.LAYER * DEPTH + limits.HEAD),
}
# One of each kind: masks, GELU by tanh, inputs that decide sizes, convolutions, sound, routed experts.
BY_DAY = ("bert", "siglip_vision", "siglip2_vision", "swin", "wav2vec2", "qwen3_moe")
# What can't be exported, and the words by which torch, transformers or coremltools say why.
REFUSED = {}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.slow) for name in ALL if name not in REFUSED],
)
def test_an_exported_model_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    model, inputs = ALL[name].build()
    with torch.no_grad():
        expected = tensors(model(**inputs))
    given = {key: value for key, value in inputs.items() if isinstance(value, torch.Tensor)}
    for precision, limit in LIMITS.items():
        export_model(model, inputs, precision=precision, constants=ALL[name].constants).save_pretrained(tmp_path)
        found = tensors(ExportedModel.from_pretrained(tmp_path)(**given))
        for place, (result, wanted) in enumerate(zip(found, expected, strict=True)):
            if wanted.numel():
                limits.numbers_agree(f"{name} {precision}, output {place}", result, wanted, limit)
