"""Limits on jobs that run at once: memory and devices; and whether a run goes on after a failure."""

from __future__ import annotations

import logging
import platform
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardmill.config import Config
from shardmill.machine import is_portable
from shardmill.pipeline import resources
from shardmill.pipeline.batch import SPLIT, Batch, alike
from shardmill.pipeline.made import each, gates, has, of_steps, values
from shardmill.pipeline.needs import STEPS, step_of
from shardmill.pipeline.options import settings
from shardmill.pipeline.resolve import expected
from shardmill.pipeline.resources import TooLarge, held_mb, most_mb
from shardmill.pipeline.steps import reference

USUAL = (100, 1)  # jobs and seconds of --max-jobs-per-timespan, if it is not given
SAID = re.compile(rf"^  {TooLarge.__name__}: (.+)$", re.MULTILINE)  # in Snakemake's report of an error
EACH_RULE = "Loading script code for rule "  # begins a line of Snakemake's for each rule in its report
LOGGER = "snakemake.logging"  # Snakemake's
SOLVER = "cbc"  # the program of Snakemake's scheduler ilp, as PATH may have it


def use_own_solver() -> None:
    """Make the scheduler ilp look for its solver in PATH on a Mac with Apple silicon.

    The solver that PuLP 3 carries is an x86_64 program there. Without Rosetta it can't be started, and Snakemake 9.27
    ends with a traceback before the first job (snakemake/snakemake#3007). Where PATH has no solver, Snakemake says so
    and takes its scheduler greedy. Profiles of this workflow ask for greedy; this is for whoever has a profile of their
    own, or uses the workflow as a module. It works only while the Snakefile is read.
    """
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        carried = getattr(sys.modules.get("pulp"), "PULP_CBC_CMD", None)  # Snakemake has imported it, if it is there
        if carried:
            carried.pulp_cbc_path = SOLVER


def go_on(batch: Batch, workflow: Any) -> None:
    """Let a run go on when a job fails, as --keep-going does: a batch always, one model after a gate's job.

    So all gates judge before the run ends, and nobody finds one failure after another.
    """
    scheduler = workflow.scheduler
    if not scheduler.keepgoing:
        scheduler.keepgoing = batch.listed or _AfterGates(scheduler, {rule.name for rule in gates(workflow)})


class _AfterGates:
    """What Snakemake's scheduler asks after each failure: true as long as no other jobs than gates' have failed."""

    def __init__(self, scheduler: Any, names: set[str]) -> None:
        self._scheduler, self._names = scheduler, names

    def __bool__(self) -> bool:
        return all(job.rule.name in self._names for job in failed_jobs(self._scheduler))


def failed_jobs(scheduler: Any) -> list[Any]:
    """Return the jobs of a run that have failed; the jobs of a group (for a cluster) count one by one."""
    return [job for one in scheduler.failed for job in getattr(one, "jobs", [one])]


