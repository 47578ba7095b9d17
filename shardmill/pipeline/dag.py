"""Derives the jobs, their files and the order of the steps from the step table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.pipeline.resources import NOTHING, Need
from shardmill.pipeline.task import Task
from shardmill.records.names import RECEIPT

if TYPE_CHECKING:
    from shardmill.config import Config

WILDCARD = re.compile(r"\{(\w+)\}")
# A path in a model's build folder, or several. A wildcard, {part} or {point}, stands for the job's part or point. In a
# step without a job for each part or point, the wildcard stands for all parts or points.
Files = str | tuple[str, ...]
Found = Callable[[Mapping[str, "Step"]], tuple[str, ...]]  # paths that depend on the steps in the build


@dataclass(frozen=True)
class Step:
    """One row.

    Attributes:
        name: the name of the step, of its rule, and of its module in `pipeline/steps/`.
        makes: files by output name. A gate is a step whose output is a `verdict`.
        reads: files of the build by input name.
        takes: artifacts of other steps by input name; the job waits for their receipts and gets the hashes from them.
        outside: files outside the build by input name; the config gives their paths.
        params: further arguments of the task by name, computed from the config.
        packages: distributions whose versions decide the result.
        exact: whether every build of torch gives the same result. Then its key has torch's public version, 2.13.0. The
            key of a step whose numbers are sums has the build, too: 2.13.0+cpu may add up in another order.
        needs: the job's memory.
        each_thread: the memory of every thread after the first.
        also: modules that the step runs in another process.
        kept: whether the store keeps the result; False for results that take almost no time to make.
        on_the_side: whether `shardmill why` runs this step in its scratch folder, because later steps depend on its
            output.
        wanted: whether the build of a config has the step; None if every build has it.
        gated: whether a job waits for every gate.
        delivered: whether Snakemake is asked for the step's outputs, so that a finished build has them.
        shown: the step's name in the report's list; the name in the table if empty.
        amount: the text beside the name in the report's list; "# program" counts the outputs.
    """

    name: str
    makes: Mapping[str, Files]
    needs: Need
    each_thread: Need = NOTHING
    reads: Mapping[str, Files | Found] = field(default_factory=dict)
    takes: Mapping[str, Files | Found] = field(default_factory=dict)
    outside: Mapping[str, Callable[[Config], str | list[str]]] = field(default_factory=dict)
    params: Mapping[str, Callable[[Config], Any]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    exact: bool = False
    also: tuple[str, ...] = ()
    kept: bool = True
    on_the_side: bool = False
    wanted: Callable[[Config], bool] | None = None
    gated: bool = False
    delivered: bool = False
    shown: str = ""
    amount: str = ""

    @property
    def module(self) -> str:
        """Return the step's module; its code, and the code of all modules that it imports, decide the result."""
        return f"shardmill.pipeline.steps.{self.name}"

    @property
    def task(self) -> Callable[..., Task]:
        """Return the function that describes a job. Its parameters: `reads`, `takes`, `outside` and `params`."""
        found: Callable[..., Task] = import_module(self.module).task
        return found

    @property
    def each(self) -> str:
        """Return the wildcard if the step has one job for each of its values, e.g. "part"; empty if it has one job."""
        first = next(iter(self.makes.values()))
        return wildcard(first) if isinstance(first, str) else ""

    @property
    def is_gate(self) -> bool:
        """Return whether a job may fail because of the numbers that it measures."""
        return "verdict" in self.makes

    @property
    def receipt(self) -> str:
        """Return the receipt's path, beside the first output; empty if the step writes no receipt."""
        first = next(iter(self.makes.values()))
        return receipt_of(first) if self.kept and isinstance(first, str) else ""


def wildcard(template: str) -> str:
    """Return the wildcard in a path; empty if the path has no wildcard."""
    found = WILDCARD.search(template)
    return found[1] if found else ""


def receipt_of(artifact: str) -> str:
    """Return the path of an artifact's receipt, which stands beside the artifact."""
    return os.path.splitext(artifact)[0] + RECEIPT


Steps = Mapping[str, Step]
WAITS = "waits"  # the input with the receipts for which a job waits
BESIDE = "beside"  # the input or output that a job reaches through another file: files named in a record or model.json
Job = tuple[str, str | None]  # a step and, if it has a job for each part or point, that part or point
Names = Mapping[str, Sequence[str]]  # the values of each wildcard


def wanted(steps: Steps, config: Config) -> Steps:
    """Return the steps that a build of a config has."""
    return {name: step for name, step in steps.items() if step.wanted is None or step.wanted(config)}


def jobs(steps: Steps, config: Config) -> Iterator[Job]:
    """Yield every job of a build, each after the jobs whose outputs it reads."""
    for name, step in wanted(steps, config).items():
        yield from ((name, one) for one in (names(config)[step.each] if step.each else (None,)))


def names(config: Config) -> Names:
    """Return the values of each wildcard in a build."""
    return {"part": config.parts, "point": config.points}


