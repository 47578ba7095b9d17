"""What the tests of every trained drafter share: the engine of a build, its parts judged, and a record of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coremltools as ct
import tiny
from torch import Tensor

from shardmill.decode.drafters import PLAIN, Draft, Drafter, RequestInfo
from shardmill.gates import measurement, parity
from shardmill.gates.weights import PackageWeights
from shardmill.machine import load_programs_as
from shardmill.pipeline.steps.parity import drafter_case
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place, of_drafter


def loaded(build: tiny.Build, folder: Path, precision: str = "fp32") -> Engine:
    """The portable engine of a build, from bundles that are compiled into a folder."""
    bundles = {name: folder / f"{name}.mlmodelc" for name in build.packages}
    with load_programs_as(precision):
        for name, package in build.packages.items():
            ct.models.utils.compile_model(str(package), str(bundles[name]))
        return Engine(in_place(build.plan, bundles, build.table), Path("/"))


def judged(build: tiny.Build, known: Mapping[str, Tensor], folder: Path, name: str) -> list[dict[str, Any]]:
    """All measurements of one part of a drafter beside their thresholds."""
    bundle, part = folder / f"{name}.mlmodelc", build.parts[name]
    with load_programs_as("fp16"):
        ct.models.utils.compile_model(str(build.packages[name]), str(bundle))
    stored = PackageWeights(build.packages[name], part, build.plan["prefix"])
    case = drafter_case(part, build.plan, known, build.source, stored)
    found = parity.part_parity(parity.PartRunner(bundle, part, of_drafter(build.plan)), case)
    return measurement.compare(one for one in found if isinstance(one, measurement.Measurement))


@dataclass
class Recorded:
    """A drafter that keeps each draft with the text before it, and how many of its tokens were accepted."""

    drafter: Drafter
    rounds: list[tuple[list[int], tuple[int, ...], int]] = field(default_factory=list)
    pending: tuple[list[int], tuple[int, ...]] | None = None

    @property
    def name(self) -> str:
        return self.drafter.name

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        self.drafter.reset(prompt, info)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        draft = self.drafter.propose(context, limit)
        self.pending = (list(context), draft.tokens)
        return draft

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        if self.pending:
            self.rounds.append((*self.pending, accepted))
        self.pending = None
        self.drafter.observe(emitted, accepted)

    def finish(self) -> None:
        self.drafter.finish()
