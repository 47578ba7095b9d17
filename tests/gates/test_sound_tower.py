"""The gate of a tower for sounds: it passes what is right, and each mistake that others have made fails a number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sounds
import tiny
import torch
from torch import nn

from shardmill.errors import GateError
from shardmill.gates import tower as gates
from shardmill.media.image_rules import Placeholder
from shardmill.media.mel import MelRules
from shardmill.media.sound_rules import SoundRules
from shardmill.models import parts
from shardmill.runtime.tower import tokens_of

from .test_tower import IN_FP32, Graph, Made, Mutant, _connector, _options, _spoilt, computed

ROWS = 13
MEL = MelRules(16000, 32, 400, 400, 160, "slaney", 8000, "reflect", 2, "decades", 1e-10)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("sounds")
    source = tiny.fetched(sounds.write_hearing(folder / "checkpoint"), folder / "source")
    every, plan = tiny.split(source, topology="auto", head={"slices": "auto"}, audio={"frames": sounds.FRAMES})
    chosen = {name: part for name, part in every.items() if part.kind == "tower"}
    for name, part in chosen.items():
        tiny.convert(part, source, folder / f"{name}.mlpackage")
    return Made(source, folder, chosen, plan["tower"])


@IN_FP32
def test_rows_are_transformers_in_every_bucket(made: Made) -> None:
    for name in made.parts:
        found = made.judged(name)
        whole = [detail for detail in found if detail.startswith("tower_error")]
        assert len(whole) == 3 and "faint_error faint" in found
        assert all(found[detail] > 0 for detail in whole)  # the gate has judged how large they are


def _late(axis: int) -> Callable[[Any], Any]:
    return lambda values: np.roll(values, 1, axis)


def _kernel(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(sounds.AUDIO["downsample_hidden_size"], -1, 3, 3)


def _longer(mask: np.ndarray) -> np.ndarray:
    """The rest of the last chunk is seen."""
    seen = int((mask == 0).sum())
    mask[..., : -(-seen // ROWS) * ROWS] = 0
    return mask


def _shorter(mask: np.ndarray) -> np.ndarray:
    """The last chunk, which is cut, is not seen."""
    seen = int((mask == 0).sum())
    mask[..., seen // ROWS * ROWS if seen > ROWS and seen % ROWS else seen :] = -1e4
    return mask


MUTANTS = {
    "epsilon of 1e-6": (Mutant(_options(rms_norm_eps=1e-6)), "faint_error"),
    "epsilon of 1e-4": (Mutant(_options(rms_norm_eps=1e-4)), "tower_error"),
    "GELU by tanh in the layers": (Mutant(_options(activation="gelu_tanh")), "tower_error"),
    "GELU by tanh in the connector": (Mutant(_connector("gelu_tanh")), "tower_error"),
    "RMS norms": (Mutant(_options(norm="rms", norm_bias=False)), "tower_error"),
    "scores divided by another root": (Mutant(_options(attention_scale=64**-0.5)), "tower_error"),
    "frames one place late": (Mutant(arrays=_spoilt("x", _late(3))), "tower_error"),
    "bins one place up": (Mutant(arrays=_spoilt("x", _late(2))), "tower_error"),
    "chunks in another order": (Mutant(arrays=_spoilt("x", _late(0))), "tower_error"),
    "a chunk turned round": (Mutant(arrays=_spoilt("x", lambda x: x[..., ::-1].copy())), "tower_error"),
    "positions one row late": (Mutant(arrays=_spoilt("positions", _late(3))), "tower_error"),
    "positions that go on": (Mutant(rules=lambda r: r | {"waves": {**r["waves"], "base": 9000}}), "tower_error"),
    "cosines first": (Mutant(arrays=_spoilt("positions", lambda p: np.roll(p, p.shape[1] // 2, 1))), "tower_error"),
    "kernels turned over": (
        Mutant(weights=_spoilt("conv2.weight", lambda w: _kernel(w).transpose(2, 3).reshape(w.shape))),
        "tower_error",
    ),
    "no bias of a convolution": (Mutant(weights=_spoilt("conv3.bias", lambda bias: bias * 0)), "tower_error"),
    "bins before channels": (
        Mutant(
            weights=_spoilt(
                "patch.weight", lambda w: w.reshape(len(w), -1, sounds.BINS // 8).transpose(1, 2).reshape(w.shape)
            )
        ),
        "tower_error",
    ),
    "what fills the bucket is seen": (Mutant(arrays=_spoilt("key_mask", lambda mask: mask * 0)), "tower_error"),
    "what fills the last chunk is seen": (Mutant(arrays=_spoilt("key_mask", _longer)), "tower_error"),
    "a cut chunk is not seen": (Mutant(arrays=_spoilt("key_mask", _shorter)), "tower_error"),
    "rows of another size": (Mutant(weights=_spoilt("linear_2.weight", lambda w: w * 1.01)), "tower_error"),
}  # fmt: skip


@IN_FP32
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_fails_the_number_that_is_there_for_it(
    name: str, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant, number = MUTANTS[name]
    with pytest.raises(GateError, match=number):
        computed(made, mutant, monkeypatch, "tower_300")


@IN_FP32
def test_gelu_by_tanh_in_the_convolutions_fails(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "gelu_erf", lambda x: nn.functional.gelu(x, approximate="tanh"))
    with pytest.raises(GateError, match="tower_error"):
        computed(made, Mutant(), monkeypatch, "tower_300")


@IN_FP32
def test_rows_one_place_late_fail(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Graph.__call__
    monkeypatch.setattr(Graph, "__call__", lambda self, arrays: np.roll(plain(self, arrays), 1, 2))
    with pytest.raises(GateError, match="tower_error"):
        computed(made, Mutant(), monkeypatch, "tower_300")


@IN_FP32
@pytest.mark.parametrize("role", ["nothing", "a bias of keys"])
def test_what_is_no_mistake_passes(role: str, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of keys adds the same to every score of a query, which no softmax sees: nothing turns the keys."""
    without = Mutant(weights=_spoilt("layers.1.self_attn.k_proj.bias", lambda bias: bias * 0))
    assert computed(made, Mutant() if role == "nothing" else without, monkeypatch, "tower_300")


@IN_FP32
def test_a_faint_sound_has_the_variance_of_epsilons(made: Made) -> None:
    """At the first norm; otherwise a wrong epsilon would change nothing that a limit sees."""
    part = made.parts["tower_300"]
    image = gates.faint_sound(part, made.rules, made.stored("tower_300"))
    assert image.positions is not None and image.grid == (1, 300)
    stored = made.stored("tower_300")
    graph = Graph(part.spec, {path: stored.values(path).reshape(shape) for path, shape in part.shapes.items()})
    seen = list[torch.Tensor]()
    graph.module.get_submodule("layers.0").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    arrays = gates.tower_arrays(made.rules, part.spec.tokens, image.columns, image.grid)
    graph({**arrays, "positions": image.positions})
    faint = float(seen[0].square().mean())
    graph(arrays)
    assert faint < 0.05 * float(seen[1].square().mean())


@pytest.mark.parametrize("frames", [1, 7, 8, 9, 99, 100, 101, 250, 300])
def test_a_window_has_as_many_rows_as_transformers_counts(frames: int) -> None:
    from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths

    counted = int(_get_feat_extract_output_lengths(torch.tensor(frames)))
    assert tokens_of({"chunk": 100, "rows": ROWS}, (1, frames)) == counted
    rules = SoundRules(MEL, 300, 100, ROWS, Placeholder(mark="a", row="a"))
    assert rules.rows_of(frames) == counted