def own(steps: Steps, job: Job) -> dict[str, str]:
    """Return the value of a job's wildcard by the wildcard's name; empty for a job without one."""
    name, one = job
    return {steps[name].each: one} if one else {}


def receipts(steps: Steps) -> tuple[str, ...]:
    """Return the receipts of all results that model.json covers."""
    spoken_for = of_the_model(steps)
    return tuple(step.receipt for name, step in steps.items() if step.receipt and name in spoken_for)


def report_receipts(steps: Steps) -> tuple[str, ...]:
    """Return the receipts that `receipts` returns, and the receipts of results that only the report shows."""
    return tuple(step.receipt for name, step in steps.items() if step.receipt and not after_the_gates(steps, name))


def verdicts(steps: Steps) -> tuple[str, ...]:
    """Return the path of every gate's verdict."""
    return tuple(str(step.makes["verdict"]) for step in steps.values() if step.is_gate)


def delivered(steps: Steps, config: Config) -> list[str]:
    """Return the files that Snakemake is asked for in a build. It does not notice if another file is gone."""
    files = [
        template
        for step in wanted(steps, config).values()
        if step.delivered
        for template in _listed(*step.makes.values())
    ]
    return [path for template in files for path in expanded(template, names(config))]


def waits(steps: Steps, name: str) -> tuple[str, ...]:
    """Return the receipts for which a step's jobs wait."""
    taken = tuple(receipt_of(template) for template in _listed(*_found(steps, steps[name].takes).values()))
    gates = tuple(step.receipt for step in steps.values() if step.is_gate) if steps[name].gated else ()
    return taken + gates


def step_inputs(steps: Steps, name: str) -> dict[str, Files]:
    """Return the files of the build that a step reads or takes, by input name."""
    return _found(steps, {**steps[name].reads, **steps[name].takes})


def outputs_of_step(name: str) -> Found:
    """Return a function that gives a step's outputs, or nothing if the build does not have the step."""
    return lambda steps: _listed(*steps[name].makes.values()) if name in steps else ()


def _found(steps: Steps, files: Mapping[str, Files | Found]) -> dict[str, Files]:
    return {key: each(steps) if callable(each) else each for key, each in files.items()}


def _before(steps: Steps, name: str) -> list[str]:
    """Return the steps whose outputs or receipts a step reads or waits for, in the table's order."""
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
    """Return the steps whose results model.json covers: all direct and indirect predecessors of the gated steps."""
    reached: set[str] = set()
    ahead = [other for other, step in steps.items() if step.gated]
    while ahead:
        found = {*_before(steps, ahead.pop())} - reached
        reached |= found
        ahead += found
    return reached


def expanded(files: Files, names: Names, own: Mapping[str, str] | None = None) -> list[str]:
    """Return paths with the wildcards filled in: with the job's value if it has one, otherwise with every value."""
    known = {**names, **{name: (one,) for name, one in (own or {}).items()}}
    return [
        template.format(**{name: one})
        for template in _listed(files)
        for name in (wildcard(template),)
        for one in (known[name] if name else ("",))
    ]


def bound(files: Files, names: Names, own: Mapping[str, str], build: Path) -> Path | list[Path]:
    """Return the path of a job's input or output or, if it may be several files, the list of their paths."""
    paths = [build / path for path in expanded(files, names, own)]
    several = not isinstance(files, str) or (wildcard(files) not in {"", *own})
    return paths if several else paths[0]


def job_outputs(steps: Steps, job: Job, config: Config, build: Path) -> dict[str, Path]:
    """Return the paths of a job's outputs by output name; if an output is several files, by their stems."""
    mine = own(steps, job)
    return flat({key: bound(files, names(config), mine, build) for key, files in steps[job[0]].makes.items()})


def flat(files: Mapping[str, Path | list[Path]]) -> dict[str, Path]:
    """Return outputs by name, and the files of a list by their stems."""
    found: dict[str, Path] = {}
    for name, paths in files.items():
        found |= {path.stem: path for path in paths} if isinstance(paths, list) else {name: paths}
    return found


def step_rows(steps: Steps, config: Config) -> list[dict[str, Any]]:
    """Return the rows of the report's list of steps as plain data, in the table's order."""
    rows: dict[str, dict[str, Any]] = {}
    for name, step in wanted(steps, config).items():
        made = expanded(_listed(list(step.makes.values())[-1]), names(config))
        shown = [step.receipt or template for template in _listed(next(iter(step.makes.values())))]
        row = rows.setdefault(
            step.shown or name, {"amount": step.amount, "gate": step.is_gate, "files": [], "count": 0}
        )
        row["files"] += [path for template in shown for path in expanded(template, names(config))]
        row["count"] += len(made)
    return [{"name": name, **row} for name, row in rows.items()]


def _listed(*files: Files) -> tuple[str, ...]:
    return tuple(path for each in files for path in ((each,) if isinstance(each, str) else each))
