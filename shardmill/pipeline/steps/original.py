"""original: outputs of transformers for windows of text that neither the quantisers nor the search have seen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import ConfigError
from shardmill.files import read_json
from shardmill.pipeline.task import Action, Task, Tools, source_folder


def task(summary: Path, record: Path, text: list[Path], settings: Mapping[str, Any] | None, tools: Tools) -> Task:
    """Describe a safetensors file of tokens [windows, n], and of the states after the last layer, last [windows, n, d].

    The settings: `window` is the length, `held` the skipped windows of the text's second half, `windows` the number.
    """
    assert settings is not None, "only a build with calibration has this step"
    plan, (file,) = read_json(summary), text
    skipped, count = settings["held"], settings["windows"]

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.measured import write_original
        from shardmill.precision.original import original
        from shardmill.precision.windows import halves

        source, size = source_folder(record), min(settings["window"], plan["context"])
        _, windows = halves(source, file.read_text(encoding="utf-8"), size)
        if len(windows) < skipped + count:
            raise ConfigError(
                f"convert.search.windows: half of {file} gives {len(windows)} windows of {size} tokens; the "
                f"config asks for {count} more than the first {skipped}, on which costs are measured"
            )
        write_original(original(source, plan), windows[skipped : skipped + count], made["states"])

    inputs = {"source": plan["source"], "text": hashlib.sha256(file.read_bytes()).hexdigest()}
    return Task(work, Action("original", inputs, {"context": plan["context"], **settings}, **tools))
