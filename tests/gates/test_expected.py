"""What a build records for whoever checks it: transformers' own results, in at most a megabyte."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checked
import limits
import numpy as np
import pytest
import tiny
import torch

from shardmill.gates import expected
from shardmill.gates.expected import MOST_BYTES, Recording, greedy, record_decoder
from shardmill.runtime.expected import read_expected, rows

LOGITS = limits.sums("fp32", tiny.HIDDEN, limits.HEAD)
# Of the larger logit: two are off, and the file has four digits of a gap that is at most twice as large as that logit.
GAP = limits.Limit(2 * limits.model(tiny.LAYERS, tiny.FFN).value + 2 * 5e-4, "gap of two logits, in four digits")


@pytest.fixture(scope="module")
def recorded(built: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return read_expected(checked.record(built, tmp_path_factory.mktemp("recorded")))


def test_the_results_are_transformers_with_the_packages_weights(built: tiny.Build, recorded: Any) -> None:
    """By transformers' whole model, whose layers of the part alone see the rows."""
    model = tiny.transformers_model(built.source, tiny.dequantised(built))
    one = recorded.parts["layers_02_03"]
    x = torch.from_numpy(rows(*one.seeds["x"], 7, tiny.HIDDEN))
    model.model.layers = model.model.layers[2:3]
    model.model.norm = torch.nn.Identity()
    with torch.no_grad():
        found = model.model(inputs_embeds=x[None]).last_hidden_state[0].numpy()
    limits.rows_agree("results", one.rows[""], found, limits.model(1, tiny.FFN))


def test_logits_are_those_at_places_and_the_largest(built: tiny.Build, recorded: Any) -> None:
    weights = tiny.dequantised(built)
    model, one = tiny.transformers_model(built.source, weights), recorded.parts["head_1"]
    hidden = torch.from_numpy(rows(*one.seeds["hidden"], 7, tiny.HIDDEN))
    with torch.no_grad():
        logits = (model.model.norm(hidden) @ weights["lm_head.weight"].T)[:, tiny.VOCAB // 2 :].numpy()
    assert one.rows[""].shape == (7, 266)
    largest = np.sort(logits)[:, ::-1][:, :10]  # by value: two that are nearly equal may change places
    limits.numbers_agree("largest logits", one.rows[""][:, 256:], largest, LOGITS)
    limits.numbers_agree("their places", np.take_along_axis(logits, one.largest, axis=1), largest, LOGITS)


def test_the_first_answer_is_transformers_greedy_text(built: tiny.Build, recorded: Any) -> None:
    """Whatever was guessed at first; and the rivals are the next likeliest tokens."""
    model = tiny.transformers_model(built.source, tiny.dequantised(built))
    text, answer = [*recorded.answer.prompt], recorded.answer
    for token, (rival, gap) in zip(answer.tokens, answer.rivals, strict=True):
        with torch.no_grad():
            best = model(torch.tensor([text])).logits[0, -1].topk(2)
        assert best.indices.tolist() == [token, rival]
        size = float(best.values.abs().max())
        limits.numbers_agree("gap", float(best.values[0] - best.values[1]), gap, GAP, size)
        text.append(token)
    assert text[:16] == list(built.text[:16]) and len(answer.tokens) == 8


@pytest.mark.parametrize("start", [[], [9] * 8])
def test_any_guess_ends_in_the_same_answer(start: list[int]) -> None:
    """A model whose next token is the sum of all before it, so that each wrong guess spoils those after it."""

    class Summing:
        passes = 0

        def logits(self, tokens: list[int], *_: Any) -> torch.Tensor:
            self.passes += 1
            return torch.nn.functional.one_hot(torch.tensor(tokens).cumsum(0) % 11, 11).float()

    model: Any = Summing()
    found = greedy(model, [1, 2, *[0] * 14, *start], None, None)  # type: ignore[arg-type]
    assert found["tokens"] == [3, 6, 1, 2, 4, 8, 5, 10] and model.passes <= 9


def test_results_that_are_too_many_are_thinned_out() -> None:
    """Every n-th channel is kept, of hidden states only."""
    recording = Recording()
    for number in range(4):
        part: Any = SimpleNamespace(name=f"layers_{number}")
        recording.add(part, {"seeds": {}}, {"rows": np.zeros((7, 20_000), np.float32)})
    recording.add(
        SimpleNamespace(name="head_0"),
        {},
        {"rows": np.zeros((7, 266), np.float32), "largest": np.zeros((7, 10), np.int32)},
    )  # type: ignore[arg-type]
    recording.thinned()
    sizes = {name: array.shape for name, array in recording.arrays.items()}
    assert sizes["layers_3/rows"] == (7, 6667) and sizes["head_0/rows"] == (7, 266)
    assert (
        recording.about["parts"]["layers_0"] == {"seeds": {}, "every": 3} and recording.about["parts"]["head_0"] == {}
    )
    assert sum(array.nbytes for array in recording.arrays.values()) <= MOST_BYTES


def test_a_part_whose_experts_fp16_changes_gets_other_numbers(
    built: tiny.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after some attempts none: then the line says why."""
    answers = [None, None, ({"seeds": {}}, {})]
    monkeypatch.setattr(expected, "_results", lambda *_: None)
    monkeypatch.setattr(
        expected, "_made", lambda part, seeds, *_: tried.append(seeds["x"][0]) or (answers.pop(0) if answers else None)
    )
    part, known = built.parts["layers_02_03"], {"hidden": torch.ones(5, 2, 96)}
    for made, why in ((3, {"seeds": {}}), (8, {"why_not": f"{expected.UNMADE}: the first answer runs it"})):
        tried: list[int] = []
        recording = Recording()
        record_decoder(recording, part, 2, built.plan, SimpleNamespace(model=None), known, Path(), None)  # type: ignore[arg-type]
        assert len(set(tried)) == made and recording.about["parts"][part.name] == why
