"""What follows from the step table: jobs and their files, and which step comes after which."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.pipeline.resources import NOTHING, Need
from shardmill.pipeline.task import RECEIPT, Task

if TYPE_CHECKING:
    from shardmill.config import Config

WILDCARD = re.compile(r"\{(\w+)\}")
# A path in a model's build folder, or several. A wildcard, {part} or {point}, is that of the job or, in a step that has
# no job for each, every one of them.
Files = str | tuple[str, ...]
Found = Callable[[Mapping[str, "Step"]], tuple[str, ...]]  # paths that depend on what steps there are


@dataclass(frozen=True)
class Step:
    """One row.

    Attributes:
        task: says what a job does; its module and all that it imports decide the result. Its parameters are the names
            in `reads`, `takes`, `outside` and `params`.
        makes: files by output name. A gate is a step whose output is a `verdict`.
        reads: files of the build by input name.
        takes: artifacts of other steps by input name: known by their receipts, for which the job waits.
        outside: files that are not of the build, as the config names them.
        params: what else the task is given, from the config.
        packages: distributions whose versions decide the result.
        needs: of memory; by `convert.method` where that decides.
        each_thread: of memory for every thread after the first.
        also: modules of what the step runs in another process.
        kept: whether the store keeps the result; False for what is made in no time.
        on_the_side: whether `shardmill why` runs this step in its scratch folder, because later steps depend on its
            output.
        wanted: whether a config has a use for the step; without it, every build has.
        gated: whether a job waits for every gate.
        delivered: whether a finished build is asked for what it makes.
        shown: the step's name in the report's list; its own if empty.
        amount: what the list says beside the name; "# program" counts what is made.
    """

    task: Callable[..., Task]
    makes: Mapping[str, Files]
    needs: Need | Mapping[str, Need]
    each_thread: Need = NOTHING
    reads: Mapping[str, Files | Found] = field(default_factory=dict)
    takes: Mapping[str, Files | Found] = field(default_factory=dict)
    outside: Mapping[str, Callable[[Config], str | list[str]]] = field(default_factory=dict)
    params: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    kept: bool = True
    on_the_side: bool = False
    wanted: Callable[[Config], bool] | None = None
    gated: bool = False
    delivered: bool = False
    shown: str = ""
    amount: str = ""

    @property
    def each(self) -> str:
        """Return the wildcard for each of which there is a job, "part" say; empty where there is one job."""
        first = next(iter(self.makes.values()))
        return wildcard(first) if isinstance(first, str) else ""

    @property
    def is_gate(self) -> bool:
        """Return whether a job may fail for what it finds."""
        return "verdict" in self.makes

    @property
    def receipt(self) -> str:
        """Return the receipt's path, beside the first output; empty where none is written."""
        first = next(iter(self.makes.values()))
        return receipt_of(first) if self.kept and isinstance(first, str) else ""


def wildcard(template: str) -> str:
    """Return the wildcard in a path; empty if there is none."""
    found = WILDCARD.search(template)
    return found[1] if found else ""


def receipt_of(artifact: str) -> str:
    """Return where the receipt of an artifact stands: beside it."""
    return os.path.splitext(artifact)[0] + RECEIPT


Steps = Mapping[str, Step]
WAITS = "waits"  # the input that a job only waits for
BESIDE = "beside"  # the input or output that a job finds by way of another: what a record or model.json speaks of
Job = tuple[str, str | None]  # a step and, where it has a job for each part or point, which one
Names = Mapping[str, Sequence[str]]  # what each wildcard stands for


def wanted(steps: Steps, config: Config) -> Steps:
    """Return the steps that a build of a config has."""
    return {name: step for name, step in steps.items() if step.wanted is None or step.wanted(config)}


def jobs(steps: Steps, config: Config) -> Iterator[Job]:
    """Yield every job of a build, each after those that it reads from."""
    for name, step in wanted(steps, config).items():
        yield from ((name, one) for one in (names(config)[step.each] if step.each else (None,)))


def names(config: Config) -> Names:
    """Return what each wildcard stands for in a build."""
    return {"part": config.parts, "point": config.points}


def own(steps: Steps, job: Job) -> dict[str, str]:
    """Return what wildcards stand for in a job that has one."""
    name, one = job
    return {steps[name].each: one} if one else {}


def receipts(steps: Steps) -> tuple[str, ...]:
    """Return what is written of every result that model.json speaks for."""
    spoken_for = of_the_model(steps)
    return tuple(step.receipt for name, step in steps.items() if step.receipt and name in spoken_for)


def report_receipts(steps: Steps) -> tuple[str, ...]:
    """Return the same, and those of what only the report shows."""
    return tuple(step.receipt for name, step in steps.items() if step.receipt and not after_the_gates(steps, name))


