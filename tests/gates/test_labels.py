"""The gate on the program with the labels' rows of the LM head: a sound one passes, and each fault is caught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
import verdicts
from models.tiny_families import write_tiny
from torch import Tensor

from shardmill.errors import GateError
from shardmill.models import parts
from shardmill.models.interface import LABELS
from shardmill.plan import Part

from . import judged
from .test_faults import caught

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="question 1 is the portable engine's; Core ML itself computes in fp16 only"
)
WORDS = [" return", "None", " is", "default", " not"]


def split(folder: Path, model_type: str) -> tiny.Build:
    """A checkpoint whose config names labels; only the labels' program is converted."""
    source = tiny.fetched(write_tiny(model_type, folder / "checkpoint"), folder / "source")
    pieces, plan = tiny.split(source, topology="auto", program={"labels": WORDS})
    package = tiny.convert(pieces[LABELS], source, folder / "labels.mlpackage")
    return tiny.Build(source, pieces, plan, {LABELS: package}, folder, ())


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """Logits are capped, and gains are 1 + weight."""
    return split(tmp_path_factory.mktemp("capped"), "gemma2")


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """An LM head with a bias, and its own matrix."""
    return split(tmp_path_factory.mktemp("biased"), "phimoe")


@pytest.mark.parametrize("name", ["capped", "biased"])
def test_a_sound_program_passes(name: str, request: pytest.FixtureRequest) -> None:
    rows = judged.part(request.getfixturevalue(name), LABELS)
    assert {"weight_steps", "program_error", "width_error", "psnr"} <= {row["name"] for row in rows}
    verdicts.all_pass(rows)


def turned(part: Part) -> Part:
    """Return the part with the rows of its matrix in the other order; the places of the rows stay."""
    norm, *rows = part.tensors
    places = [row.at for row in rows]
    return replace(part, tensors=(norm, *(replace(row, at=at) for row, at in zip(rows[::-1], places, strict=True))))


def next_rows(part: Part) -> Part:
    """Return the part with the row of each token taken from the next token."""
    norm, *rows = part.tensors
    size = rows[0].end - rows[0].start
    moved = [replace(row, start=row.start + size, end=row.end + size) for row in rows]
    return replace(part, tensors=(norm, *moved))


@pytest.mark.parametrize("fault", [turned, next_rows])
def test_other_rows_than_the_labels(capped: tiny.Build, tmp_path: Path, fault: Callable[[Part], Part]) -> None:
    package = tiny.convert(fault(capped.parts[LABELS]), capped.source, tmp_path / "labels.mlpackage")
    with caught("weight_steps", "psnr"):
        judged.part(capped, LABELS, package)


def test_rows_of_other_tokens_in_the_plan_too(capped: tiny.Build, tmp_path: Path) -> None:
    """The weights follow the plan then, and only transformers' logits of the labels' tokens tell."""
    part = capped.parts[LABELS]
    package = tiny.convert(next_rows(part), capped.source, tmp_path / "labels.mlpackage")
    wrong = replace(capped, parts={**capped.parts, LABELS: next_rows(part)})
    with caught("psnr"):
        judged.part(wrong, LABELS, package)


def remade(build: tiny.Build, folder: Path) -> judged.Rows:
    """The gate's rows for a program that the code makes as it is now."""
    return judged.part(build, LABELS, judged.converted(build, LABELS, folder / "labels.mlpackage"))


def test_the_cap_left_out(capped: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "cap", lambda logits, _: logits)
    with caught("program_error"):
        remade(capped, tmp_path)


def test_the_norm_left_out(capped: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "norm", lambda *_: torch.nn.Identity())
    with pytest.raises(GateError, match=r"does not hold norm\.weight"):
        remade(capped, tmp_path)


def test_a_bias_of_other_tokens(biased: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = parts.projection

    def wrong(weight: Tensor, bias: Tensor | None = None) -> torch.nn.Module:
        return real(weight, None if bias is None else bias.roll(1))

    monkeypatch.setattr(parts, "projection", wrong)
    with caught("weight_steps", "psnr"):
        remade(biased, tmp_path)
