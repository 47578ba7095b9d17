"""What the jobs of a run need of memory, and whether it is more than the run may use, asked before any job begins."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardmill.config import Config
from shardmill.pipeline import dag, memory
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.configured import settings
from shardmill.pipeline.memory import TooLarge
from shardmill.pipeline.settle import expected
from shardmill.pipeline.steps import reference
from shardmill.pipeline.table import STEPS
from shardmill.pipeline.where import held_mb, most_mb


def mem_mb(batch: Batch, workflow: Any) -> Callable[[str], memory.Resource | int]:
    """What a step's rule declares as mem_mb, see `memory.declared` and `where`."""
    limit, beside = most_mb(workflow), held_mb(workflow)
    known = {name: _known(config) for name, config in batch.models.items()}

    @cache
    def of_model(step: str, model: str) -> memory.Resource | int:
        return _declared(step, batch.models[model], known[model], limit, beside)

    def of_step(name: str) -> memory.Resource | int:
        first = of_model(name, next(iter(batch.models)))
        if isinstance(first, int):
            return first  # and so of every model

        def declared(wildcards: Any, input: Any, threads: int = 1) -> int:
            of_this = of_model(name, wildcards.model)
            if isinstance(of_this, int):
                return of_this
            try:
                return of_this(wildcards, input, threads)
            except TooLarge as error:
                if batch.listed:  # only the checkpoint told: the job gets all there is, and fails alone if it does
                    return error.limit
                raise

        return declared

    return of_step


def _known(config: Config) -> memory.Known:
    """The sizes of the jobs of a model."""
    positions = reference.positions(settings(config)["parity"], config.length)
    return memory.known_sizes(Path("build") / config.model, positions, cache(partial(expected, config)))


def _declared(step: str, config: Config, known: memory.Known, limit: int | None, beside: int) -> memory.Resource | int:
    """What the jobs of a step of a model declare, see `memory.declared`."""
    needs = STEPS[step].needs
    need = needs if isinstance(needs, memory.Need) else needs[config.convert.method]
    return memory.declared(known, step, need, limit, beside, STEPS[step].each_thread)


def too_large(config: Config, workflow: Any) -> TooLarge | None:
    """The job of a model's whole build that needs the most memory, if that is more than the run may use.

    Rules whose memory the user sets (`--set-resources`) are taken at their word.
    """
    limit, beside = most_mb(workflow), held_mb(workflow)
    theirs = workflow.resource_settings.overwrite_resources or {}
    known = cache(_known(config))  # no plan comes while the rules are read

    def ask(job: dag.Job) -> None:
        declared = _declared(job[0], config, known, limit, beside)
        if not isinstance(declared, int):
            declared(SimpleNamespace(get=dag.own(STEPS, job).get), [f"build/{config.model}"])

    jobs = (job for job in dag.jobs(STEPS, config) if "mem_mb" not in theirs.get(job[0], {}))
    return _largest(partial(ask, job) for job in jobs)


def demand_room(batch: Batch, workflow: Any) -> None:
    """Ends the run with one line if any of its jobs needs more memory than there is; of a batch, none does."""
    if batch.listed:
        return
    worst = _largest(partial(_expand, job) for job in workflow.dag.needrun_jobs())
    if worst:
        sys.exit(f"shardmill: {worst}")


def _expand(job: Any) -> None:
    """Works out what Snakemake's job declares, without keeping it: the plan may tell more, later. Raises TooLarge."""
    try:
        job.rule.expand_resources(job.wildcards_dict, job.input, job.attempt)
    except Exception as error:
        if isinstance(error.__cause__, TooLarge):
            raise error.__cause__ from None
        raise  # as it would be when the job's turn comes


def _largest(asked: Iterable[Callable[[], None]]) -> TooLarge | None:
    """The largest of what these raise."""
    found: list[TooLarge] = []
    for ask in asked:
        try:
            ask()
        except TooLarge as error:
            found.append(error)
        except FileNotFoundError:  # known only when the checkpoint is there
            continue
    return max(found, key=lambda error: error.mb, default=None)
