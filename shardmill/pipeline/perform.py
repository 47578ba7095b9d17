"""Does what a step describes, or finds it done: for a Snakemake job, and for tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.errors import GateError
from shardmill.files import digest, write_json
from shardmill.pipeline import dag
from shardmill.pipeline.receipts import read_receipt
from shardmill.pipeline.step import receipt_of
from shardmill.pipeline.store import TEMPLATES, Store
from shardmill.pipeline.task import Artifact, Task, Tools
from shardmill.pipeline.verdict import Missed, failed

if TYPE_CHECKING:
    from shardmill.config import Config


def receipt_path(artifact: Path) -> Path:
    """Where the receipt of an artifact stands, as `receipt_of` says."""
    return Path(receipt_of(str(artifact)))


def read_artifact(path: Path) -> Artifact:
    """The artifact at `path`, which is its step's only output."""
    receipt = read_receipt(receipt_path(path))
    ((name, sha256),) = receipt["outputs"].items()
    return Artifact(path, sha256, receipt["files"].get(name, {}))


def describe(
    task: Callable[..., Task], arguments: Mapping[str, Any], store: Store, tools: Tools, threads: int = 1
) -> Task:
    """What a step says of a job.

    Args:
        task: the step's function.
        arguments: the job's inputs and parameters by name; the function must take every one of them.
        store: gives what a function may ask for by name besides: `hashes` and `before_change`, and `templates`, a
            folder for what all parts share, which is named by the tools.
        tools: the step's, which it may ask for too.
        threads: how many the job may start; for functions that ask.
    """
    offers = {
        "tools": tools,
        "threads": threads,
        "hashes": store.hashes,
        "before_change": store.before_change,
        "templates": store.root / TEMPLATES / digest(tools),
    }
    asked = inspect.signature(task).parameters
    return task(**arguments, **{name: value for name, value in offers.items() if name in asked})


def arguments(steps: dag.Steps, job: dag.Job, config: Config, build: Path) -> dict[str, Any]:
    """A job's inputs and parameters by name, as the table has them.

    Args:
        steps: the table.
        job: the job.
        config: the model's.
        build: the folder that the build's files are looked for in.
    """
    step, mine = steps[job[0]], dag.own(steps, job)
    found: dict[str, Any] = {}
    waited = dag.waits(steps, job[0])  # as in a job, what these speak for is known by its receipt
    for key, files in dag.inputs(steps, job[0]).items():
        paths = dag.bound(files, dag.names(config), mine, build)
        if key in step.takes or (isinstance(files, str) and receipt_of(files) in waited):
            found[key] = [read_artifact(p) for p in paths] if isinstance(paths, list) else read_artifact(paths)
        else:
            found[key] = paths
    for key, named in step.outside.items():
        value = named(config)
        found[key] = Path(value) if isinstance(value, str) else [Path(path) for path in value]
    found.pop(dag.WAITS, None)
    return found | {key: _own(value(config), mine) for key, value in step.params.items()}


def _own(value: Any, own: Mapping[str, str]) -> Any:
    """A parameter, in place of a wildcard what that is in the job."""
    return own[value[1:-1]] if isinstance(value, str) and value[1:-1] in own else value


def taken(arguments: Mapping[str, Any]) -> dict[Path, Path]:
    """The artifacts among a job's arguments, with their receipts."""
    values = [each for value in arguments.values() for each in (value if isinstance(value, list) else [value])]
    return {value.path: receipt_path(value.path) for value in values if isinstance(value, Artifact)}


def perform(
    task: Task,
    outputs: Mapping[str, Path],
    receipt: Path | None,
    store: Store,
    reads: Mapping[Path, Path] | None = None,
) -> bool:
    """Does a job's work, or takes its result from the store; True if that took work.

    Args:
        task: what the step says of the job.
        outputs: where to put what is made, by name.
        receipt: where to say of what; None for work whose result is not kept.
        store: where results are kept.
        reads: artifacts that the work reads, with their receipts, by whose hashes the action knows them.

    Raises:
        GateError: a gate's number missed its threshold; every number is in the file beside the verdict.
    """
    if task.action is None or receipt is None:
        task.work(outputs)
        return True
    if "verdict" in outputs:
        failed(outputs["verdict"]).unlink(missing_ok=True)
    try:
        return store.perform(task.action, outputs, receipt, task.work, reads, **task.notes)
    except Missed as missed:
        numbers = failed(outputs["verdict"])
        write_json(numbers, missed.content)
        raise GateError(f"{missed}; all numbers: {numbers}") from None
