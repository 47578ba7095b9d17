"""calibration: hidden states of transformers for the calibration text, original weights, at the edges of parts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import ConfigError
from shardmill.files import read_json
from shardmill.pipeline.task import Action, Task, Tools, source_folder


def task(summary: Path, record: Path, text: list[Path], settings: Mapping[str, Any] | None, tools: Tools) -> Task:
    """Describe a safetensors file of seen_I and held_I [windows, n, d] before each part's first layer I."""
    assert settings is not None, "only a build with calibration has this step"
    plan, (file,) = read_json(summary), text
    starts = {part["start"] for part in plan["parts"] if part["kind"] == "layers"}
    wanted = sorted(starts | {plan["architecture"]["layers"]})

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.calibration import write_edges
        from shardmill.precision.original import original
        from shardmill.precision.windows import halves

        source = source_folder(record)
        size = min(settings["window"], plan["context"])
        first, second = halves(source, file.read_text(encoding="utf-8"), size)
        for name, cut in (("seen", first), ("held", second)):
            if len(cut) < settings[name]:
                raise ConfigError(
                    f"convert.calibration.text: half of {file} gives {len(cut)} windows of {size} tokens; "
                    f"calibration.{name} asks for {settings[name]}"
                )
        seen, held_out = first[: settings["seen"]], second[: settings["held"]]
        write_edges(original(source, plan), seen, held_out, wanted, made["edges"])

    inputs = {"source": plan["source"], "text": hashlib.sha256(file.read_bytes()).hexdigest()}
    params = {"context": plan["context"], "layers": wanted, **{k: settings[k] for k in ("seen", "held", "window")}}
    return Task(work, Action("calibration", inputs, params, **tools))
