"""Memory and cores: what a job declares, and what the machine, a container or a Slurm job grants."""

from __future__ import annotations

import errno
import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.machine import memory_bytes
from shardmill.pipeline.storage import home_of

SNAKEMAKE_MB = 500  # a job that was sent somewhere holds up to three Snakemakes of 148 MB beside its own process
MATRICES = 4  # that a job measures at a time, at most
TENTHS, TENTHS_OF_A_MAC = 9, 6  # of this machine's memory, for all jobs together, see `most_mb`
NODE_CORES = 4  # as many as any rule asks for that does not want a machine to itself


def _sends_jobs(workflow: Any) -> bool:
    """Return whether this process sends its jobs to other machines."""
    return bool(workflow.is_main_process and workflow.global_resources.get("_nodes").value is not None)


def most_mb(workflow: Any) -> int | None:
    """Return MB that jobs may use together, None for any: what `--resources mem_mb` says, else a share of what is here.

    The share is nine tenths, and six on a Mac. There the GPU and the Neural Engine use the same memory, and the weights
    of each loaded program are held by the system beside the process that has loaded them.

    The share is told to Snakemake, which keeps to it. It says nothing of machines that jobs are sent to.
    """
    given: int | None = workflow.global_resources.get("mem_mb").value
    if given is None and workflow.is_main_process and not _sends_jobs(workflow):
        tenths = TENTHS_OF_A_MAC if platform.system() == "Darwin" else TENTHS
        given = memory_bytes() * tenths // 10_000_000
        workflow.global_resources["mem_mb"] = given
    return given


def held_mb(workflow: Any) -> int:
    """Return MB that a job needs beside its own process."""
    return SNAKEMAKE_MB if _sends_jobs(workflow) else 0


def matrices_at_once(wildcards: Any) -> int:
    """Return the cores of a job that measures a part's matrices one by one; a slice of the LM head has one only."""
    return MATRICES if wildcards.part.startswith("layers") else 1


def every_core(workflow: Any) -> int:
    """Return the cores of a job that has a machine to itself: all that --cores gives.

    Where jobs go to other machines there may be no such number; then it is NODE_CORES, and of a larger node
    `--set-threads benchmark=N` takes more.
    """
    given: int | None = workflow.global_resources["_cores"].value  # `workflow.cores` ends the run where there is none
    return given or NODE_CORES


MILLION = 1_000_000
FEW_LAYERS = 4  # whose weights a job has mapped at a time, at most
Resource = Callable[..., int]
Known = Callable[[str, str | None], "Sizes"]  # of a job, by its first input and its part


@dataclass(frozen=True)
class Sizes:
    """Millions of parameters, and of logits."""

    part: float = 0.0  # of the job's own part
    largest: float = 0.0  # of the largest tensor of that part, or of all programs
    layer: float = 0.0
    whole: float = 0.0  # of a layer that transformers is given whole: not where it takes linear layers by rows
    model: float = 0.0  # of all programs
    table: float = 0.0  # of the embedding table
    expanded: float = 0.0  # of the job's own part, or of all programs, that the portable engine holds in fp32
    logits: float = 0.0  # not of parameters: positions of the parity text times the vocabulary
    vocab: float = 0.0  # nor this: tokens in the vocabulary
    bucket: float = 0.0  # nor this: tokens that a pass of the job's own encoder takes
    wide: float = 0.0  # MB, of layers, table and head, by which a checkpoint in fp32 is larger than one of two bytes


@dataclass(frozen=True)
class Need:
    """MB, and bytes for each item of what `Sizes` names alike."""

    base: int
    part: float = 0.0
    largest: float = 0.0
    layer: float = 0.0
    whole: float = 0.0
    model: float = 0.0
    table: float = 0.0
    expanded: float = 0.0
    logits: float = 0.0
    vocab: float = 0.0
    bucket: float = 0.0

    def mb(self, sizes: Sizes) -> int:
        """Return the sum in MB, rounded up."""
        items = [field.name for field in fields(self) if field.name != "base"]
        shares: list[float] = [getattr(self, name) * getattr(sizes, name) for name in items]
        reads_layers = self.layer or self.whole or self.table
        return ceil(self.base + sum(shares) + (sizes.wide if reads_layers else 0))


NOTHING = Need(0)


class TooLarge(ShardmillError):
    """A job needs more memory than its build may use."""

    def __init__(self, job: str, mb: int, limit: int) -> None:
        super().__init__(
            f"{job}: needs {mb} MB of memory and this build may use {limit}; allow more with --resources mem_mb={mb}"
        )
        self.mb, self.limit = mb, limit


