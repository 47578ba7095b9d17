"""Deliberate faults, each caught by a gate; the same gates pass what is not at fault.

Faults of the programs are put into the code that makes them, faults of the host into the engine.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import verdicts
from numpy.typing import NDArray
from torch import Tensor

from shardmill.errors import CheckpointError, GateError
from shardmill.gates import runner
from shardmill.models import blocks, decoder, parts
from shardmill.runtime import kv
from shardmill.runtime.program import Program

from . import judged

pytestmark = pytest.mark.skipif(
    sys.platform == "darwin", reason="question 1 is the portable engine's; Core ML itself computes in fp16 only"
)
LAYER = "layers_02_03"
Mask = NDArray[np.float32]
Patch = pytest.MonkeyPatch


def caught(*measurements: str) -> Any:
    """A gate that names each of the measurements as missed."""
    return pytest.raises(GateError, match="".join(rf"(?=.*\b{name} is )" for name in measurements))


def host_mask(patch: Patch, mask: Any) -> None:
    """Replaces the attention mask that the host builds for gates and engine alike."""
    patch.setattr(kv, "attention_mask", mask)


def as_mask(visible: NDArray[np.bool_]) -> Mask:
    return np.where(visible, np.float32(0), kv.MASKED)[None, None]


# What is not at fault passes.


@pytest.mark.parametrize("name", ["layers_00_02", LAYER, "layers_03_04", "head_0", "head_1"])
def test_a_sound_part_passes(built: tiny.Build, name: str) -> None:
    rows = judged.part(built, name)
    names = {row["name"] for row in rows}
    assert {"weight_steps", "program_error", "width_error", "psnr"} <= names
    assert name.startswith("head") or {"width_state_error", "rejected_draft_error"} <= names
    verdicts.all_pass(rows)


def test_a_sound_stack_passes(built: tiny.Build) -> None:
    rows = {row["name"]: row for row in judged.whole(built)}
    expected = {"program_error", "argmax_mismatches", "rejected_draft_error", "kl", "top1_agreement"}
    assert {*expected, "speculation_mismatches"} <= set(rows)
    assert rows["kl"]["value"] > 1e-7  # INT8 and fp16 cost something: the shipped precision was really measured


def test_a_sound_part_over_the_original_length_passes(built: tiny.Build, tmp_path: Path) -> None:
    long = tiny.relabelled(built, tmp_path, original=tiny.CONTEXT // 2)
    verdicts.all_pass(judged.part(long, LAYER))


# Rotary tables.


def test_longrope_attention_factor_left_out(built: tiny.Build, monkeypatch: Patch) -> None:
    real = kv.rope_tables
    monkeypatch.setattr(kv, "rope_tables", lambda rope, positions: real({**rope, "scale": 1.0}, positions))
    with caught("program_error"):
        judged.part(built, LAYER)
    with caught("program_error"):
        judged.whole(built)


def test_longrope_attention_factor_left_out_of_the_plan(built: tiny.Build, monkeypatch: Patch) -> None:
    real = decoder.rope
    monkeypatch.setattr(decoder, "rope", lambda *arguments: replace(real(*arguments), scale=1.0))
    parts, plan = tiny.split(built.source)
    assert plan["architecture"]["ropes"]["rope"]["scale"] == 1.0
    with caught("program_error"):
        judged.part(replace(built, parts=parts, plan=plan), LAYER)


def test_short_factors_where_long_are_due(built: tiny.Build, tmp_path: Path, monkeypatch: Patch) -> None:
    real = decoder.rope
    monkeypatch.setattr(decoder, "rope", lambda config, context: real(config, 1))
    long = tiny.relabelled(built, tmp_path, original=tiny.CONTEXT // 2)
    assert long.plan["architecture"]["ropes"]["rope"]["factors"] == "short"
    with caught("program_error"):
        judged.part(long, LAYER)


def test_rotary_on_all_dimensions(built: tiny.Build, tmp_path: Path, monkeypatch: Patch) -> None:
    real = decoder.rope

    def unaware(config: Any, context: int) -> Any:
        """As if partial_rotary_factor were not known."""
        sane = real(config, context)
        exponents = np.arange(0, tiny.HEAD_DIM, 2) / tiny.HEAD_DIM
        return replace(sane, inv_freq=tuple((10000.0**-exponents).tolist()))

    monkeypatch.setattr(decoder, "rope", unaware)
    parts, plan = tiny.split(built.source)
    assert parts[LAYER].spec.graph.rope_dim == tiny.HEAD_DIM
    faulty = replace(built, parts=parts, plan=plan)
    with caught("program_error"):
        judged.part(faulty, LAYER, judged.converted(faulty, LAYER, tmp_path / "p.mlpackage"))


# Graphs.


def test_attention_output_flattened_token_first(built: tiny.Build, tmp_path: Path, monkeypatch: Patch) -> None:
    """[head, token, dim] instead of [head, dim, token]: the same at T=1, so only question 2 can see it."""

    def forward(self: blocks.Attention, x: Tensor, shared: blocks.Shared, caches: blocks.LayerCaches) -> Tensor:
        g, out = self.g, self.o_proj
        self.o_proj = torch.nn.Identity()  # the real one's input is its output
        y = real(self, x, shared, caches).reshape(1, g.heads, g.head_dim, -1)
        self.o_proj = out
        result: Tensor = out(y.transpose(2, 3).reshape(1, g.heads * g.head_dim, -1, 1))
        return result

    real = blocks.Attention.forward
    monkeypatch.setattr(blocks.Attention, "forward", forward)
    package = judged.converted(built, LAYER, tmp_path / "p.mlpackage")
    with caught("width_error") as error:
        judged.part(built, LAYER, package)
    assert "program_error" not in str(error.value)


def test_rmsnorm_without_its_weight(built: tiny.Build, tmp_path: Path, monkeypatch: Patch) -> None:
    """The package holds it, but the program divides it out again."""
    real = blocks.RMSNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        return real(self, x) / self.weight

    monkeypatch.setattr(blocks.RMSNorm, "forward", forward)
    package = judged.converted(built, "head_0", tmp_path / "p.mlpackage")
    with caught("program_error"):
        judged.part(built, "head_0", package)


def test_rmsnorm_s_weight_left_out_of_the_package(built: tiny.Build, tmp_path: Path, monkeypatch: Patch) -> None:
    real = blocks.RMSNorm.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        self.weight = torch.nn.Parameter(torch.ones_like(self.weight), requires_grad=False)
        return real(self, x)

    monkeypatch.setattr(blocks.RMSNorm, "forward", forward)
    package = judged.converted(built, "head_0", tmp_path / "p.mlpackage")
    with pytest.raises(GateError, match=r"weight_steps is .*norm|does not hold (model\.)?norm\.weight"):
        judged.part(built, "head_0", package)


def test_final_norm_applied_twice(built: tiny.Build, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(parts.HeadPart, "forward", lambda self, hidden: self.lm_head(self.norm(self.norm(hidden))))
    package = judged.converted(built, "head_0", tmp_path / "p.mlpackage")
    with caught("program_error"):
        judged.part(built, "head_0", package)


# Weights.


def test_a_part_s_weights_swapped_with_its_neighbour_s(built: tiny.Build, tmp_path: Path) -> None:
    """Layer 2 made from layer 3's tensors, under layer 2's names."""
    neighbour = {t.path.replace(".3.", ".2."): t for t in built.parts["layers_03_04"].tensors}
    swapped = tuple(replace(neighbour[t.path], path=t.path) for t in built.parts[LAYER].tensors)
    package = judged.converted(built, LAYER, tmp_path / "p.mlpackage", tensors=swapped)
    with caught("weight_steps"):
        judged.part(built, LAYER, package)


def test_head_slices_swapped(built: tiny.Build) -> None:
    one, other = built.packages["head_0"], built.packages["head_1"]
    with caught("weight_steps"):
        judged.part(built, "head_0", other)
    with caught("kl"):
        judged.whole(built, {"head_0": other, "head_1": one})


def test_layers_run_in_the_wrong_order(built: tiny.Build) -> None:
    rows = built.plan["parts"]
    order = [rows[0], rows[2], rows[1], *rows[3:]]
    with caught("program_error", "kl"):
        judged.whole(replace(built, plan={**built.plan, "parts": order}))


def spoilt_table(build: tiny.Build, file: Path, spoil: Callable[[Tensor], object]) -> Path:
    """A copy of the embedding table after `spoil`."""
    from safetensors.torch import load_file, save_file

    table = load_file(build.table)["embedding"].clone()
    spoil(table)
    save_file({"embedding": table}, file)
    return file


def test_embeddings_of_tokens_that_the_text_lacks(built: tiny.Build, tmp_path: Path) -> None:
    """No other number can see them."""
    unseen = sorted(set(range(tiny.VOCAB)) - set(judged.text(built.source)))
    assert len(unseen) > tiny.VOCAB // 2
    index = torch.tensor(unseen)
    table = spoilt_table(built, tmp_path / "table.safetensors", lambda rows: rows.index_fill_(0, index, 0))
    with caught("weight_steps") as error:
        judged.whole(built, spoilt=table)
    missed = r"stack: weight_steps is \S+, must be <= 0\.6 \(model\.embed_tokens\.weight, token \d+\)"
    assert re.fullmatch(missed, str(error.value))


def test_embeddings_scaled_by_a_fiftieth(built: tiny.Build, tmp_path: Path) -> None:
    """Too little for the likely tokens to change."""
    table = spoilt_table(built, tmp_path / "table.safetensors", lambda rows: rows.mul_(1.02))
    with caught("weight_steps"):
        judged.whole(built, spoilt=table)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_at_split(built: tiny.Build, tmp_path: Path, value: float) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.layers.3.mlp.down_proj.weight"
    checkpoint = tiny.copied_checkpoint(built.source, tmp_path / "checkpoint")
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    file = checkpoint / index["weight_map"][name]
    tensors = load_file(file)
    tensors[name][5, 7] = value
    save_file(tensors, file, metadata={"format": "pt"})
    source = tiny.fetched(checkpoint, tmp_path / "source")
    with pytest.raises(CheckpointError, match=re.escape(name)):
        tiny.split(source)
    tiny.split(built.source)


# Masks and slots.


def test_a_token_that_does_not_see_itself(built: tiny.Build, monkeypatch: Patch) -> None:
    host_mask(monkeypatch, lambda held, positions: as_mask(held[None, :] < positions[:, None]))
    with caught("program_error"):
        judged.part(built, LAYER)
    with caught("program_error"):
        judged.whole(built)


def test_a_token_that_sees_the_next_one(built: tiny.Build, monkeypatch: Patch) -> None:
    """One token a pass has no next one, so only question 2 can see it."""
    host_mask(monkeypatch, lambda held, positions: as_mask(held[None, :] <= positions[:, None] + 1))
    with caught("width_error"):
        judged.part(built, LAYER)
    with caught("width_error"):
        judged.whole(built)


def test_a_key_written_into_the_wrong_slot(built: tiny.Build, monkeypatch: Patch) -> None:
    real = kv.write_mask
    monkeypatch.setattr(kv, "write_mask", lambda slots, where: real(slots, (where + 1) % slots))
    with caught("program_error"):
        judged.part(built, LAYER)
    with caught("program_error"):
        judged.whole(built)


def test_a_pass_that_writes_only_its_first_token(built: tiny.Build, monkeypatch: Patch) -> None:
    real = kv.write_mask

    def first_only(slots: int, where: NDArray[np.int64]) -> Mask:
        mask = real(slots, where)
        mask[..., 1:] = 0
        return mask

    monkeypatch.setattr(kv, "write_mask", first_only)
    with caught("width_error", "width_state_error"):
        judged.part(built, LAYER)


def test_a_rejected_slot_left_exposed(built: tiny.Build, monkeypatch: Patch) -> None:
    """Within a pass all is well; what earlier passes wrote is seen by everyone, rejected or not."""

    def exposed(held: NDArray[np.int64], positions: NDArray[np.int64]) -> Mask:
        earlier = (held != kv.NEVER) & ~np.isin(held, positions)
        return as_mask((held[None, :] <= positions[:, None]) | earlier)

    host_mask(monkeypatch, exposed)
    with caught("rejected_draft_error") as error:
        judged.part(built, LAYER)
    assert "width_error" not in str(error.value)
    with caught("rejected_draft_error"):
        judged.whole(built)


def test_a_state_that_holds_no_numbers(built: tiny.Build, monkeypatch: Patch) -> None:
    """NaN in one state of several, and in nothing else, misses the threshold."""
    real = runner.PartRunner.run

    def spoilt(self: runner.PartRunner, *arguments: Any) -> Any:
        outputs, states = real(self, *arguments)
        last = list(states)[-1]
        return outputs, {**states, last: np.full_like(states[last], np.nan)}

    monkeypatch.setattr(runner.PartRunner, "run", spoilt)
    with caught("width_state_error"):
        judged.part(built, LAYER)


NOT_WIDE: dict[str, Callable[[Any], bool]] = {
    "narrow": lambda x: x.shape[2] == 1,
    "padded": lambda x: x.shape[2] > 1 and np.array_equal(x[:, :, -1], x[:, :, -2]),
}


@pytest.mark.parametrize("kind", NOT_WIDE)
def test_a_pass_that_only_fp16_spoils(built: tiny.Build, kind: str, monkeypatch: Patch) -> None:
    """Full passes are right, and so is everything in fp32."""
    real = Program.__call__

    def call(self: Program, inputs: Any) -> Any:
        found, spoils = real(self, inputs), NOT_WIDE[kind](inputs["x" if "x" in inputs else "hidden"])
        return found * np.nan if self.precision == "fp16" and spoils else found

    monkeypatch.setattr(Program, "__call__", call)
    for name in (LAYER, "head_0"):
        with caught("psnr"):
            judged.part(built, name)
    with caught("kl"):
        judged.whole(built)
