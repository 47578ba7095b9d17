"""What a row of the step table holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardmill.pipeline.memory import NOTHING, Need
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
        drawn: the step's name in the report's drawing; its own if empty.
        lane: its place across the drawing.
        amount: what the drawing says below the name; "# program" counts what is made.
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
    drawn: str = ""
    lane: float = 1.5
    amount: str = ""

    @property
    def each(self) -> str:
        """The wildcard for each of which there is a job, "part" say; empty where there is one job."""
        first = next(iter(self.makes.values()))
        return wildcard(first) if isinstance(first, str) else ""

    @property
    def is_gate(self) -> bool:
        """Whether a job may fail for what it finds."""
        return "verdict" in self.makes

    @property
    def receipt(self) -> str:
        """The receipt's path, beside the first output; empty where none is written."""
        first = next(iter(self.makes.values()))
        return receipt_of(first) if self.kept and isinstance(first, str) else ""


def wildcard(template: str) -> str:
    """The wildcard in a path; empty if there is none."""
    found = WILDCARD.search(template)
    return found[1] if found else ""


def receipt_of(artifact: str) -> str:
    """Where the receipt of an artifact stands: beside it."""
    return os.path.splitext(artifact)[0] + RECEIPT