def verdicts(steps: Steps) -> tuple[str, ...]:
    """Return every gate's."""
    return tuple(str(step.makes["verdict"]) for step in steps.values() if step.is_gate)


def delivered(steps: Steps, config: Config) -> list[str]:
    """Return what a finished build is asked for. Of other files, Snakemake does not see that one is gone."""
    files = [
        template
        for step in wanted(steps, config).values()
        if step.delivered
        for template in _listed(*step.makes.values())
    ]
    return [path for template in files for path in expanded(template, names(config))]


def waits(steps: Steps, name: str) -> tuple[str, ...]:
    """Return receipts that a job waits for."""
    taken = tuple(receipt_of(template) for template in _listed(*_found(steps, steps[name].takes).values()))
    gates = tuple(step.receipt for step in steps.values() if step.is_gate) if steps[name].gated else ()
    return taken + gates


def step_inputs(steps: Steps, name: str) -> dict[str, Files]:
    """Return files of the build by the names under which a step reads or takes them."""
    return _found(steps, {**steps[name].reads, **steps[name].takes})


def outputs_of_step(name: str) -> Found:
    """Return what a step makes, where there is that step: for steps that have a use for it."""
    return lambda steps: _listed(*steps[name].makes.values()) if name in steps else ()


def _found(steps: Steps, files: Mapping[str, Files | Found]) -> dict[str, Files]:
    return {key: each(steps) if callable(each) else each for key, each in files.items()}


def _before(steps: Steps, name: str) -> list[str]:
    """Return the steps that a step reads from or waits for, in the table's order."""
    wanted = {*_listed(*step_inputs(steps, name).values()), *waits(steps, name)}
    return [
        other
        for other, step in steps.items()
        if other != name and wanted & {*_listed(*step.makes.values()), step.receipt}
    ]


def after_the_gates(steps: Steps, name: str) -> bool:
    """Return whether a step's jobs run only once every gate has passed."""
    step = steps[name]
    made = {template for other in steps.values() if other.gated for template in _listed(*other.makes.values())}
    read = {template for files in step.reads.values() if not callable(files) for template in _listed(files)}
    return step.gated or bool(made & read)


def of_the_model(steps: Steps) -> set[str]:
    """Return the steps for whose results model.json speaks: those waited for, by way of others, where every gate is."""
    reached: set[str] = set()
    ahead = [other for other, step in steps.items() if step.gated]
    while ahead:
        found = {*_before(steps, ahead.pop())} - reached
        reached |= found
        ahead += found
    return reached


def expanded(files: Files, names: Names, own: Mapping[str, str] | None = None) -> list[str]:
    """Return paths, in which a wildcard is the job's own where it has one, else each that there is in turn."""
    known = {**names, **{name: (one,) for name, one in (own or {}).items()}}
    return [
        template.format(**{name: one})
        for template in _listed(files)
        for name in (wildcard(template),)
        for one in (known[name] if name else ("",))
    ]


def bound(files: Files, names: Names, own: Mapping[str, str], build: Path) -> Path | list[Path]:
    """Return what a name stands for in a job: a path or, where there may be several, a list."""
    paths = [build / path for path in expanded(files, names, own)]
    several = not isinstance(files, str) or (wildcard(files) not in {"", *own})
    return paths if several else paths[0]


def job_outputs(steps: Steps, job: Job, config: Config, build: Path) -> dict[str, Path]:
    """Return paths that a job makes, by output name; where a name stands for several, by the files' own."""
    mine = own(steps, job)
    return flat({key: bound(files, names(config), mine, build) for key, files in steps[job[0]].makes.items()})


def flat(files: Mapping[str, Path | list[Path]]) -> dict[str, Path]:
    """Return outputs by name, those in lists by their own."""
    found: dict[str, Path] = {}
    for name, paths in files.items():
        found |= {path.stem: path for path in paths} if isinstance(paths, list) else {name: paths}
    return found


def step_rows(steps: Steps, config: Config) -> list[dict[str, Any]]:
    """Return what the report's list of steps is made from, as plain data, in the table's order."""
    rows: dict[str, dict[str, Any]] = {}
    for name, step in wanted(steps, config).items():
        made = expanded(_listed(*step.makes.values())[-1], names(config))
        shown = [step.receipt or template for template in _listed(next(iter(step.makes.values())))]
        row = rows.setdefault(
            step.shown or name, {"amount": step.amount, "gate": step.is_gate, "files": [], "count": 0}
        )
        row["files"] += [path for template in shown for path in expanded(template, names(config))]
        row["count"] += len(made)
    return [{"name": name, **row} for name, row in rows.items()]


def _listed(*files: Files) -> tuple[str, ...]:
    return tuple(path for each in files for path in ((each,) if isinstance(each, str) else each))
