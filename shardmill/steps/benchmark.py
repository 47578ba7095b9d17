"""benchmark: speed of the built model on this machine, in one resident process, the engine named."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import canonical, host

log = logging.getLogger(__name__)


def run(
    summary: Path,
    record: Path,
    bundles: list[Path],
    table: Path,
    text: Path,
    speed: Path,
    settings: Mapping[str, Any],
    gates: list[Path],
) -> None:
    """Args: summary plan.json; record source.receipt.json; bundles the .mlmodelc by part; table the embedding; text the

    prompt's; speed the result. `gates` are inputs only so that nothing is measured before it is right. A measurement
    of a machine is no content of the store: it is taken whenever Snakemake asks for it.
    """
    from shardmill.bench import speed as measure
    from shardmill.config import Benchmark
    from shardmill.engine import Engine
    from shardmill.manifest import in_place
    from shardmill.steps import source_folder
    from shardmill.steps.reference import encode

    plan = json.loads(summary.read_text())
    paths = {bundle.stem: bundle for bundle in bundles}
    with host.load_programs_as("fp16"):
        engine = Engine(in_place(plan, paths, table), Path("/"))
    threads = {}
    if host.is_portable():
        threads["threads"] = measure.fastest_threads(engine, host.set_threads)
        host.set_threads(threads["threads"])
    log.info("%d prompt lengths, %d repetitions", len(settings["prompt_tokens"]), settings["repetitions"])
    result = measure.sweep(engine, encode(source_folder(record), text), Benchmark(**settings))
    canonical.write_json(
        speed, {"engine": host.engine(), "machine": {**host.machine(), **threads}, "text": text.name, **result}
    )
