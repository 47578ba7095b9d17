"""The pipeline's jobs, run in this process in the order of the step table, with what each did on record.

Snakemake decides which jobs may have to run; whether a job works is decided by content, and that is what this driver
lets tests count, in a fraction of the time of forty processes.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from shardmill import config
from shardmill.pipeline import dag, fingerprint
from shardmill.pipeline.perform import arguments, describe, perform, taken
from shardmill.pipeline.remote import Remote
from shardmill.pipeline.step import RECEIPT
from shardmill.pipeline.store import Store
from shardmill.pipeline.table import RECORD, STEPS

AFTER = tuple(name for name in STEPS if dag.after_the_gates(STEPS, name))


def run(
    root: Path, content: dict[str, Any], leave_out: Collection[str] = AFTER, shared: Remote | None = None
) -> list[str]:
    """Builds a config under `root`/build; names of the jobs that worked, of those whose results are kept, in order."""
    settings = config.parse(content)
    build, store = root / "build" / settings.model, Store(root / "build/.store", shared=shared)
    worked, steps = [], dag.wanted(STEPS, settings)
    for job in dag.jobs(steps, settings):
        name = job[0]
        if name in leave_out:
            continue
        step = steps[name]
        tools = fingerprint.tools(step, "" if name == "fetch" else fingerprint.model_type(build / RECORD))
        given = arguments(steps, job, settings, build)
        task = describe(step.task, given, store, tools)
        mine = dag.own(steps, job)
        receipt = build / dag.expanded(step.receipt, dag.names(settings), mine)[0] if step.receipt else None
        if perform(task, dag.outputs(steps, job, settings, build), receipt, store, taken(given)) and receipt:
            worked.append(receipt.relative_to(build).as_posix().removesuffix(RECEIPT))
    return worked


def measure(root: Path, content: dict[str, Any]) -> list[str]:
    """The same, and model.json and the benchmark."""
    return run(root, content, ("provenance", "report"))
