"""Memory and cores that a job declares, and that the machine, a container or a Slurm job grants."""

from __future__ import annotations

import errno
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

from shardmill.errors import ShardmillError
from shardmill.files import kept_for, load_json, write_json
from shardmill.gates.passes import LONG, sampled
from shardmill.machine import is_portable, memory_bytes, torch_build
from shardmill.models.interface import TOWER
from shardmill.models.recurrences import RECURRENCES
from shardmill.pipeline.storage import home_of

SNAKEMAKE_MB = 500  # a job on another machine holds up to three Snakemakes of 148 MB beside its own process
MATRICES = 4  # the most matrices that a job measures at a time
TENTHS, TENTHS_OF_A_MAC = 9, 6  # tenths of this machine's memory for all jobs together, see `most_mb`
NODE_CORES = 4  # the most cores that a rule asks for if its jobs can share a machine


def _sends_jobs(workflow: Any) -> bool:
    """Return whether this process sends its jobs to other machines."""
    return bool(workflow.is_main_process and workflow.global_resources.get("_nodes").value is not None)


def most_mb(workflow: Any) -> int | None:
    """Return MB that jobs may use together, from `--resources mem_mb` or as a share of the memory; None for any.

    The share is nine tenths, on a Mac six tenths. On a Mac the GPU and the Neural Engine use the same memory. The
    system also holds the weights of each loaded program beside the process that has loaded it.

    Snakemake is given the share and keeps to it. If jobs are sent to other machines, the share does not apply.
    """
    limit: int | None = workflow.global_resources.get("mem_mb").value
    if limit is None and workflow.is_main_process and not _sends_jobs(workflow):
        limit = share_mb()
        workflow.global_resources["mem_mb"] = limit
    return limit


def share_mb() -> int:
    """Return MB that jobs may use together on this machine, unless a run is told otherwise."""
    tenths = TENTHS_OF_A_MAC if platform.system() == "Darwin" else TENTHS
    return memory_bytes() * tenths // 10_000_000


def held_mb(workflow: Any) -> int:
    """Return MB that a job needs beside its own process."""
    return SNAKEMAKE_MB if _sends_jobs(workflow) else 0


def matrices_at_once(wildcards: Any) -> int:
    """Return the cores of a job that measures a part's matrices one by one; a slice of the LM head has one matrix."""
    return MATRICES if wildcards.part.startswith("layers") else 1


def every_core(workflow: Any) -> int:
    """Return the cores of a job that has a machine to itself: all cores that --cores gives.

    If jobs go to other machines, --cores may be missing. Then the job gets NODE_CORES, and on a larger node
    `--set-threads benchmark=N` gives it more.
    """
    cores: int | None = workflow.global_resources["_cores"].value  # `workflow.cores` ends the run if it is missing
    return cores or NODE_CORES


MILLION = 1_000_000
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
LARGEST_VOCAB = 0.27  # millions of tokens
FEW_LAYERS = 4  # the most layers whose weights a job has mapped at a time
Resource = Callable[..., int]
Known = Callable[[str, str | None], "Sizes"]  # the sizes of a job, by its first input and its part


@dataclass(frozen=True)
class Sizes:
    """Millions of parameters, and of logits."""

    part: float = 0.0  # of the job's own part
    largest: float = 0.0  # of the largest tensor of that part, or of all programs
    layer: float = 0.0
    whole: float = 0.0  # of a layer that transformers is given whole; 0 if it takes linear layers by rows
    model: float = 0.0  # of all programs
    drafter: float = 0.0  # of the drafter's programs
    table: float = 0.0  # of the embedding table
    expanded: float = 0.0  # of the job's own part, or of all programs, that the portable engine holds in fp32
    cached: float = 0.0  # not parameters: numbers in the caches of the job's own part, in all contexts
    logits: float = 0.0  # not parameters: positions of the parity text times the vocabulary
    vocab: float = 0.0  # not parameters: tokens in the vocabulary
    bucket: float = 0.0  # not parameters: tokens that a pass of the job's own encoder takes
    wide: float = 0.0  # MB that layers, table and head take more if the checkpoint's dtype is wider than two bytes


