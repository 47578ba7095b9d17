"""What a build takes, before it begins: download, disk, memory and time, each against what this machine has.

Disk and memory follow from the model's sizes. Memory is what jobs declare, see `resources.py`: Snakemake refuses a job
that needs more than a run may use, and so does `shardmill plan`, in the same words. Time is estimated, see `times.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.errors import CheckpointError
from shardmill.gates.passes import LONG, sampled
from shardmill.machine import cores
from shardmill.models.interface import FIXED
from shardmill.models.recurrences import RECURRENCES
from shardmill.pipeline import resources, times
from shardmill.pipeline.batch import BUILDS
from shardmill.pipeline.needs import STEPS, Step
from shardmill.pipeline.options import settings
from shardmill.pipeline.steps import reference
from shardmill.pipeline.words import about, duration, size

if TYPE_CHECKING:
    from shardmill.config import Config
    from shardmill.models.architecture import Architecture

AT_ONCE = 4  # jobs, as all commands in the pages say: --cores 4
FP32 = 4  # bytes
MOST_WRONG = 2  # the factor by which a time may be wrong
# Bytes beside weights, tables and the reference: programs' texts and verdicts for each layer of each function, those of
# any program, and the rest of a build: report, figures, provenance, logs. Verdicts and tables are in the store as well.
LAYER, PROGRAM, REST = 110_000, 45_000, 1_250_000


@dataclass(frozen=True)
class Costs:
    """What a build takes.

    Attributes:
        checkpoint: bytes of the checkpoint's files; 0 if the hub's listing is not here.
        download: bytes of them that must come from the hub yet.
        cache: the folder that they come to; "" for a checkpoint in a folder.
        cache_free: bytes that are free there.
        build: bytes of the build and of the store's part of it; the checkpoint's weights are linked, not copied.
        free: bytes that are free where builds are.
        memory: MB of the job that needs most.
        largest: that job.
        allowed: MB that all jobs may use together on this machine.
        stages: seconds of CPU time by step, or of time where Core ML loads programs; None where only a build can tell.
        seconds: of the whole build with --cores 4, beside what the machine does now; None if a step's are not known.
        others: processes that this machine runs now.
        warnings: what there is too little of.
        refused: what a run on this machine refuses.
    """

    checkpoint: int
    download: int
    cache: str
    cache_free: int
    build: int
    free: int
    memory: int
    largest: str
    allowed: int
    stages: Mapping[str, float | None]
    seconds: float | None
    others: float
    warnings: tuple[str, ...]
    refused: tuple[str, ...]


def costs(config: Config, a: Architecture, plan: Mapping[str, Any], weights: int, table: int) -> Costs:
    """Return what a build takes.

    Args:
        config: the config, with topology and all that it leaves open resolved.
        a: the model.
        plan: as much of its plan.json as `resolve.expected` gives.
        weights: bytes of the weight files; the programs of an encoder have one.
        table: bytes of the host's tables.
    """
    whole, missing, cache = _checkpoint(config)
    build, here = _build(config, a, plan, weights, table), _free(BUILDS)
    mb, job = max((mb, job) for job, mb in _memory(config, plan))
    allowed = resources.share_mb()
    stages, seconds, others = _times(config, plan)
    cache_free = _free(Path(cache)) if cache else 0
    short = [("the checkpoint", missing, cache_free, cache)] if missing > cache_free else []
    short += [("the build", build, here, str(BUILDS))] if build > here else []
    return Costs(
        checkpoint=whole,
        download=missing,
        cache=cache,
        cache_free=cache_free,
        build=build,
        free=here,
        memory=mb,
        largest=job,
        allowed=allowed,
        stages=stages,
        seconds=seconds,
        others=others,
        warnings=tuple(
            f"{what} takes {size(takes)} of disk, and {size(has)} are free for {where}; free some space first"
            for what, takes, has, where in short
        ),
        refused=(str(resources.TooLarge(job, mb, allowed)),) if mb > allowed else (),
    )


def _checkpoint(config: Config) -> tuple[int, int, str]:
    """Return bytes of the checkpoints' files, bytes that must still be downloaded, and the folder they come to."""
    whole, missing, cache = 0, 0, ""
    for source in config.sources:
        if source.path is not None:
            whole += _held(Path(source.path))
        else:
            from shardmill.checkpoint.hub import amounts
            from shardmill.checkpoint.hub_listing import HubAccess

            each = amounts(str(source.repo), str(source.revision), HubAccess()) or (0, 0)  # no listing: not known
            whole, missing, cache = whole + each[0], missing + each[1], str(HubAccess().cache_dir)
    return whole, missing, cache