def say_in_one_line() -> None:
    """Let Snakemake say of a job that is too large what `TooLarge` says, without a traceback of Snakemake's own.

    A report by Snakemake (--report) then has no line for each rule either, which all have the same script.
    """

    def shorten(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(EACH_RULE):
            return False
        match = SAID.search(record.getMessage()) if record.levelno >= logging.ERROR else None
        if match:
            record.msg, record.args = f"shardmill: {match[1]}", ()
        return True

    logging.getLogger(LOGGER).addFilter(shorten)


def limit_ane(workflow: Any) -> None:
    """Let one job at a time use the Neural Engine, on a Mac without `--resources ane=N`."""
    if not is_portable() and workflow.is_main_process and workflow.global_resources.get("ane").value is None:
        workflow.global_resources["ane"] = 1


def start_without_delay(workflow: Any) -> None:
    """Lift Snakemake's usual limit of jobs that start in a second; keep a limit that was given.

    Under a limit, Snakemake 9.27 sets a timer each time it looks for jobs to start, and looks again when the timer
    fires. Every job that has ended adds one more look each second, until the scheduler occupies a whole core.
    """
    limit = workflow.scheduling_settings.max_jobs_per_timespan
    if limit and (limit.max_jobs, limit.timespan) == USUAL:
        workflow.scheduler.job_rate_limiter = None


def memory(batch: Batch, workflow: Any) -> Callable[..., int]:
    """Return the function that all rules declare as mem_mb, see `resources.declared`."""
    limit, beside = most_mb(workflow), held_mb(workflow)
    known = {name: _known(config) for name, config in batch.models.items()}

    planning = False

    def largest(error: TooLarge) -> TooLarge:
        """Return the error that the real run would begin with, if this run plans only: there `onstart` is not run."""
        nonlocal planning
        if planning or not workflow.dryrun:
            return error
        planning = True
        worst = _largest(partial(_expand, job) for job in workflow.dag.needrun_jobs())
        planning = False
        return worst or error

    @cache
    def of_model(step: str, model: str) -> resources.Resource | int:
        return _declared(step, known[model], limit, beside)

    def declared(wildcards: Any, input: Any, threads: int, rulename: str) -> int:
        of_this = of_model(step_of(rulename), wildcards.model)
        if isinstance(of_this, int):
            return of_this
        try:
            return of_this(wildcards, input, threads)
        except TooLarge as error:
            if batch.listed:  # known only from the checkpoint: the job gets all memory; if it fails, it fails alone
                return error.limit
            raise largest(error) from None

    return declared


def _known(config: Config) -> resources.Known:
    """Return the sizes of the jobs of a model."""
    positions = reference.positions(settings(config)["parity"], config.length)
    return resources.known_sizes(Path("build") / config.model, positions, cache(partial(expected, config)))


def _declared(step: str, known: resources.Known, limit: int | None, beside: int) -> resources.Resource | int:
    """Return what the jobs of a step of a model declare, see `resources.declared`."""
    row = STEPS[step]
    return resources.declared(known, step, resources.on_this_machine(row.needs), limit, beside, row.each_thread)


def that_fit(batch: Batch, workflow: Any) -> Batch:
    """Return a list's models without models that need more memory than the run may use, once its rules are read.

    If no model is left, the run ends with one line.
    """
    if not (batch.listed and workflow.is_main_process):
        return batch
    errors = {model: too_large(config, workflow) for model, config in batch.models.items()}
    misfits = {batch.files[model]: f"{batch.files[model]}: {error}" for model, error in errors.items() if error}
    models = {model: config for model, config in batch.models.items() if not errors[model]}
    if misfits and not models:
        sys.exit(f"shardmill: {next(iter(misfits.values()))}")
    rules = {model: one.rule for one in alike(batch, SPLIT) for model in one.models}  # which have been read
    files = {model: batch.files[model] for model in models}
    return replace(batch, models=models, refused={**batch.refused, **misfits}, files=files, rules=rules)


def too_large(config: Config, workflow: Any) -> TooLarge | None:
    """Return the job of a model's whole build that needs the most memory, if that is more than the run may use.

    Rules whose memory the user sets (`--set-resources`) are not checked.
    """
    limit, beside = most_mb(workflow), held_mb(workflow)
    theirs = workflow.resource_settings.overwrite_resources or {}
    known = cache(_known(config))  # no plan.json appears while the rules are read

    def ask(rule: Any, wildcards: dict[str, str]) -> None:
        declared = _declared(step_of(rule.name), known, limit, beside)
        if not isinstance(declared, int):
            declared(SimpleNamespace(get=wildcards.get), [f"build/{config.model}"])

    rules = (rule for rule in of_steps(workflow) if has(config, rule))
    return _largest(
        partial(ask, rule, {wildcard: value})
        for rule in rules
        if "mem_mb" not in theirs.get(rule.name, {})
        for wildcard in (each(rule),)
        for value in (values(config, wildcard) if wildcard else ("",))
    )


def demand_room(batch: Batch, workflow: Any) -> None:
    """End the run with one line if any of its jobs needs more memory than there is, except for a batch."""
    if batch.listed:
        return
    worst = _largest(partial(_expand, job) for job in workflow.dag.needrun_jobs())
    if worst:
        sys.exit(f"shardmill: {worst}")


def _expand(job: Any) -> None:
    """Work out what Snakemake's job declares, without keeping it: the plan may tell more, later. Raises TooLarge."""
    try:
        job.rule.expand_resources(job.wildcards_dict, job.input, job.attempt)
    except Exception as error:
        if isinstance(error.__cause__, TooLarge):
            raise error.__cause__ from None
        raise  # as it would be when the job's turn comes


def _largest(asked: Iterable[Callable[[], None]]) -> TooLarge | None:
    """Return the error of the job that needs most memory; of equal ones the last by name, as `plan` does."""
    errors: list[TooLarge] = []
    for ask in asked:
        try:
            ask()
        except TooLarge as error:
            errors.append(error)
        except FileNotFoundError:  # known only when the checkpoint is there
            continue
    return max(errors, key=lambda error: (error.mb, str(error)), default=None)  # Snakemake's jobs have no order
