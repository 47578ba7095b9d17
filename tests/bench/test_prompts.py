"""Prompts of exact length that fit into the context, and what a drafter would have got accepted after them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from drafted_decoding import create_drafter
from drafted_decoding.drafters import PLAIN, Draft, RequestInfo
from tokenizers import Tokenizer

from shardmill.bench import prompts
from shardmill.bench.prompts import Prompt, replay
from shardmill.config import Benchmark
from shardmill.errors import ShardmillError

ROOT = Path(__file__).parents[2]


def spell(text: str) -> list[int]:
    """A token per character."""
    return [ord(character) for character in text]


@pytest.mark.parametrize("length", [1, 6, 7, 8, 14, 20])
def test_a_text_is_repeated_to_exactly_the_length(length: int) -> None:
    assert prompts.tile_text(range(7), length) == tuple(i % 7 for i in range(length))


def test_a_text_without_a_token_is_refused(tmp_path: Path) -> None:
    """Not tiled for ever."""
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ShardmillError, match=r"empty\.txt holds no token"):
        prompts.tiled(tmp_path / "empty.txt", [5], spell)


@pytest.mark.parametrize("content", [None, b"\xff"])
def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content:
        (tmp_path / "bad.txt").write_bytes(content)
    with pytest.raises(ShardmillError, match=r"bad\.txt: "):
        prompts.tiled(tmp_path / "bad.txt", [5], spell)


def write(folder: Path, **tasks: list[str]) -> Path:
    """A folder of tasks."""
    for task, texts in tasks.items():
        (folder / task).mkdir()
        for i, text in enumerate(texts):
            (folder / task / f"{i}.txt").write_text(text)
    return folder


def test_each_task_gives_its_first_prompts(tmp_path: Path) -> None:
    """In the order of their names, without the last line break and with all others."""
    folder = write(tmp_path, edit=["a\n\n", "b", "c"], copying=["d\n"], unused=["e"])
    (folder / "edit/notes.md").write_text("no prompt")
    assert prompts.of_tasks(folder, ["copying", "edit"], 2, spell) == [
        Prompt("copying", "0.txt", (ord("d"),)),
        Prompt("edit", "0.txt", (ord("a"), ord("\n"))),
        Prompt("edit", "1.txt", (ord("b"),)),
    ]


def test_a_task_without_prompts_is_an_error(tmp_path: Path) -> None:
    """A name that is mistyped must not be measured as nothing."""
    with pytest.raises(ShardmillError, match="editing holds no .txt file"):
        prompts.of_tasks(write(tmp_path, edit=["a"]), ["edit", "editing"], 1, spell)


def test_what_has_no_room_is_named() -> None:
    """A prompt as long as the room still fits; of a task only the prompts that are too long are left out."""
    asked = [
        Prompt(20, "", (0,) * 20),
        Prompt(21, "", (0,) * 21),
        Prompt("copying", "1", (0,)),
        Prompt("edit", "1", ()),
    ]
    kept, refused = prompts.fitting(asked, 20)
    assert [prompt.group for prompt in kept] == [20, "copying", "edit"]
    assert refused == {21: "context has room for 20 prompt tokens"}
    assert prompts.fitting(asked, -3)[1][20] == "context has room for 0 prompt tokens"


def test_the_prompts_that_come_along_suit_the_demo() -> None:
    """Every default task has as many prompts as the defaults ask for, and the demo's context has room for each."""
    tokenizer = Tokenizer.from_file(str(ROOT / "resources/demo/tokenizer.json"))
    settings = Benchmark()
    found = prompts.of_tasks(
        ROOT / settings.task_prompts, settings.tasks, settings.prompts_per_task, lambda text: tokenizer.encode(text).ids
    )
    assert len(found) == len(settings.tasks) * settings.prompts_per_task
    assert len({prompt.tokens for prompt in found}) == len(found)
    assert all(20 < len(prompt.tokens) < 1024 - settings.new_tokens - 4 for prompt in found)


class Guesser:
    """Proposes the same tokens whatever came before, and remembers what it was told."""

    name = "guesser"

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.told, self.limits = tokens, list[tuple[list[int], int]](), list[int]()

    def reset(self, prompt: Sequence[int], info: RequestInfo = PLAIN) -> None:
        self.text = list(prompt)

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        assert list(context) == self.text
        self.limits.append(limit)
        return Draft(self.tokens[:limit])

    def observe(self, emitted: Sequence[int], accepted: int) -> None:
        self.text += emitted
        self.told.append((list(emitted), accepted))

    def finish(self) -> None:
        """Nothing is kept."""


def test_a_pass_gives_what_is_right_and_one_more() -> None:
    """The drafter sees the text as decoding would have shown it to it, and drafts never reach past the end."""
    drafter = Guesser(1, 2, 3)
    got = replay(drafter, [7, 8], [0, 1, 2, 9, 1, 5, 5, 1], 3)
    assert drafter.told == [([0], 0), ([1, 2, 9], 2), ([1, 5], 1), ([5], 0), ([1], 0)]
    assert (got.drafted, got.accepted) == ((3, 3, 1, 0), (2, 1, 0, 0))
    assert drafter.limits == [3, 3, 1]
    assert got.decoded == 7


def test_a_repeated_text_is_all_accepted() -> None:
    got = replay(create_drafter("ngram"), list(range(7)) * 3, [i % 7 for i in range(21)], 3)
    assert got.accepted == (3, 3, 3, 3, 3)


def test_without_drafts_a_pass_gives_one_token() -> None:
    assert replay(create_drafter("none"), [1, 2], [3, 4, 5], 3).accepted == (0, 0)
