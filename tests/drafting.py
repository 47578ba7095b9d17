"""What the tests of every trained drafter share: the engine of a build, its parts judged, and a record of drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coremltools as ct
import tiny
from drafted_decoding.drafters import PLAIN, Draft, Drafter, RequestInfo
from torch import Tensor

from shardmill.gates import measurement, parity, stack
from shardmill.gates.drafters import drafter_case
from shardmill.gates.drafts import Expected, draft_agreement
from shardmill.gates.measurement import Measurement
from shardmill.gates.reference import Reference
from shardmill.gates.runner import PartRunner
from shardmill.gates.weights import PackageWeights
from shardmill.machine import load_programs_as
from shardmill.pipeline.steps.parity_stack import reference_drafts
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
    found = parity.part_parity(PartRunner(bundle, part, of_drafter(build.plan)), case)
    return measurement.compare(one for one in found if isinstance(one, measurement.Measurement))


def expected(build: tiny.Build) -> Expected:
    """What the reference of a build's drafter drafts along the build's text, as the gate of the stack asks for it."""
    prefix, programs = build.plan["prefix"], {name: (build.parts[name], path) for name, path in build.packages.items()}
    own = {name: held for name, held in programs.items() if not held[0].drafter}
    held = [PackageWeights(path, part, prefix) for part, path in programs.values() if part.drafter]
    stored = stack.stored_model(
        Reference(build.source, tiny.CONTEXT), own, build.parts["embedding"], build.source, prefix
    )
    found = reference_drafts(stored, held, build.plan, build.source, build.table, list(build.text[:48]))
    assert isinstance(found, Expected)
    return found


def agreement(build: tiny.Build, truth: Expected, precision: str = "fp32") -> Measurement:
    """What the gate of the stack measures of a build's drafter."""
    with load_programs_as(precision):
        engine = Engine(in_place(build.plan, build.packages, build.table), Path("/"))
    found = draft_agreement(engine, truth, precision)
    assert isinstance(found, Measurement)
    return found


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
