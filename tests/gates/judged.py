"""The parity gates on a tiny build, as the parity step runs them, with any piece exchanged for a faulty one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import tiny
import torch
from torch import Tensor

from shardmill.checkpoint.headers import read_tensors
from shardmill.convert import trace
from shardmill.forms.form import matrices
from shardmill.gates import measurement, reference, stack
from shardmill.gates.reference import carried_channels
from shardmill.gates.rounding import table_parity
from shardmill.gates.weights import PackageWeights
from shardmill.models.part_kinds import output
from shardmill.pipeline.steps.parity import measurements
from shardmill.plan import Constant, Part
from shardmill.runtime import engine
from shardmill.runtime.manifest import in_place

POSITIONS = 24
Rows = list[dict[str, Any]]


def judge(gate: str, measurements: Iterable[measurement.Measurement | measurement.NotRun | measurement.Margin]) -> Rows:
    """What a gate's file holds of the measurements. Raises GateError naming each number that missed its threshold."""
    rows = measurement.compare(m for m in measurements if isinstance(m, measurement.Measurement))
    measurement.demand(gate, rows)
    return rows


@cache
def known(source: Path, carried: int = 0, prefix: str = "model.") -> dict[str, Tensor]:
    """What the reference step writes: hidden [layers + 1, n, d] and logits [n, vocab] with the original weights."""
    weights = reference.checkpoint_weights(source, prefix)
    witness = reference.Reference(source, tiny.CONTEXT, carried)
    table = weights(f"model.{witness.tables[0]}.weight")
    rows = weights(f"model.{witness.second}.weight") if witness.second else None
    looked_up = None if rows is None else rows.__getitem__
    head = weights("lm_head.weight") if "lm_head.weight" in read_tensors(source) else table
    return witness.run(text(source), lambda ids: table[ids], [head], weights, looked_up)


@cache
def text(source: Path) -> tuple[int, ...]:
    """The tokens of a build; the same for every one of them."""
    return tuple(tiny.sampled_text(source))


def part(build: tiny.Build, name: str, package: Path | None = None) -> Rows:
    """The rows of parity/`name`.json. Raises GateError."""
    piece, program = build.parts[name], package or build.packages[name]
    stored, states = PackageWeights(program, piece), dict(known(build.source, carried_channels(build.plan)))
    if output(piece.spec) != "logits":
        rows = {"rows": states["rows"][:POSITIONS]} if "rows" in states else {}
        states = rows | {name: states[name][:, :POSITIONS] for name in states.keys() & {"hidden", "experts"}}
    return judge(name, measurements(program, piece, build.plan, states, build.source, stored, in_int8(piece)))


def in_int8(piece: Part) -> dict[str, str]:
    """The forms of a part's matrices in a build of INT8."""
    return dict.fromkeys(matrices(piece.shapes), "int8")


def whole(build: tiny.Build, packages: Mapping[str, Path] | None = None, spoilt: Path | None = None) -> Rows:
    """The rows of parity/stack.json, with other packages or a spoilt embedding table. Raises GateError."""
    table = spoilt or build.table
    states = known(build.source, carried_channels(build.plan))
    short = {
        "tokens": torch.tensor(text(build.source)),
        "hidden": states["hidden"][:, :POSITIONS],
        "logits": states["logits"],
    }
    load, stored = chained(build, {**build.packages, **(packages or {})}, table)
    rows = table_parity(build.parts["embedding"], build.source, table)
    return judge("stack", [*rows, *stack.stack_parity(load, stored, short)])


def undisturbed(build: tiny.Build) -> Rows:
    """Those of them that no rounding disturbs: in fp16 and INT8 a random model may choose any other expert."""
    load, stored = chained(build, build.packages, build.table)
    return judge("stack", stack.program_and_widths(load, stored, text(build.source)[:POSITIONS]))


def chained(
    build: tiny.Build, programs: Mapping[str, Path], table: Path
) -> tuple[Callable[[], engine.Engine], stack.StoredModel]:
    """What makes an engine of a build's programs, and transformers' model with the weights that they hold."""
    pieces = {name: (build.parts[name], path) for name, path in programs.items()}
    known_model = reference.Reference(build.source, tiny.CONTEXT, carried_channels(build.plan))
    stored = stack.stored_model(known_model, pieces, build.parts["embedding"], build.source, build.plan["prefix"])
    return lambda: engine.Engine(in_place(build.plan, programs, table), Path("/")), stored


def converted(
    build: tiny.Build, name: str, path: Path, tensors: tuple[Constant, ...] | None = None, **changes: Any
) -> Path:
    """A part's package made by the code as it is now, without templates; with other tensors, or changes of its spec."""
    with trace.hurried():  # nothing here is about coremltools' own checks
        part = build.parts[name].changed(**changes)
        oracle.convert_plain(replace(part, tensors=tensors or part.tensors), build.source, "int8", path)
    return path
