"""Images in a text, from pixels to tokens: a built tower and decoder answer what transformers' `generate` answers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import tiny
import torch
import towers
from drafted_decoding import Session
from drafted_decoding.drafters.base import PLAIN, Draft, RequestInfo
from drafted_decoding.generate import run
from drafted_decoding.policies import create_policy
from kit_runner.figures import relative_error
from PIL import Image
from safetensors.torch import load_file

from shardmill.errors import ShardmillError
from shardmill.gates.disturbed import disturbed, longest_sum
from shardmill.machine import is_portable, load_programs_as
from shardmill.media.image_rules import read_image_rules
from shardmill.media.pictures import Picture
from shardmill.media.pixels import View, views
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place

MARK, COUNT, SEEDS = 250, 32, (1, 2, 3)
NOISE = 16 * limits.UNITS["fp32"]
# Width and height in pixels: 6 x 10 and 8 x 4 patches, which resizing leaves alone; or a cut one and its whole.
SIZES = {kind: [(80, 48), (120, 100) if kind == "lfm2_vl" else (32, 64)] for kind in towers.VISION}
FP32 = pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have")
pytestmark = [FP32, pytest.mark.thorough]


@dataclass(frozen=True)
class Asked:
    """A question with two images, as the engine takes it, and what transformers says to it."""

    engine: Engine
    views: Sequence[View]
    prompt: list[int]  # with a number beyond the vocabulary for each row
    tokens: list[int]  # of the answer
    logits: Any  # after each token of prompt and answer, [n, vocab]
    limit: limits.Limit  # of the logits' error


def numbers(image: int, count: int) -> list[int]:
    return [1000 * (image + 1) + i for i in range(count)]


@pytest.fixture(scope="module", params=list(towers.VISION))
def asked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny.fetched(towers.write_pictured(folder / "checkpoint", request.param), folder / "source")
    parts, plan = tiny.split(
        source, context=160, topology="auto", head={"slices": 1}, images={"patches": towers.BUCKETS[request.param]}
    )
    programs = {name: part for name, part in parts.items() if part.kind != "embedding"}
    packages = {
        name: tiny.convert(part, source, folder / f"{name}.mlpackage", "fp16") for name, part in programs.items()
    }
    table = tiny.write_table(parts["embedding"], source, folder / "embedding.safetensors")
    with load_programs_as("fp32"):
        engine = Engine(in_place(plan, packages, table), Path("/"))
    shown = [view for size in SIZES[request.param] for view in seen(plan, size)]
    yield answered(engine, shown, towers.pictured(request.param), plan)


def seen(plan: dict[str, Any], size: tuple[int, int]) -> Sequence[View]:
    rules = read_image_rules({key: value for key, value in plan["images"].items() if key != "most"})
    levels = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return views(rules, Picture(Image.fromarray(levels)))[1]


def answered(engine: Engine, shown: Sequence[View], model: Any, plan: dict[str, Any]) -> Asked:
    """Asks transformers, with the same pixels."""
    assert engine.tower is not None
    prompt, ids = [5, 9, 7], [5, 9, 7]
    for image, view in enumerate(shown):
        rows = engine.tower.rows(view.columns, view.grid)
        h, w = (extent // plan["tower"]["merge"] for extent in view.grid)
        engine.hold(numbers(image, len(rows)), rows, (h, w))
        prompt += [*numbers(image, len(rows)), 3 + image]
        ids += [MARK] * len(rows) + [3 + image]
    prompt, ids = [*prompt, 8, 2, 6], [*ids, 8, 2, 6]
    given = towers.given(model, shown, plan["tower"]) | {"input_ids": torch.tensor([ids])}
    if "mm_token_type_ids" in towers.KEYS[model.config.model_type]:
        given["mm_token_type_ids"] = torch.tensor([[int(token == MARK) for token in ids]])
    with torch.no_grad():
        tokens = model.generate(**given, max_new_tokens=COUNT, do_sample=False)[0, len(ids) :].tolist()
        whole = {**given, "input_ids": torch.tensor([ids + tokens])}
        if "mm_token_type_ids" in whole:
            more = torch.zeros(1, len(tokens), dtype=torch.long)
            whole["mm_token_type_ids"] = torch.cat([given["mm_token_type_ids"], more], dim=1)
        logits = model(**whole).logits[0].numpy()
        with disturbed(model, NOISE):
            moved = relative_error(model(**whole).logits[0].numpy(), logits)
    # A recurrence amplifies what it is given, by as much as noise shows.
    within = limits.moved(moved * limits.UNITS["fp32"] / NOISE, longest_sum(model))
    return Asked(engine, shown, prompt, tokens, logits, within)


class Guesser:
    """Drafts the right tokens about as often as wrong ones."""

    name = "guesser"

    def __init__(self, asked: Asked, seed: int) -> None:
        self.asked, self.random, self.rejected = asked, random.Random(seed), 0

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        """Nothing is remembered."""

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        at = len(context) - len(self.asked.prompt)
        right = self.asked.tokens[at : at + limit]
        return Draft(tuple(token if self.random.random() < 0.5 else (token + 7) % 200 for token in right))

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        self.rejected += accepted == 0

    def finish(self) -> None:
        """Nothing is kept."""


def demand_the_answer(asked: Asked, seed: int) -> None:
    """Transformers' tokens, with drafts of which some are rejected."""
    drafter, session = Guesser(asked, seed), Session(asked.engine)
    always = create_policy("always", session.widths)
    found = run(session, asked.prompt, max_new_tokens=COUNT, drafter=drafter, policy=always)
    assert list(found.tokens) == asked.tokens and drafter.rejected > 3


