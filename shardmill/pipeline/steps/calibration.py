"""calibration: what transformers makes of the calibration text with the original weights, at the edges of parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import ConfigError
from shardmill.files import read_json
from shardmill.pipeline.task import Action, Task, Tools, source_folder


def task(summary: Path, record: Path, text: list[Path], settings: Mapping[str, Any] | None, tools: Tools) -> Task:
    """A safetensors file of seen_I and held_I [windows, n, d] before each part's first layer I, and after the last.

    Args:
        summary: plan.json.
        record: source.receipt.json, beside which the checkpoint lies.
        text: the calibration text, one file.
        settings: the config's `convert.calibration`.
        tools: what decides the result besides.
    """
    assert settings is not None, "a build without calibration has no such step"
    plan, (file,) = read_json(summary), text
    starts = {part["start"] for part in plan["parts"] if part["kind"] == "layers"}
    wanted = sorted(starts | {plan["architecture"]["layers"]})

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.calibration import windows, write_edges
        from shardmill.precision.original import original

        source = source_folder(record)
        tokenizer = read_tokenizer(source / "tokenizer.json")
        opening = tokenizer.encode("").ids
        tokens = tokenizer.encode(file.read_text(encoding="utf-8"), add_special_tokens=False).ids
        half, size = len(tokens) // 2, min(settings["window"], plan["context"])
        seen = windows(tokens[:half], opening, size, settings["seen"])
        held = windows(tokens[half:], opening, size, settings["held"])
        for name, cut in (("seen", seen), ("held", held)):
            if len(cut) < settings[name]:
                raise ConfigError(
                    f"convert.calibration.text: {file} has {len(tokens)} tokens, of which half give {len(cut)} windows "
                    f"of {size}; calibration.{name} asks for {settings[name]}"
                )
        write_edges(original(source, plan), seen, held, wanted, made["edges"])

    inputs = {"source": plan["source"], "text": hashlib.sha256(file.read_bytes()).hexdigest()}
    params = {"context": plan["context"], "layers": wanted, **{k: settings[k] for k in ("seen", "held", "window")}}
    return Task(work, Action("calibration", inputs, params, **tools))