def _held(folder: Path) -> int:
    from shardmill.checkpoint.layout import text_files, weight_files

    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    with suppress(CheckpointError):  # which is a fault that the plan names
        return sum((folder / name).stat().st_size for name in {*text_files(names), *weight_files(folder, names, "")})
    return 0


def _build(config: Config, a: Architecture, plan: Mapping[str, Any], weights: int, table: int) -> int:
    """Return about how many bytes a build takes with its part of the store."""
    rows = times.sizes(plan, config)
    functions = max(1, len(config.widths) * (1 + len(config.program.contexts))) if config.program.shapes == FIXED else 1
    programs = rows.whole[0] * LAYER * functions + len(rows.parts) * PROGRAM + REST
    return round(weights + 2 * table + 2 * _reference(config, a) + programs)


def _reference(config: Config, a: Architecture) -> int:
    """Return bytes of the reference: hidden states around each layer, and logits, in fp32; of an encoder its rows."""
    parity = settings(config)["parity"]
    rows = reference.positions(parity, config.length)
    if a.ends:
        return FP32 * len(config.sizes) * rows * a.graph.hidden
    if any(getattr(a.graph, kind) is not None for kind in RECURRENCES):
        rows += len(sampled(min(LONG, config.length)))
    hidden = (a.layers + 1) * min(int(parity["positions"]), config.length) * a.graph.hidden
    return FP32 * (rows * a.vocab + hidden)


def _free(folder: Path) -> int:
    """Return bytes that are free where a folder is, or will be."""
    folder = folder.absolute()
    return shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.is_dir())).free


def steps(config: Config) -> list[Step]:
    """Return the steps that a config's build has."""
    return [step for step in STEPS.values() if step.wanted is None or step.wanted(config)]


def _memory(config: Config, plan: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield jobs of a build, and MB that each declares with one thread."""
    positions = reference.positions(settings(config)["parity"], config.length)
    for step in steps(config):
        each = times.COSTS[step.name].each if step.name in times.COSTS else bool(step.needs.part)
        for part in config.parts if each else (None,):
            sizes = resources.job_sizes(plan, positions, part)
            yield f"{step.name} {part}" if part else step.name, resources.on_this_machine(step.needs).mb(sizes)


def _times(config: Config, plan: Mapping[str, Any]) -> tuple[dict[str, float | None], float | None, float]:
    """Return seconds by step, of the whole build, and processes that are beside it."""
    known, of, others = times.times(), times.sizes(plan, config), times.busy()
    rows: list[tuple[str, float | None]] = []
    for step in steps(config):
        each = step.name in times.COSTS and times.COSTS[step.name].each
        rows += [(step.name, known.seconds(step.name, part, of)) for part in (of.parts if each else ("",))]
    stages: dict[str, float | None] = {}
    for name, seconds in rows:
        before = stages.get(name, 0.0)
        stages[name] = None if seconds is None or before is None else before + seconds
    all_known = [(name, seconds) for name, seconds in rows if seconds is not None]
    whole = times.span(all_known, AT_ONCE, others) if len(all_known) == len(rows) else None
    return stages, whole, others


def lines(costs: Costs) -> Iterator[str]:
    """Yield a build's costs in lines for a person."""
    if costs.cache and not costs.checkpoint:
        yield "download: not known, the hub was not asked"
    elif costs.cache:
        here = "" if costs.download == costs.checkpoint else f"; the rest of its {size(costs.checkpoint)} is here"
        yield f"download: {size(costs.download)}{here}; {size(costs.cache_free)} are free for {costs.cache}"
    linked = "" if costs.cache else f"; the checkpoint, {size(costs.checkpoint)}, is linked"
    yield f"disk: {size(costs.build)} for build and store; {size(costs.free)} are free{linked}"
    yield (
        f"memory: {costs.memory / 1000:.1f} GB for {costs.largest}, the job that needs most; jobs may use "
        f"{costs.allowed / 1000:.1f} GB here together"
    )
    yield f"time: {_time(costs)}"
    yield f"each step: {', '.join(_stages(costs.stages))} of CPU time"


def _time(costs: Costs) -> str:
    beside = f" (busy: {costs.others:.0f} processes on {cores()} cores)" if costs.others >= 1 else ""
    if costs.seconds is None:
        return f"not known before a first build has loaded programs on this Mac{beside}"
    return (
        f"{about(costs.seconds)} on this machine{beside} with --cores {AT_ONCE}, "
        f"by a factor of {MOST_WRONG} more or less{'; the download comes on top' * bool(costs.download)}"
    )


def _stages(stages: Mapping[str, float | None]) -> Sequence[str]:
    return [f"{name} {'not known' if seconds is None else duration(seconds)}" for name, seconds in stages.items()]
