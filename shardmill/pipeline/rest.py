"""How long a run of Snakemake still takes, from what jobs take on this machine and on what this run's jobs took."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from shardmill.files import load_json
from shardmill.pipeline import times
from shardmill.pipeline.batch import BUILDS, Batch
from shardmill.pipeline.needs import step_of
from shardmill.pipeline.resolve import expected
from shardmill.pipeline.words import about

DOUBT = 3.0  # seconds of work that count as if they had been done and were all work
ENOUGH = 5.0  # seconds of CPU time of this run's jobs that tell how busy the machine is


class Rest:
    """Tells how long a run still takes.

    What its jobs take in place of what was expected of them says how busy the machine is, see `times.others_beside`.
    """

    def __init__(self, batch: Batch, workflow: Any) -> None:
        self.batch, self.workflow = batch, workflow
        self.times: times.Times | None = None
        self.sizes: dict[str, times.Sizes] = {}
        self.took, self.used = 0.0, 0.0  # by the clock, and CPU time, of the jobs that worked
        # Seconds that were expected of all jobs that have ended, and of those among them that had work to do.
        self.ended, self.worked = 0.0, 0.0

    def seconds(self, job: Any) -> float | None:
        """Return the CPU time of a job of Snakemake's, or, on Core ML, its time; None if it is not known."""
        self.times = self.times or times.times()
        known = self._known(job.wildcards_dict["model"])
        part = str(job.wildcards_dict.get("part", ""))
        return self.times.seconds(step_of(job.rule.name), part, known) if known else None

    def words(self, todo: Iterable[tuple[Any, float]]) -> str:
        """Return how long jobs still take, for a line; empty if that is not known, or another machine does them.

        Args:
            todo: Snakemake's jobs, each with the seconds that it has run already.
        """
        at_once = self.workflow.global_resources["_cores"].value
        if not self.workflow.local_exec or not at_once:
            return ""
        rows = []
        for job, spent in todo:
            seconds = self.seconds(job)
            if seconds is None:
                return ""
            rows.append((step_of(job.rule.name), max(seconds - spent / self.slowness, seconds / 10)))
        left = times.span(rows, at_once, self.others(at_once)) * self.share
        return f"; {about(left)} left" if rows else ""

    @property
    def share(self) -> float:
        """Return the share of the work that is done, and not found in the store, as far as the jobs so far show."""
        return (self.worked + DOUBT) / (self.ended + DOUBT)

    @property
    def slowness(self) -> float:
        """Return how many times their CPU time jobs take by the clock."""
        return max(1.0, self.took / self.used) if self.used else 1.0

    def others(self, at_once: int) -> float:
        """Return how many processes of others want a core: as the system says, and then as this run's jobs show."""
        return times.others_beside(self.slowness, at_once) if self.used > ENOUGH else times.busy()

    def learn(self, job: Any, seconds: float, cpu: float | None) -> None:
        """Take a job that has ended into account.

        Args:
            job: Snakemake's.
            seconds: by the clock.
            cpu: its CPU time; None if its result was in the store, or if that is not known.
        """
        known = self._known(job.wildcards_dict["model"])
        if self.times and known:
            step, part = step_of(job.rule.name), str(job.wildcards_dict.get("part", ""))
            expected = self.times.expected(step, part, known)
            self.ended += expected
            if cpu is not None:
                used = cpu + times.STARTED
                self.times.learn(step, expected, seconds if self.times.clock and step in times.LOADING else used)
                self.took, self.used, self.worked = self.took + seconds, self.used + used, self.worked + expected

    def keep(self) -> None:
        """Remember what was learned, for the next run."""
        if self.times and self.used:
            self.times.keep()

    def _known(self, model: str) -> times.Sizes | None:
        if model not in self.sizes:
            config = self.batch.models[model]
            for read in (lambda: load_json(BUILDS / model / "plan.json"), lambda: expected(config)):
                with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                    self.sizes[model] = times.sizes(read(), config)
                    break
        return self.sizes.get(model)