def declared(
    known: Known, step: str, need: Need, limit: int | None, beside: int = 0, each: Need = NOTHING
) -> Resource | int:
    """Return what a step's rule declares as mem_mb: a number, or a function of a job's wildcards, input and threads.

    The function raises TooLarge for a job that needs more than the limit, which Snakemake would start all the
    same, and FileNotFoundError, which it shows as <TBD>, where the sizes are not known yet.

    Args:
        known: the sizes of a job, by its first input and its part, see `known_sizes`.
        step: its name, for the error line.
        need: what its jobs need.
        limit: MB that jobs may use together; None for any.
        beside: MB that a job holds beside its own process.
        each: what every thread after the first needs; a job that gets less starts fewer, see `threads_within`.
    """
    need = replace(need, base=need.base + beside)
    if need == Need(need.base):
        return need.base

    def mem_mb(wildcards: Any, input: Any, threads: int = 1) -> int:
        part = wildcards.get("part")
        found = known(str(input[0]), part)
        mb = need.mb(found)
        _check_memory(f"{step} {part}" if part else step, mb, limit)
        wanted = mb + (threads - 1) * each.mb(found)
        return wanted if limit is None else min(wanted, limit)

    return mem_mb


def known_sizes(build: Path, positions: int, expected: Callable[[], Mapping[str, Any]]) -> Known:
    """Return the sizes of a build's jobs, by its plan.json or, before there is one, estimated from config.json.

    The function raises FileNotFoundError where neither is known.

    Args:
        build: the folder of a model's build.
        positions: of the parity text, for each of which there is a row of logits.
        expected: reads what `sizes` needs of a plan, see `resolve.expected`.
    """

    def plan(file: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = load_json((home_of(file, build.name) or Path()) / build / "plan.json")
        return found

    def known(file: str, part: str | None) -> Sizes:
        for read in (partial(plan, file), expected):
            with suppress(OSError, ValueError, LookupError, TypeError):  # none yet, damaged, or an older version's
                return job_sizes(read(), positions, part)
        raise FileNotFoundError(errno.ENOENT, "no plan yet", file)

    return known


def threads_within(mb: int, threads: int, need: Need, each: Need, found: Sizes) -> int:
    """Return how many threads a job may start that was given so much memory; at least one.

    Args:
        mb: what it was given, in MB.
        threads: what it was given of these.
        need: of the job with one thread.
        each: of every further one.
        found: the sizes of what it has to do with.
    """
    more = max(0, mb - need.mb(found)) // max(1, each.mb(found))
    return min(threads, 1 + more)


def _check_memory(job: str, mb: int, limit: int | None) -> None:
    """Raise TooLarge for a job that does not fit."""
    if limit is not None and mb > limit:
        raise TooLarge(job, mb, limit)


def job_sizes(plan: Mapping[str, Any], positions: int, part: str | None = None) -> Sizes:
    """Return the sizes of a job of one part, or of the whole model, by plan.json and the positions fed."""
    rows = {row["name"]: row for row in plan["parts"]}
    every = sum(row["expanded"] for row in rows.values() if row["kind"] != "embedding")
    largest = max((row["largest_tensor"] for row in rows.values() if row["kind"] != "embedding"), default=0)
    own = rows[part] if part else {"parameters": 0, "largest_tensor": largest, "expanded": every}
    layers = sum(row["parameters"] for row in rows.values() if row["kind"] in ("layers", "experts"))
    layers += max((row["parameters"] for row in rows.values() if row["kind"] == "encoder"), default=0)  # each has all
    table = rows["embedding"]["parameters"]
    layer = layers / plan["architecture"]["layers"] / MILLION
    encoders = [name for name, row in rows.items() if row["kind"] == "encoder"]
    buckets = dict(zip(encoders, plan.get("buckets") or (), strict=True))
    return Sizes(
        part=own["parameters"] / MILLION,
        largest=own["largest_tensor"] / MILLION,
        layer=layer,
        whole=layer if encoders or plan["architecture"]["graph"]["experts"] else 0.0,
        model=(sum(row["parameters"] for row in rows.values()) - table) / MILLION,
        table=table / MILLION,
        expanded=own["expanded"] / MILLION,
        logits=positions * plan["architecture"]["vocab"] / MILLION,
        vocab=plan["architecture"]["vocab"] / MILLION,
        bucket=buckets.get(part, 0) / MILLION,
        wide=max(0, plan["item_bytes"] - 2) * (FEW_LAYERS * layer + 2 * table / MILLION),
    )