def demand_the_logits(asked: Asked, cut: int) -> None:
    """Transformers', at every position of the text, the answer included, by passes of `cut` tokens."""
    asked.engine.reset()
    text, rows = [*asked.prompt, *asked.tokens], []
    for start in range(0, len(text), cut):
        at = range(start, min(start + cut, len(text)))
        rows.append(asked.engine.forward([text[i] for i in at], at, at))
    assert asked.limit.value < 1e-2  # below what a mistake makes
    limits.agrees(f"logits, {cut} a pass", relative_error(np.concatenate(rows), asked.logits), asked.limit)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_answer_is_transformers_with_rejected_drafts(asked: Asked, seed: int) -> None:
    demand_the_answer(asked, seed)


@pytest.mark.parametrize("cut", [1, 3, 4])
def test_logits_are_transformers_wherever_passes_cut_an_image(asked: Asked, cut: int) -> None:
    demand_the_logits(asked, cut)


def test_another_image_gives_another_answer(asked: Asked) -> None:
    """Otherwise the equalities above would say nothing of images."""
    asked.engine.reset()
    assert asked.engine.tower is not None
    view = asked.views[0]
    rows = asked.engine.tower.rows(-view.columns, view.grid)
    other = [500_000 + i for i in range(len(rows))]
    h, w = (extent // asked.engine.tower.rules["merge"] for extent in view.grid)
    asked.engine.hold(other, rows, (h, w))
    swapped = dict(zip(numbers(0, len(rows)), other, strict=True))
    text = [swapped.get(token, token) for token in asked.prompt]
    logits = [asked.engine.forward([token], [i], [i])[0] for i, token in enumerate(text)]
    asked.engine.release(other)
    assert relative_error(logits[-1][None], asked.logits[len(text) - 1][None]) > 1e-2


def _transposed(rows: Any, grid: tuple[int, int]) -> Any:
    return rows.reshape(*grid, -1).swapaxes(0, 1).reshape(rows.shape)


MISTAKES: dict[str, Callable[[Any, tuple[int, int]], Any]] = {
    "rows reversed": lambda rows, _: rows[::-1],
    "columns after columns": _transposed,
    "rows of another scale": lambda rows, _: rows * 8,
}


@pytest.mark.parametrize("name", MISTAKES)
def test_rows_in_wrong_places_show_in_the_logits(asked: Asked, name: str) -> None:
    """Also where tokens stay the same: those of tiny models tell little."""
    tower = asked.engine.tower
    assert tower is not None
    view, merge = asked.views[0], tower.rules["merge"]
    rows, grid = tower.rows(view.columns, view.grid), (view.grid[0] // merge, view.grid[1] // merge)
    try:
        asked.engine.hold(numbers(0, len(rows)), MISTAKES[name](rows, grid), grid)
        assert relative_error(_after(asked), asked.logits[: len(asked.prompt)]) > 1e-2 > asked.limit.value
    finally:
        asked.engine.hold(numbers(0, len(rows)), rows, grid)
    limits.agrees(
        "rows that are right again", relative_error(_after(asked), asked.logits[: len(asked.prompt)]), asked.limit
    )


def _after(asked: Asked) -> Any:
    """The logits after each token of the prompt."""
    asked.engine.reset()
    return np.concatenate([asked.engine.forward([token], [i], [i]) for i, token in enumerate(asked.prompt)])


def test_rows_rounded_to_fp16_are_no_mistake(asked: Asked) -> None:
    """The tower's program gives such rows on the Neural Engine."""
    tower = asked.engine.tower
    assert tower is not None
    for form in (np.float16, np.float32):  # the exact ones come back
        for image, view in enumerate(asked.views):
            rows = tower.rows(view.columns, view.grid).astype(form).astype(np.float32)
            h, w = (extent // tower.rules["merge"] for extent in view.grid)
            asked.engine.hold(numbers(image, len(rows)), rows, (h, w))
        found = run(Session(asked.engine), asked.prompt, max_new_tokens=COUNT)
        assert list(found.tokens) == asked.tokens, form


def test_a_grid_that_no_program_takes_is_refused(asked: Asked) -> None:
    tower = asked.engine.tower
    assert tower is not None
    merge, most = tower.rules["merge"], tower.most
    long = (merge, most // merge + merge)
    with pytest.raises(ShardmillError, match=f"the largest program takes {most}"):
        tower.rows(np.zeros((3 * towers.PATCH**2, long[0] * long[1]), np.float32), long)
    with pytest.raises(ShardmillError, match="no blocks"):
        tower.rows(np.zeros((3 * towers.PATCH**2, merge * (merge + 1)), np.float32), (merge, merge + 1))


def test_the_checkpoint_holds_what_transformers_computed_with(tmp_path: Path) -> None:
    """Its weights are such that fp16 loses nothing."""
    folder = towers.write_pictured(tmp_path)
    held, model = load_file(folder / "model.safetensors"), towers.pictured()
    for name, weight in model.state_dict().items():
        if name in held:
            assert torch.equal(held[name].float(), weight), name
