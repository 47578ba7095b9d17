"""Question 1 of weights: rounded ones lie beside the checkpoint's, and chosen ones are what a quantiser chose."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import templates
import tiny
import torch
from code_writer import write_codes

from shardmill.convert.palette import to_integers
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.weights import PartWeights
from shardmill.forms.form import form, matrices
from shardmill.gates import rounding
from shardmill.gates.rounding import weight_steps, weights_kept
from shardmill.gates.stored import Stored
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.gates.weights import Chosen, PackageWeights
from shardmill.models.architecture import TensorSource

from .judged import in_int8
from .test_weights import FORMS, NORM, NOWHERE, PROJECTION, block_rows, mixed, original, stored

__all__ = ["mixed", "original", "stored"]  # fixtures


def steps_from(
    patch: pytest.MonkeyPatch, stored: PackageWeights, original: dict[str, torch.Tensor]
) -> tuple[float, str]:
    """The distance of rounded weights from a checkpoint that holds these values."""
    patch.setattr(rounding, "block", lambda tensor, source: original[tensor.path])
    return weight_steps(stored, NOWHERE, [*stored.part.shapes])


def test_rounding_is_half_a_step(stored: PackageWeights, original: dict[str, torch.Tensor], built: tiny.Build) -> None:
    worst, name = weight_steps(stored, built.source, [*stored.part.shapes])
    assert 0.4 < worst < 0.6
    assert name.removeprefix("model.") in original


@pytest.mark.parametrize("name", [PROJECTION, NORM])
def test_one_weight_off_by_two_steps_is_named(
    stored: PackageWeights, original: dict[str, torch.Tensor], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = original[name].clone()
    step = stored.stored(name).scale
    moved.view(-1)[5] += 2.1 * (float(step[0]) if step is not None else float(moved.view(-1)[5]) * 2**-10)
    worst, where = steps_from(monkeypatch, stored, {**original, name: moved})
    assert worst > 1
    assert where == f"model.{name}"


def test_rows_without_a_scale_come_with_the_remedy(
    stored: PackageWeights, original: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """coremltools makes zeros of a row whose largest value is under 127 times the half of fp16's smallest number."""
    tiny_row = original[PROJECTION].clone()
    tiny_row[3] = 3e-6
    held = stored.stored

    def with_zeros(path: str) -> Stored:
        found = held(path)
        if path != PROJECTION:
            return found
        codes, scale, _ = to_integers(tiny_row, form("int8").levels)
        return Stored(codes, scale.float()[:, None])

    monkeypatch.setattr(stored, "stored", with_zeros)
    monkeypatch.setattr(rounding, "block", lambda tensor, source: {**original, PROJECTION: tiny_row}[tensor.path])
    rows = {row.name: row for row in weights_kept(stored, NOWHERE, in_int8(stored.part))}
    assert rows["weight_steps"].value < 0.6 and rows["scale_steps"].value <= 1
    worst, where = rows["subnormal_steps"].value, rows["subnormal_steps"].detail
    assert 40 < worst < 60
    assert where.startswith(f"model.{PROJECTION}, some of whose rows are too small") and "form fp16" in where


