"""Rows of pictures in a text: each is looked up by its number, and the text stands where transformers has it.

A picture must not shift the text differently when its rows did not run again, after a draft was rejected, or in a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import program_forms
import pytest
import tiny
import torch
from kit_runner.figures import relative_error
from models.tiny_families import SLOTS, Blocks, described, limit_of, tensors_of, tiny_model
from numpy.typing import NDArray

from shardmill.errors import ShardmillError
from shardmill.gates.passes import Pass
from shardmill.media.image_rules import Area, ImageRules, Placeholder
from shardmill.media.numbers import row_numbers
from shardmill.media.pixels import View
from shardmill.runtime.kv import Floats
from shardmill.runtime.rows import HeldRows

FIRST = 1 << 61
GRIDS = [(2, 5), (4, 3)]
PICTURES = [[FIRST + 1000 * k + i for i in range(h * w)] for k, (h, w) in enumerate(GRIDS)]
TEXT = [5, 9, 7, *PICTURES[0], 3, *PICTURES[1], *PICTURES[0], 8, 2, 6, 4, 1, 10, 12]
VOCAB = 384


def held(width: int, slots: int = 64) -> HeldRows:
    rows = HeldRows(VOCAB, slots)
    rng = np.random.default_rng(1)
    for numbers, grid in zip(PICTURES, GRIDS, strict=True):
        rows.hold(numbers, rng.standard_normal((len(numbers), width)).astype(np.float32), grid)
    return rows


def by_transformers(text: Sequence[int]) -> NDArray[np.int64]:
    """The positions of a text that begins new pictures wherever the first row of one stands, [T, 3]."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

    class Config:
        class vision_config:
            spatial_merge_size = 2

    model = object.__new__(Qwen3_5Model)
    object.__setattr__(model, "config", Config)
    # Pictures that touch would count as one, so the second of them is called a video's only frame.
    kinds, grids = list[int](), {1: list[list[int]](), 2: list[list[int]]()}
    for token in text:
        if token < VOCAB:
            kinds.append(0)
            continue
        picture, index = divmod(token - FIRST, 1000)
        if index == 0:
            kind = 2 if kinds and kinds[-1] == 1 else 1
            height, width = GRIDS[picture]
            grids[kind].append([1, 2 * height, 2 * width])
        kinds.append(kind)
    told, _ = Qwen3_5Model.get_rope_index(
        model,
        torch.tensor([list(text)]),
        torch.tensor([kinds]),
        torch.tensor(grids[1]) if grids[1] else None,
        torch.tensor(grids[2]) if grids[2] else None,
    )
    return told[:, 0].T.numpy()


@pytest.mark.parametrize("step", [1, 3, 64])
def test_the_text_stands_where_transformers_has_it(step: int) -> None:
    rows = held(4)
    told = [rows.turned(TEXT[at : at + step], range(at, min(at + step, len(TEXT)))) for at in range(0, len(TEXT), step)]
    np.testing.assert_array_equal(np.concatenate(told), by_transformers(TEXT))


def test_what_was_rejected_shifts_nothing() -> None:
    """Another picture, or the end of one, ran in the place of the right tokens."""
    rows, wanted = held(4), by_transformers(TEXT)
    for at in range(len(TEXT)):
        for wrong in (PICTURES[1], PICTURES[0][-1:] * 4, [1, 2, 3]):
            rows.turned(wrong[:12], range(at, at + len(wrong[:12])))
        np.testing.assert_array_equal(rows.turned(TEXT[at : at + 1], [at]), wanted[at : at + 1])


def test_a_copy_brings_the_shift_back() -> None:
    rows, wanted = held(4), by_transformers(TEXT)
    rows.turned(TEXT, range(len(TEXT)))
    kept = [(start, stop, rows.after(start, stop)) for start, stop in [(0, 20), (20, len(TEXT))]]
    rows.turned([1] * 60, range(60))
    for one in kept:
        rows.restore(*one)
    for at in (3, 9, 20, 26, len(TEXT) - 1):
        np.testing.assert_array_equal(rows.turned(TEXT[at:], range(at, len(TEXT))), wanted[at:])
        rows.turned(TEXT, range(len(TEXT)))
    rows.turned([1] * 60, range(60))
    assert rows.after(0, 60) is None
    rows.turned(TEXT, range(len(TEXT)))
    rows.restore(0, 64, None)
    assert rows.turned([1], [60]).tolist() == [[60] * 3]


def test_a_row_stands_in_place_of_the_tables() -> None:
    rows, table = held(4), np.arange(4.0 * VOCAB, dtype=np.float32).reshape(VOCAB, 4)
    told = rows.look_up([5, PICTURES[1][7], 9, PICTURES[0][0]], table)
    again = np.random.default_rng(1)
    first, second = (again.standard_normal((len(numbers), 4)).astype(np.float32) for numbers in PICTURES)
    np.testing.assert_array_equal(told, [table[5], second[7], table[9], first[0]])
    np.testing.assert_array_equal(rows.look_up([3, 4], table), table[[3, 4]])