@dataclass(frozen=True)
class Need:
    """A base in MB, and bytes for each item of the attribute of `Sizes` with the same name.

    `torch` is how many processes import torch; what they take with that comes on top of the base, see `torch_mb`.
    """

    base: int
    torch: int = 0
    part: float = 0.0
    largest: float = 0.0
    layer: float = 0.0
    whole: float = 0.0
    model: float = 0.0
    drafter: float = 0.0
    table: float = 0.0
    expanded: float = 0.0
    cached: float = 0.0
    logits: float = 0.0
    vocab: float = 0.0
    bucket: float = 0.0

    def with_torch(self, mb: int) -> Need:
        """Return this need where a process that has imported torch has `mb` MB."""
        return replace(self, base=self.base + self.torch * mb, torch=0)

    def mb(self, sizes: Sizes) -> int:
        """Return the sum in MB, rounded up."""
        items = [field.name for field in fields(self) if field.name not in ("base", "torch")]
        shares: list[float] = [getattr(self, name) * getattr(sizes, name) for name in items]
        reads_layers = self.layer or self.whole or self.table
        return ceil(self.base + sum(shares) + (sizes.wide if reads_layers else 0))


NOTHING = Need(0)
AS_STORED = 2.0  # bytes of a weight that Core ML holds at most: of fp16, or of INT8 once in its file and once beside it
KEPT = kept_for(__file__)  # MB by build of torch
IMPORT = "import torch; from shardmill.pipeline.resources import own_peak; print(own_peak())"


@cache
def torch_mb() -> int:
    """Return MB of a process that has imported torch: about 220 for CPUs alone, and 520 with CUDA's libraries.

    Measured once for each build of torch, in a second or two. A torch that can't be imported counts nothing here, for
    the jobs say what is wrong with it.
    """
    build = torch_build()
    known: dict[str, int] = {}
    with suppress(OSError, ValueError, TypeError):
        known = {name: int(mb) for name, mb in dict(load_json(KEPT)).items()}
    if build not in known:
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=False)
        if done.returncode:
            return 0
        known[build] = ceil(int(done.stdout) / MILLION)
        with suppress(OSError):  # an installation that can't be written to: measured again the next time
            write_json(KEPT, known)
    return known[build]


def on_this_machine(need: Need) -> Need:
    """Return what a need is on this machine: with its torch and, on a Mac, without the portable engine's copies.

    The portable engine holds each weight in fp16 beside its file, and small matrices in fp32.
    """
    whole = need.with_torch(torch_mb()) if need.torch else need
    if is_portable():
        return whole
    return replace(whole, part=min(whole.part, AS_STORED), model=min(whole.model, AS_STORED), expanded=0.0)


