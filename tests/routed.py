"""Tiny models with experts that the host routes to, built as the pipeline builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import templates
import tiny
from models import tiny_families
from models.tiny_configs import BESIDE

from shardmill.convert.stamped import convert_stamped

# Groups of a layer's experts. Sixteen of qwen3_moe's 80 experts share a projection, the others' have their own.
GROUPS = {"granitemoe": 4, "qwen3_moe": 5, "zaya": 3, "gpt_oss": 4, "lfm2_moe": 2}
GROUPS |= {"granitemoehybrid": 3, "qwen3_5_moe_text": 3}
CHANGES = {"granitemoehybrid": BESIDE}  # of a tiny config without experts


def checkpoint(model_type: str, folder: Path, **changes: Any) -> Path:
    """A fetched checkpoint of a family."""
    changes = CHANGES.get(model_type, {}) | changes
    return tiny.fetched(tiny_families.write_tiny(model_type, folder / "checkpoint", **changes), folder / "source")


def build(source: Path, folder: Path, experts: int | str, weights: str = "int8", **changes: Any) -> tiny.Build:
    """A build of a checkpoint: `experts` as in a config."""
    options = {"topology": "auto", "head": {"slices": 1}, "experts": experts, "convert": {"precision": weights}}
    parts, content = tiny.split(source, **options, **changes)
    packages = {}
    folder.mkdir()
    for name, part in parts.items():
        if part.kind != "embedding":
            packages[name] = folder / f"{name}.mlpackage"
            convert_stamped(part, source, weights, packages[name], templates.FOLDER)
    table = tiny.write_table(parts["embedding"], source, folder / "embedding.safetensors")
    return tiny.Build(source, parts, content, packages, table, tiny.sampled_text(source))
