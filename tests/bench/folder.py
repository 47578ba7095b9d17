"""A build folder for the benchmark, of what the fixture `built` made."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
from serve.fake import byte_tokenizer

from shardmill.runtime.manifest import FORMAT, entries, in_place

from .scripted import NAME, VOCAB


def build_folder(built: tiny.Build, folder: Path) -> Path:
    """model.json, and links to the programs where they are."""
    manifest = in_place(built.plan, built.packages, built.table)
    manifest["tokenizer"] = {"path": str((built.source / "tokenizer.json").resolve())}
    for entry in entries(manifest):
        path = Path(entry["path"]).resolve()
        (folder / path.name).symlink_to(path)
        entry["path"] = path.name
    (folder / "model.json").write_text(json.dumps(manifest))
    return folder


def scripted_folder(folder: Path) -> Path:
    """model.json and the tokenizer of the scripted model, which has no programs."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    manifest = {
        "format": FORMAT,
        "model": NAME,
        "context": 256,
        "tokens_max": 4,
        "widths": [1, 4],
        "vocab": VOCAB,
        "rope": {"rope": {"inv_freq": [], "scale": 1.0}},
        "window": None,
        "window_slots": 0,
        "conv_taps": 0,
        "eos_token_ids": [VOCAB - 1],
        "embedding": {"path": "embedding.safetensors"},
        "parts": [
            {
                **{"name": "head_0", "kind": "head", "start": 0, "end": VOCAB, "output": "logits"},
                **{"inputs": {"hidden": [1, 4, "T", 1]}, "states": {}, "program": {"path": "head_0.mlmodelc"}},
            }
        ],
        "tokenizer": {"path": "tokenizer.json"},
    }
    (folder / "model.json").write_text(json.dumps(manifest))
    return folder