def own_peak() -> int:
    """Return this program's peak resident memory in bytes.

    On Linux ru_maxrss starts at the memory that Snakemake had resident when it started the job. If Snakemake has read a
    config.json through transformers, its memory is larger than a small job's peak.
    """
    try:
        match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:  # a system without /proc
        match = None
    return int(match[1]) * 1024 if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


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

    The function raises TooLarge for a job that needs more than the limit, because Snakemake would start such a job. It
    raises FileNotFoundError if the sizes are not known yet; Snakemake then shows <TBD>. A job that needs to know the
    vocabulary alone is the one that makes the plan; it declares what the largest in use takes, or all there is.

    Args:
        known: gives the sizes of a job, by its first input and its part, see `known_sizes`.
        step: the step's name, for the error line.
        need: the memory of the step's jobs.
        limit: MB that jobs may use together; None for any.
        beside: MB that a job holds beside its own process.
        each: the memory of every thread after the first. With less memory a job starts fewer threads, see
            `threads_within`.
    """
    need = replace(need, base=need.base + beside)
    if need == Need(need.base):
        return need.base

    def mem_mb(wildcards: Any, input: Any, threads: int = 1) -> int:
        part = wildcards.get("part")
        try:
            sizes = known(str(input[0]), part)
        except FileNotFoundError:
            if need != Need(need.base, vocab=need.vocab):
                raise
            mb = need.mb(Sizes(vocab=LARGEST_VOCAB))
            return mb if limit is None else min(mb, limit)
        mb = need.mb(sizes)
        if limit is not None and mb > limit:
            raise TooLarge(f"{step} {part}" if part else step, mb, limit)
        wanted = mb + (threads - 1) * each.mb(sizes)
        return wanted if limit is None else min(wanted, limit)

    return mem_mb


def known_sizes(build: Path, positions: int, expected: Callable[[], Mapping[str, Any]]) -> Known:
    """Return a function for the sizes of a build's jobs, from plan.json or, before it exists, from config.json.

    The function raises FileNotFoundError if neither gives the sizes.

    Args:
        build: the folder of a model's build.
        positions: positions of the parity text, each with a row of logits.
        expected: estimates the entries of a plan that `part_sizes` reads, see `resolve.expected`.
    """

    def plan(file: str) -> Mapping[str, Any]:
        content: Mapping[str, Any] = load_json((home_of(file, build.name) or Path()) / build / "plan.json")
        return content

    def known(file: str, part: str | None) -> Sizes:
        for read in (partial(plan, file), expected):
            with suppress(OSError, ValueError, LookupError, TypeError):  # no plan yet, a damaged or an older one
                return job_sizes(read(), positions, part)
        raise FileNotFoundError(errno.ENOENT, "no plan yet", file)

    return known


def threads_within(mb: int, threads: int, need: Need, each: Need, sizes: Sizes) -> int:
    """Return how many threads a job may start with its memory; at least one.

    Args:
        mb: the memory that the job was given, in MB.
        threads: the threads that the job was given.
        need: the memory of the job with one thread.
        each: the memory of every further thread.
        sizes: the sizes of the job.
    """
    more = max(0, mb - need.mb(sizes)) // max(1, each.mb(sizes))
    return min(threads, 1 + more)


def job_sizes(plan: Mapping[str, Any], positions: int, part: str | None = None) -> Sizes:
    """Return the sizes of a job for one part or for the whole model, from plan.json and the number of positions."""
    rows = {row["name"]: row for row in plan["parts"]}
    every = sum(row["expanded"] for row in rows.values() if row["kind"] != "embedding")
    largest = max((row["largest_tensor"] for row in rows.values() if row["kind"] != "embedding"), default=0)
    of_job = rows[part] if part else {"parameters": 0, "largest_tensor": largest, "expanded": every}
    encoders, sizes = [name for name, row in rows.items() if row["kind"] == "encoder"], plan.get("buckets") or ()
    chain = encoders[: len(encoders) // max(len(sizes), 1)]  # each bucket's has all layers
    layered = [row for name, row in rows.items() if row["kind"] in ("layers", "experts") or name in chain]
    layers = sum(row["parameters"] for row in layered)
    shape = plan["architecture"]
    looked_up = shape["vocab"] * shape["layers"] * shape["graph"].get("per_layer", 0)  # mapped: what is read counts
    looked_up *= shape["graph"].get("per_layer_table", True)
    table = rows["embedding"]["parameters"] - looked_up
    layer = layers / plan["architecture"]["layers"] / MILLION
    if any(map(shape["graph"].get, RECURRENCES)):  # which have a longer text, too
        positions += len(sampled(LONG))
    buckets = dict(zip(encoders, (size for size in sizes for _ in chain), strict=True))
    buckets |= {name: int(name.rpartition("_")[2]) for name, row in rows.items() if row["kind"] == TOWER}
    return Sizes(
        part=of_job["parameters"] / MILLION,
        largest=of_job["largest_tensor"] / MILLION,
        layer=layer,
        whole=layer if encoders or plan["architecture"]["graph"]["experts"] else 0.0,
        model=(sum(row["parameters"] for row in rows.values()) - table - looked_up) / MILLION,
        drafter=sum(row["parameters"] for row in rows.values() if row.get("drafter")) / MILLION,
        table=table / MILLION,
        expanded=of_job["expanded"] / MILLION,
        cached=of_job.get("cached", 0) / MILLION,
        logits=0.0 if encoders else positions * plan["architecture"]["vocab"] / MILLION,
        vocab=plan["architecture"]["vocab"] / MILLION,
        bucket=buckets.get(part, 0) / MILLION,
        wide=max(0, plan["item_bytes"] - 2) * (FEW_LAYERS * layer + 2 * table / MILLION),
    )
