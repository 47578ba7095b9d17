"""A model.json of one part, as small as a runtime takes it."""

from __future__ import annotations

from typing import Any

from shardmill.runtime.manifest import runtime_manifest

HEAD = {"inputs": {"hidden": [1, 96, "T", 1]}, "states": {}, "output": "logits"}


def manifest(**changes: Any) -> dict[str, Any]:
    """Its content, with changes; nothing that it names needs to be there."""
    plan = {
        "model": "tiny",
        "context": 256,
        "tokens_max": 4,
        "widths": [1, 4],
        "verify": 4,
        "eos_token_ids": [256],
        "window_slots": 0,
        "buckets": [],
        "architecture": {
            "vocab": 257,
            "graph": {"conv_taps": 0},
            "ropes": {"rope": {"inv_freq": [1.0], "scale": 1.0}},
            "window": None,
        },
        "parts": [{"name": "head_0", "kind": "head", "start": 0, "end": 257, **HEAD}],
    }
    programs = {"head_0": {"path": "compiled/head_0.mlmodelc", "files": {"model.mil": "5" * 64}}}
    package = {"path": "packages/head_0.mlpackage", "files": {"Manifest.json": "3" * 64, "a/b": "4" * 64}}
    return {
        **runtime_manifest(plan, programs, {"path": "embedding.safetensors", "sha256": "1" * 64}),
        "packages": {"head_0": package},
        "tokenizer": {"path": "source/tokenizer.json", "sha256": "2" * 64},
        "texts": {"path": "source", "files": {"tokenizer_config.json": "6" * 64}},
        **changes,
    }
