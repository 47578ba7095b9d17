"""Every architecture of the table: exported, run, and compared with transformers, in fp32 and fp16."""

from __future__ import annotations

import re
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
# What can't be exported, and a word of the error of torch, transformers or coremltools.
REFUSED = {
    "nystromformer": "broadcast",  # the model's own mask has another size than its landmarks
    "encodec": "data-dependent",
    "hiera": "rank <= 5",
    "rt_detr": "rank <= 5",
}


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


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_exported_is_still_refused(name: str) -> None:
    """architectures.md names it; a version that takes it would make the row wrong."""
    model, inputs = ALL[name].build()
    with pytest.raises(Exception, match=REFUSED[name]):
        export_model(model, inputs)


def test_the_page_has_every_architecture() -> None:
    page = (Path(__file__).parents[1] / "architectures.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| (\w+) \| [\d.]", page, re.MULTILINE) == [name for name in ALL if name not in REFUSED]
    assert set(re.findall(r"^\| (\w+) \| [^\d]", page, re.MULTILINE)) - {"architecture"} == {*REFUSED}
