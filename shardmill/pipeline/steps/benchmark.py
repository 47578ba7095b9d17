"""benchmark: speed of the built model on this machine, through its resident server, the engine named."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill.checkpoint.hashing import hash_file
from shardmill.files import digest, write_json
from shardmill.pipeline.job import THREADS
from shardmill.pipeline.steptable import ingredients
from shardmill.pipeline.store import Action, Store


def run(
    manifest: Path, text: Path, tasks: list[Path], speed: Path, receipt: Path, store: str, settings: Mapping[str, Any]
) -> None:
    """Args: manifest model.json, which there is only once every gate has passed; speed the result.

    `text` and `tasks`, the files of prompts, are named by the settings and are inputs so that Snakemake sees them
    change. What was measured of these very programs on this machine stands: `shardmill bench` measures anew.
    """

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.bench.speed import benchmark
        from shardmill.config import Benchmark

        for name in THREADS:
            os.environ.pop(name, None)  # the job's, for sums alike everywhere; the server takes what is quickest
        write_json(made["speed"], benchmark(manifest.parent, Benchmark(**settings)))

    todo = action(json.loads(manifest.read_text()), [text, *tasks], settings)
    Store(Path(store)).perform(todo, {"speed": speed}, receipt, work, engine=machine.engine())


def action(manifest: Mapping[str, Any], prompts: Sequence[Path], settings: Mapping[str, Any]) -> Action:
    """A speed depends on the programs, wherever their weights came from, on what is asked, and on the machine.

    Args: manifest model.json's content.
    """
    model = {key: value for key, value in manifest.items() if key not in ("source", "texts")}  # prompts are no chats
    asked = {f"{path.parent.name}/{path.name}": hash_file(path) for path in prompts}
    inputs = {"model": digest(model), "prompts": digest(asked)}
    params = {"settings": settings, "engine": machine.engine(), "machine": machine.machine()}
    return Action("benchmark", inputs, params, **ingredients("benchmark"))
