"""The parity gates on models whose layers differ in kind: sound ones pass, and each kind's own faults are caught."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import verdicts
from convert.small import write_family
from models.tiny_families import write_tiny

from shardmill.gates.nonfinite import audit_values
from shardmill.machine import load_programs_as
from shardmill.runtime import engine, kv
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place
from shardmill.runtime.program import Program

from . import judged
from .test_faults import caught

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="question 1 is the portable engine's; Core ML itself computes in fp16 only"
)
FIRST, LAST = "layers_00_03", "layers_03_04"


def build(folder: Path, model_type: str) -> tiny.Build:
    """Three layers of two kinds and a last one."""
    source = tiny.fetched(write_family(folder / "checkpoint", model_type), folder / "source")
    return tiny.converted(source, folder, topology=[[0, 3], [3, 4]], head={"slices": 1})


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """Sliding and full layers with rotary tables of their own, and a stream in an eighth of its size."""
    return build(tmp_path_factory.mktemp("gemma"), "gemma3_text")


@pytest.fixture(scope="module")
def lfm(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """Convolutions and attention."""
    return build(tmp_path_factory.mktemp("lfm"), "lfm2")


@pytest.fixture(params=["gemma", "lfm"])
def mixed(request: pytest.FixtureRequest) -> tiny.Build:
    found: tiny.Build = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("name", [FIRST, LAST, "head_0"])
def test_a_sound_part_passes(mixed: tiny.Build, name: str) -> None:
    verdicts.all_pass(judged.part(mixed, name))


def test_a_sound_stack_passes(mixed: tiny.Build) -> None:
    rows = {row["name"]: row for row in judged.whole(mixed)}
    assert {"program_error", "rejected_draft_error", "speculation_mismatches", "kl"} <= set(rows)
    verdicts.all_pass(rows.values())


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """Rows for each token and layer, and layers that share caches, all in the second part."""
    folder = tmp_path_factory.mktemp("gemma4")
    source = tiny.fetched(write_tiny("gemma4_text", folder / "checkpoint"), folder / "source")
    return tiny.converted(source, folder, topology=[[0, 2], [2, 8]], head={"slices": 1})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers_00_02", "layers_02_08", "head_0"])
def test_a_sound_part_with_rows_of_a_second_table_passes(gemma4: tiny.Build, name: str) -> None:
    verdicts.all_pass(judged.part(gemma4, name))


@pytest.mark.slow
def test_a_sound_stack_with_rows_of_a_second_table_passes(gemma4: tiny.Build) -> None:
    verdicts.all_pass(judged.whole(gemma4))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    """Layers that share caches are in separate parts, to which the host gives the caches of the first part."""
    folder = tmp_path_factory.mktemp("apart")
    source = tiny.fetched(write_tiny("gemma4_text", folder / "checkpoint"), folder / "source")
    return tiny.converted(
        source, folder, topology=[[0, 4], [4, 6], [6, 8]], head={"slices": 1}, program={"state": "host"}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["layers_00_04", "layers_04_06", "layers_06_08"])
def test_a_sound_part_that_reads_another_s_caches_passes(apart: tiny.Build, name: str) -> None:
    verdicts.all_pass(judged.part(apart, name))


@pytest.mark.slow
def test_a_sound_stack_of_parts_that_read_another_s_caches_passes(apart: tiny.Build) -> None:
    verdicts.all_pass(judged.whole(apart))


@pytest.mark.slow
def test_lent_caches_that_lack_the_pass_own_tokens(apart: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    real, before = Program._run, dict[str, Any]()

    def late(program: Program, *given: Any) -> dict[str, Any]:
        if program.held:
            before.update({name: array.copy() for name, array in program.held.arrays.items()})
        caches = SimpleNamespace(arrays=before)
        monkeypatch.setattr(program, "borrowed", dict.fromkeys(program.borrowed, caches))
        return real(program, *given)

    monkeypatch.setattr(Program, "_run", late)
    with caught("program_error"):
        judged.whole(apart)


@pytest.mark.slow
def test_rows_of_another_layer(gemma4: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    real = engine.token_rows

    def shifted(*given: Any) -> dict[str, Any]:
        rows = real(*given)
        return {f"p_{(i + 1) % len(rows)}": rows[f"p_{i}"] for i in range(len(rows))}

    monkeypatch.setattr(engine, "token_rows", shifted)
    with caught("program_error"):
        judged.whole(gemma4)


def test_a_window_off_by_one(gemma: tiny.Build) -> None:
    with caught("program_error"):
        judged.part(replace(gemma, plan={**gemma.plan, "window": gemma.plan["window"] + 1}), FIRST)


def test_rotary_tables_exchanged(gemma: tiny.Build) -> None:
    tables = gemma.plan["rope"]
    swapped = {"rope": tables["rope_local"], "rope_local": tables["rope"]}
    with caught("program_error"):
        judged.part(replace(gemma, plan={**gemma.plan, "rope": swapped}), FIRST)


def test_an_embedding_without_its_scale(gemma: tiny.Build) -> None:
    """The host's table holds the scale; a plan that forgets it is told by the stack."""
    (table,) = gemma.parts["embedding"].tensors
    bare = replace(gemma.parts["embedding"], tensors=(replace(table, source=replace(table.source, times=1.0)),))
    with caught("program_error"):
        judged.whole(replace(gemma, parts={**gemma.parts, "embedding": bare}))


def shifted(patch: pytest.MonkeyPatch, change: Any) -> None:
    """Changes the ring's masks of every pass."""
    real = kv.KVLayout._ring_masks

    def masks(self: kv.KVLayout, at: Any) -> dict[str, Any]:
        found: dict[str, Any] = change(real(self, at))
        return found

    patch.setattr(kv.KVLayout, "_ring_masks", masks)


def test_taps_read_in_the_wrong_order(lfm: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted(monkeypatch, lambda found: found | {"conv_read_mask": found["conv_read_mask"][:, ::-1].copy()})
    with caught("program_error"):
        judged.part(lfm, FIRST)


def test_an_input_written_into_the_wrong_slot_of_the_ring(lfm: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    shifted(monkeypatch, lambda found: found | {"conv_write_mask": np.roll(found["conv_write_mask"], 1, axis=3)})
    with caught("program_error"):
        judged.part(lfm, FIRST)


def test_a_ring_that_keeps_the_last_inputs_written(lfm: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shifting state would, rejected drafts included: only those show it."""

    def start(self: kv.KVLayout, at: Any) -> dict[str, Any]:
        begun = getattr(self, "written", 0)
        self.written = begun + len(at)  # type: ignore[attr-defined]
        return real(self, np.arange(begun, begun + len(at)))

    real = kv.KVLayout._ring_masks
    monkeypatch.setattr(kv.KVLayout, "_ring_masks", start)
    with caught("rejected_draft_error") as error:
        judged.part(lfm, FIRST)
    assert "program_error" not in str(error.value) and "width_error is" not in str(error.value)


def test_what_either_mask_hides_is_no_activation(gemma: tiny.Build) -> None:
    """The audit of fp16's range would take the sliding mask's -1e4 for a value near its end."""
    with load_programs_as("fp16"):
        engine = Engine(in_place(gemma.plan, gemma.packages, gemma.table), Path("/"))
    assert min(row.headroom for row in audit_values(engine, gemma.text[:16])) > 50