def test_a_nan_is_no_small_distance(
    stored: PackageWeights, original: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever tensor it is: those that are looked at later must not hide it."""
    for name in original:
        spoilt = original[name].clone()
        spoilt.view(-1)[0] = math.nan
        worst, where = steps_from(monkeypatch, stored, {**original, name: spoilt})
        assert math.isnan(worst)
        assert where == f"model.{name}"


def test_channels_of_zeros_and_of_next_to_nothing_are_no_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A padding row of a vocabulary is: its scale is 0."""
    values = torch.tensor([[1.0, -0.5], [0, 0], [1e-8, 0]])
    scale = torch.tensor([[1 / 127], [0.0], [0.0]])
    quantised = torch.tensor([[127, -64], [0, 0], [0, 0]], dtype=torch.int8)
    tensor = SimpleNamespace(path="w", source=TensorSource("w"), label="w")
    part = SimpleNamespace(shapes={"w": (3, 2)}, tensors=[tensor])
    kept = SimpleNamespace(part=part, stored=lambda _: Stored(quantised, scale))
    worst, _ = steps_from(monkeypatch, cast("PackageWeights", kept), {"w": values})
    assert 0.4 < worst < 0.6


def test_every_row_counts(
    stored: PackageWeights, original: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whatever block it is."""
    block_rows(monkeypatch, 40)
    assert steps_from(monkeypatch, stored, original)[0] < 0.6
    for row in (0, 50, 95):
        moved = original[PROJECTION].clone()
        moved[row] += 1
        worst, where = steps_from(monkeypatch, stored, {**original, PROJECTION: moved})
        assert worst > 10 and where == f"model.{PROJECTION}"


@pytest.mark.parametrize("place", range(len(FORMS) - 1))
def test_codes_of_every_form_are_within_a_step(
    place: int, mixed: PackageWeights, built: tiny.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is two entries off is not."""
    worst, _ = weight_steps(mixed, built.source, [*mixed.part.shapes])
    assert 0.3 < worst <= 1
    path = [p for p in matrices(mixed.part.shapes) if mixed.stored(p).coded][place]
    real = PackageWeights.stored

    def spoilt(self: PackageWeights, asked: str) -> Stored:
        kept = real(self, asked)
        if asked != path:
            return kept
        values = kept.values.clone()
        values[3, 5] += 2 if values[3, 5] < 4 else -2
        return Stored(values, kept.scale, kept.tables)

    monkeypatch.setattr(PackageWeights, "stored", spoilt)
    worst, where = weight_steps(mixed, built.source, [*mixed.part.shapes])
    assert worst > 1 and where == f"model.{path}"


def cut_off(wide: torch.Tensor) -> torch.Tensor:
    """fp32 to fp16 toward zero."""
    return (wide.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).half()


# What a converter could do in place of rounding to the nearest code by the largest weight of each row: from a matrix in
# fp32, and the fp16 scales that it should have.
WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor], Stored]] = {
    "rounding down": lambda w, s: Stored((w / s).floor().clamp(-127, 127).to(torch.int8), s),
    "cutting off": lambda w, s: Stored((w / s).trunc().to(torch.int8), s),
    "scales doubled": lambda w, s: Stored((w / (2 * s)).round().to(torch.int8), 2 * s),
    "a sixteenth of the range": lambda w, s: Stored((w / (16 * s)).round().to(torch.int8), 16 * s),
    "one scale for all rows": lambda w, s: Stored((w / s.max()).round().to(torch.int8), s.max().expand(s.shape)),
    "scales a little small": lambda w, s: Stored((w / (0.99 * s)).round().clamp(-127, 127).to(torch.int8), 0.99 * s),
    "fp16 in place of codes": lambda w, s: Stored(w.half()),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_is_not_rounding_to_nearest_by_the_largest_weight_is_refused(
    way: str, stored: PackageWeights, original: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, sound = stored.stored, stored.stored(PROJECTION)
    assert sound.scale is not None
    wrong = WRONG[way](original[PROJECTION].float(), sound.scale)
    monkeypatch.setattr(rounding, "block", lambda tensor, source: original[tensor.path])

    def missed() -> set[str]:
        rows = list(weights_kept(stored, NOWHERE, in_int8(stored.part)))
        return {row.name for row in rows if not THRESHOLDS[row.name].holds(row.value)}

    assert missed() == set()
    monkeypatch.setattr(stored, "stored", lambda path: wrong if path == PROJECTION else held(path))
    assert missed() and missed() <= {"weight_steps", "scale_steps"}


@pytest.mark.parametrize(("entries", "tables"), [(16, 1), (256, 2)])
def test_a_palette_of_fewer_entries_or_other_tables_than_its_form_has_is_refused(entries: int, tables: int) -> None:
    """Its codes are within half a gap of what they stand for, however few entries there are."""
    kept = Stored(torch.zeros(4, 4, dtype=torch.uint8), tables=torch.arange(entries).half().repeat(tables, 1))
    own = "palette4" if entries == 16 else "palette8/2"
    assert kept.has_form(form(own)) and not kept.has_form(form("palette8")) and not kept.has_form(form("fp16"))


def test_small_rows_that_are_rounded_well_are_not_remarked_upon(
    stored: PackageWeights, original: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A padding row of next to nothing loses its scale and no more."""
    padded = original[PROJECTION].clone()
    padded[3] = 1e-8
    held = stored.stored
    codes, scale, _ = to_integers(padded, form("int8").levels)
    wanted = Stored(codes, scale.float()[:, None])
    monkeypatch.setattr(rounding, "block", lambda tensor, source: {**original, PROJECTION: padded}[tensor.path])
    monkeypatch.setattr(stored, "stored", lambda path: wanted if path == PROJECTION else held(path))
    rows = {row.name: row for row in weights_kept(stored, NOWHERE, in_int8(stored.part))}
    assert 0 < rows["subnormal_steps"].value <= 1
    assert rows["subnormal_steps"].detail == f"model.{PROJECTION}"


def test_a_vector_that_was_cut_off_in_place_of_rounded_is_refused(
    stored: PackageWeights, original: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {**original, NORM: original[NORM].float() * 1.37}
    held = stored.stored
    for way, passes in ((torch.Tensor.half, True), (cut_off, False)):
        made = Stored(way(wide[NORM]))
        monkeypatch.setattr(stored, "stored", lambda path, made=made: made if path == NORM else held(path))
        assert THRESHOLDS["weight_steps"].holds(steps_from(monkeypatch, stored, wide)[0]) == passes


FOUR = "layers.2.self_attn.o_proj.weight"


@pytest.fixture
def chosen(built: tiny.Build, tmp_path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Codes of one matrix, of which some are three steps off, and the forms of a part that has others in INT8."""
    part = built.parts["layers_02_03"]
    codes, scale, _ = to_integers(PartWeights(part, built.source)[FOUR], form("int4").levels)
    codes[0, :5] = torch.where(codes[0, :5] > 0, codes[0, :5] - 3, codes[0, :5] + 3)
    forms = dict.fromkeys(matrices(part.shapes), "int8") | {FOUR: "int4"}
    return {f"{FOUR}.int4.codes": codes.to(torch.int8).numpy(), f"{FOUR}.int4.scale": scale.numpy()}, forms


def kept(
    built: tiny.Build,
    codes: dict[str, np.ndarray],
    forms: dict[str, str],
    folder: Path,
    converted: dict[str, np.ndarray] | None = None,
    as_forms: dict[str, str] | None = None,
) -> dict[str, tuple[float, str]]:
    """What is measured of a package made of some codes and forms, where others may have been chosen."""
    part = built.parts["layers_02_03"]
    write_codes(folder / "chosen.safetensors", codes)
    write_codes(folder / "converted.safetensors", converted or codes)
    package = folder / "p.mlpackage"
    convert_stamped(
        part, built.source, as_forms or forms, package, templates.FOLDER, codes=folder / "converted.safetensors"
    )
    held = PackageWeights(package, part, chosen=Chosen(folder / "chosen.safetensors", forms))
    return {row.name: (row.value, row.detail) for row in weights_kept(held, built.source, forms)}


def test_chosen_codes_may_be_further_away_and_nothing_else(
    built: tiny.Build, chosen: tuple[dict[str, np.ndarray], dict[str, str]], tmp_path: Path
) -> None:
    rows = kept(built, *chosen, tmp_path)
    assert rows["weight_steps"][0] <= 1 and FOUR not in rows["weight_steps"][1]
    assert rows["codes_differ"] == (0, "")
    assert 2 < rows["code_steps"][0] < 4 and rows["code_steps"][1] == f"model.{FOUR}"


@pytest.mark.parametrize("path", [NORM, PROJECTION])
def test_beside_chosen_codes_the_others_are_still_rounded(
    path: str,
    built: tiny.Build,
    chosen: tuple[dict[str, np.ndarray], dict[str, str]],
    original: dict[str, torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm, or a matrix in INT8, of the part whose codes are up to eight steps away."""
    spoilt = original | {path: original[path] * 1.01 if path == NORM else original[path] + 0.01}
    monkeypatch.setattr(rounding, "block", lambda tensor, source: spoilt[tensor.path])
    steps, where = kept(built, *chosen, tmp_path)["weight_steps"]
    assert steps > 1 and where == f"model.{path}"


@pytest.mark.parametrize("what", ["codes", "scale"])
def test_one_number_that_nobody_chose_is_counted(
    what: str, built: tiny.Build, chosen: tuple[dict[str, np.ndarray], dict[str, str]], tmp_path: Path
) -> None:
    codes, forms = chosen
    other = {name: values.copy() for name, values in codes.items()}
    other[f"{FOUR}.int4.{what}"].flat[7] += 1
    assert kept(built, codes, forms, tmp_path, other)["codes_differ"] == (1, FOUR)


def test_what_has_another_form_than_was_chosen_differs_everywhere(
    built: tiny.Build, chosen: tuple[dict[str, np.ndarray], dict[str, str]], tmp_path: Path
) -> None:
    codes, forms = chosen
    rounded = forms | {FOUR: "fp16"}
    rows = kept(built, codes, forms, tmp_path, codes, rounded)
    assert rows["codes_differ"] == (codes[f"{FOUR}.int4.codes"].size, FOUR)
