"""benchmark: speed of the built model on this machine, through its resident server, the engine named."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill.checkpoint.hashing import hash_file
from shardmill.files import digest, read_json, write_json
from shardmill.pipeline.task import Action, Task, Tools

log = logging.getLogger(__name__)
PRECISION = "fp32"  # the portable engine's
NOT_MEASURED = ("source", "texts")  # where the weights came from, and chat templates, which the prompts do not use


def task(
    manifest: Path,
    text: Path,
    tasks: list[Path],
    settings: Mapping[str, Any],
    engine: Mapping[str, str],
    tools: Tools,
) -> Task:
    """Describe a speed, which depends on the programs, the requests and the machine, not on the weights' source.

    A speed that was measured with the same programs on this machine is reused; `shardmill bench` measures anew. The
    text is for the sweep over prompt lengths; `tasks` are the prompts of the tasks that the settings name.
    """

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.bench import sentences
        from shardmill.bench.speed import benchmark
        from shardmill.config import Benchmark

        for name in machine.THREAD_VARIABLES:
            os.environ.pop(name, None)  # set by the job for equal sums everywhere; the server takes the fastest count
        asked, build = Benchmark(**settings), manifest.parent
        speed = sentences.benchmark_encoder(build, asked, PRECISION, log.info) if encodes else benchmark(build, asked)
        write_json(made["speed"], speed)

    model = {key: value for key, value in read_json(manifest).items() if key not in NOT_MEASURED}
    encodes = "buckets" in model
    asked = {f"{path.parent.name}/{path.name}": hash_file(path) for path in (text, *tasks)}
    inputs = {"model": digest(model), "prompts": digest(asked)}
    params = {"settings": settings, "engine": engine, "machine": machine.machine()}
    told = {key: model[key] for key in ("reshape_frequency",) if key in model}
    return Task(work, Action("benchmark", inputs, params, **tools), {"engine": engine, **told})