def test_rows_that_were_released_are_refused() -> None:
    rows, numbers = held(4), PICTURES[0]
    rows.release(numbers)
    with pytest.raises(ShardmillError, match=f"token {numbers[3]} is beyond the vocabulary of 384, and no row that is"):
        rows.look_up([1, numbers[3]], np.zeros((VOCAB, 4), np.float32))
    with pytest.raises(ShardmillError):
        rows.turned([numbers[3]], [0])
    assert rows.turned(PICTURES[1][:1], [0]).tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(
    ("numbers", "grid"), [([FIRST] * 5, (2, 3)), ([FIRST] * 6, (2, 2)), ([1, 2, 3, 4, 5, 6], (2, 3))]
)
def test_rows_that_do_not_fit_are_refused(numbers: list[int], grid: tuple[int, int]) -> None:
    with pytest.raises(ShardmillError, match="do not fit their"):
        held(4).hold(numbers, np.zeros((6, 4), np.float32), grid)


class Showing(Blocks):
    """A whole model's blocks that look rows up as the engine does."""

    def __init__(self, model: torch.nn.Module, axes: Sequence[int]) -> None:
        super().__init__(described(model), tensors_of(model))
        self.shown = held(self.table.shape[1], SLOTS)
        self.host.axes = np.asarray(axes)
        self.plain = self.table

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        arrays, turned = self.host.arrays, self.shown.turned(tokens, positions)
        self.table = torch.from_numpy(self.shown.look_up(tokens, self.plain.numpy()))
        self.host.arrays = lambda slots, positions: arrays(slots, positions, turned)  # type: ignore[method-assign]
        try:
            return super().forward(range(len(tokens)), slots, positions)
        finally:
            self.host.arrays = arrays  # type: ignore[method-assign]


@pytest.mark.numeric
def test_a_model_gives_transformers_logits_after_two_pictures() -> None:
    """In passes of 1 to 4 tokens, some of which are rejected."""
    sections = [2, 1, 1]
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25, "mrope_section": sections}
    model = tiny_model("qwen3_5_text", rope_parameters=rope, vocab_size=VOCAB)
    axes = [axis if axis and i < 3 * sections[axis] else 0 for i, axis in enumerate([0, 1, 2] * 11)]
    engine = Showing(model, axes)
    positions = torch.from_numpy(by_transformers(TEXT)).T[:, None]
    with torch.no_grad():
        rows = engine.shown.look_up(TEXT, engine.plain.numpy())
        truth = model(inputs_embeds=torch.from_numpy(rows)[None], position_ids=positions, use_cache=False).logits[0]
    rng, start, told = np.random.default_rng(0), 0, list[Floats]()
    while start < len(TEXT):
        end = min(start + int(rng.integers(1, 5)), len(TEXT))
        kept = int(rng.integers(1, end - start + 1))
        wrong = [int(token) for token in rng.integers(0, VOCAB, end - start - kept)]
        one = Pass((*TEXT[start : start + kept], *wrong), tuple(range(start, end)), kept)
        told.append(engine.forward(one.tokens, one.positions, one.positions)[:kept])
        start += kept
    assert relative_error(np.concatenate(told), truth.numpy()) < limit_of(model).value


@pytest.mark.usefixtures("fp32")
def test_an_engine_takes_rows_for_tokens(built: tiny.Build) -> None:
    """Rows that are those of the table's give the same logits, to the bit, in its own process and through copies."""
    engine, text = program_forms.load(built), list(built.text[:32])
    numbers = [FIRST + i for i in range(12)]
    pictured = [*text[:4], *numbers, *text[16:]]

    def fed(tokens: Sequence[int], start: int = 0) -> np.ndarray:
        spans = [range(at, at + 4) for at in range(start, len(tokens), 4)]
        return np.concatenate([engine.forward([tokens[p] for p in span], span, span) for span in spans])

    wanted = fed(text)
    engine.reset()
    with pytest.raises(ShardmillError, match="no row that is held"):
        fed(pictured)
    engine.hold(numbers, engine.table[text[4:16]], (3, 4))
    engine.reset()
    assert np.array_equal(fed(pictured), wanted)
    engine.copy_out({1: (0, 32)})
    engine.reset()
    fed(text[::-1])
    engine.copy_in([1])
    assert np.array_equal(fed(pictured, 16), wanted[16:])
    engine.release(numbers)
    with pytest.raises(ShardmillError, match="no row that is held"):
        fed(pictured)


RULES = ImageRules(2, 2, "bicubic", 1 / 255, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), Area(16, 4096), Placeholder("m", "r"))


def view(seed: int = 0, grid: tuple[int, int] = (4, 6)) -> View:
    return View(grid, np.random.default_rng(seed).integers(0, 256, (12, 24), np.uint8), RULES)


def test_numbers_say_what_a_row_is() -> None:
    """The same row of the same picture in the same build, and no other, has the same number."""
    numbers = row_numbers(view(), "build", VOCAB, 6)
    assert numbers == row_numbers(view(), "build", VOCAB, 6) and len(set(numbers)) == 6
    assert all(VOCAB <= number < 1 << 63 for number in numbers)
    changed = view().levels.copy()
    changed[7, 5] ^= 1
    others = [
        row_numbers(view(1), "build", VOCAB, 6),
        row_numbers(view(grid=(6, 4)), "build", VOCAB, 6),
        row_numbers(view(), "another", VOCAB, 6),
        row_numbers(View((4, 6), changed, RULES), "build", VOCAB, 6),
    ]
    assert len({*numbers, *(number for other in others for number in other)}) == 30
