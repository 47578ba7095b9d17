"""Parts on Apple's Core AI runtime: right ones pass, and ten faults in weights or graphs are each seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import limits
import pytest
import templates
import tiny
import torch
import verdicts
from gates.judged import known
from safetensors.torch import save_file
from torch import Tensor

from shardmill.convert.stamped import convert_stamped
from shardmill.errors import ShardmillError
from shardmill.files import write_json
from shardmill.gates.measurement import Measurement, compare
from shardmill.gates.stored import Stored
from shardmill.gates.weights import PackageWeights
from shardmill.models import attention, blocks, primitives, shared
from shardmill.models.part_kinds import constants
from shardmill.pipeline.steps import witness as step
from shardmill.pipeline.task import Artifact
from shardmill.witness import coreai, installed, part

pytestmark = pytest.mark.skipif(not installed.is_there(), reason="needs Apple's Core AI runtime, the extra coreai")
Rows = list[dict[str, Any]]


def measured(build: tiny.Build, name: str, widest: int = 0) -> Rows:
    """Return the rows of a part's verdict; with `widest`, of passes of at most so many tokens."""
    piece, plan = build.parts[name], dict(build.plan)
    if widest:
        piece, plan = piece.changed(tokens=widest), plan | {"verify": widest}
    stored = PackageWeights(build.packages[name], piece)
    found = part.witness_measurements(piece, build.packages[name], plan, known(build.source), build.source, stored)
    return compare(one for one in found if isinstance(one, Measurement))


def judge(rows: Any) -> None:
    """Fail if a number is not what rounding comes to in a part of two layers, or if nothing was rounded at all."""
    __tracebackhide__ = True
    for row in rows:
        limits.agrees(f"{row['name']} {row['detail']}", row["value"], limits.model(2, tiny.FFN))
    assert max(row["value"] for row in rows) > 0


@pytest.mark.parametrize("kind", ["layers", "head"])
def test_a_part_is_the_same_on_three_engines(built: tiny.Build, kind: str) -> None:
    """Every width, mixtures of widths and rejected drafts, where the part has states."""
    name = next(name for name, piece in built.parts.items() if piece.kind == kind)
    rows = measured(built, name)
    verdicts.all_pass(rows)
    assert {row["name"] for row in rows} == {"witness_error", "witness_width_error", "witness_agreement"}
    ways = {row["detail"] for row in rows if row["name"] == "witness_width_error"}
    assert ways >= {"T=2", "T=3", "T=4"} and (kind == "head" or ways >= {"mixed", "rejected drafts"})
    judge(rows)


def test_labels_rows_of_the_head_are_the_same_on_three_engines(built: tiny.Build, tmp_path: Path) -> None:
    parts, plan = tiny.split(built.source, program={"labels": ["None", " return"]})
    package = tiny.convert(parts["labels"], built.source, tmp_path / "labels.mlpackage")
    rows = measured(replace(built, parts=parts, plan=plan, packages={"labels": package}), "labels")
    verdicts.all_pass(rows)
    judge(rows)


@pytest.mark.thorough
def test_wide_passes_fit_the_short_cache(built: tiny.Build, tmp_path: Path) -> None:
    """The witness shortens the cache to its text; a prefill pass of 24 tokens pads the text past its end."""
    parts, plan = tiny.split(built.source, tokens={"max": 24, "verify": 2})
    name = next(name for name, piece in parts.items() if piece.kind == "layers")
    package = tmp_path / f"{name}.mlpackage"
    convert_stamped(parts[name], built.source, "int8", package, templates.FOLDER)
    stored = PackageWeights(package, parts[name])
    found = part.witness_measurements(parts[name], package, plan, known(built.source), built.source, stored)
    rows = compare(one for one in found if isinstance(one, Measurement))
    verdicts.all_pass(rows)
    assert "T=24" in {row["detail"] for row in rows}


@pytest.mark.thorough
def test_states_are_those_of_the_engine_that_ships(built: tiny.Build, fp32: None) -> None:
    """A cache on Apple's runtime holds what the part's own program leaves in its states."""
    piece = built.layers()[0]
    stored = PackageWeights(built.packages[piece.name], piece)
    case = part.witness_case(piece, built.packages[piece.name], built.plan, known(built.source), built.source, stored)
    program, kept = coreai.CoreAIProgram(case.program.spec, stored.stored, case.widths), f"k_{piece.start}"
    states: dict[str, Any] = {}

    def mixed(loaded: Any) -> Any:
        outputs = case.run(loaded, "mixed")
        states[type(loaded).__name__] = torch.from_numpy(loaded.kept(kept))[0, :, : part.TOKENS]
        return outputs

    program.run({"mixed": mixed})
    mixed(case.portable())
    mine, theirs = states.values()
    limits.rows_agree("a cache", mine, theirs, limits.model(2, tiny.FFN))
    assert mine.abs().max() > 0.1


def scale_doubled(one: Stored) -> Stored:
    assert one.scale is not None
    scale = one.scale.clone()
    scale[3] *= 2
    return replace(one, scale=scale)


def rows_swapped(one: Stored) -> Stored:
    values = one.values.clone()
    values[[1, 2]] = values[[2, 1]]
    return replace(one, values=values)


def row_negated(one: Stored) -> Stored:
    values = one.values.clone()
    values[5] *= -1
    return replace(one, values=values)


def columns_shifted(one: Stored) -> Stored:
    return replace(one, values=one.values.roll(1, 1))


def codes_off_by_one(one: Stored) -> Stored:
    return replace(one, values=(one.values + 1).clamp(max=127))


WEIGHTS: dict[str, Callable[[Stored], Stored]] = {
    fault.__name__: fault for fault in (scale_doubled, rows_swapped, row_negated, columns_shifted, codes_off_by_one)
}


def forgets(cache: Tensor, new: Tensor, write_mask: Tensor, keep: Tensor) -> Tensor:
    return torch.matmul(write_mask, new) + cache * 0


def adds(cache: Tensor, new: Tensor, write_mask: Tensor, keep: Tensor) -> Tensor:
    return cache + torch.matmul(write_mask, new) * 0.5


def turned_back(x: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int]) -> Tensor:
    return primitives.apply_rotary(x, cos, -sin, sizes)


def unscaled(x: Tensor, factor: float) -> Tensor:
    return x


BLOCKS: dict[str, tuple[Any, str, Any]] = {
    "a cache that forgets": (shared, "write_cache", forgets),
    "a cache that is written by half": (shared, "write_cache", adds),
    "rotary embedding turned back": (attention, "apply_rotary", turned_back),
    "scores that are not scaled": (attention, "scale", unscaled),
    "another activation": (blocks, "ACTIVATIONS", dict.fromkeys(primitives.ACTIVATIONS, torch.relu)),
}


@pytest.mark.thorough(but=["scale_doubled"])
@pytest.mark.parametrize("fault", WEIGHTS)
def test_a_fault_in_one_stored_matrix_is_seen(built: tiny.Build, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's runtime gets the faulty matrix, and transformers what the package stores."""
    name, program = built.layers()[0].name, coreai.CoreAIProgram

    def faulty(spec: Any, stored: Callable[[str], Stored], widths: Any) -> Any:
        first = next(path for path in constants(spec) if stored(path).coded)
        return program(spec, lambda path: WEIGHTS[fault](stored(path)) if path == first else stored(path), widths)

    monkeypatch.setattr(part, "CoreAIProgram", faulty)
    missed = {row["name"] for row in measured(built, name, widest=1) if not row["passed"]}
    assert missed == {"witness_error", "witness_agreement"}


@pytest.mark.thorough(but=["another activation"])
@pytest.mark.parametrize("fault", BLOCKS)
def test_a_fault_in_the_graph_is_seen(built: tiny.Build, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is wrong on both of our sides would still differ from transformers on Apple's runtime."""
    module, attribute, wrong = BLOCKS[fault]
    monkeypatch.setattr(module, attribute, wrong)
    missed = {row["name"] for row in measured(built, built.layers()[0].name, widest=1) if not row["passed"]}
    assert missed == {"witness_error", "witness_agreement"}


def test_a_job_refuses_a_runtime_that_its_run_has_not(built: tiny.Build, tmp_path: Path) -> None:
    """Its verdict would be filed under numbers of another runtime."""
    piece, states = built.layers()[0], tmp_path / "reference.safetensors"
    save_file(known(built.source), states)
    files = {"plan": tmp_path / "plan.json", "part": tmp_path / "part.json"}
    write_json(files["plan"], built.plan)
    write_json(files["part"], asdict(piece))
    other = {"name": "coreai", "version": "coreai-core 0.1", "machine": "x86_64"}
    made = [Artifact(path, "", {}) for path in (states, built.packages[piece.name], built.packages[piece.name])]
    job = step.task(files["plan"], files["part"], tmp_path / "source.receipt.json", *made, {}, other, {})
    with pytest.raises(ShardmillError, match=r"need one Core AI runtime, .*coreai-core 0\.1 on x86_64; coreai-core"):
        job.work({"verdict": tmp_path / "verdict.json"})
