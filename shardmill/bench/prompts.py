"""Prompts of a benchmark: one dense code text tiled to several lengths, and prompts of several tasks.

Tiled text repeats itself, which is the best case for drafts of repeated text; the tasks are the other cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafted_decoding import Drafter
from drafted_decoding.generate import agreement

from shardmill.errors import ShardmillError
from shardmill.files import read_named


@dataclass(frozen=True)
class Replay:
    """Drafted and accepted tokens per pass."""

    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def decoded(self) -> int:
        """Return the number of tokens from passes: each gives its accepted drafts and one more."""
        return sum(self.accepted) + len(self.accepted)


def replay(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], most: int) -> Replay:
    """Replay a whole request; see `replay_output`."""
    drafter.reset(prompt)
    replayed = replay_output(drafter, prompt, output, most)
    drafter.finish()
    return replayed


def replay_output(drafter: Drafter, prompt: Sequence[int], output: Sequence[int], most: int) -> Replay:
    """Replay `output`, whose first token comes from the prefill, with at most `most` drafts a pass."""
    drafter.observe(output[:1], 0)
    context = [*prompt, output[0]]
    drafted, accepted = [], []
    done = 1
    while done < len(output):
        limit = min(most, len(output) - done - 1)
        draft = drafter.propose(context, limit).tokens if limit else ()
        right = agreement(draft, output[done:])
        emitted = output[done : done + right + 1]
        drafter.observe(emitted, right)
        context += emitted
        done += len(emitted)
        drafted.append(len(draft))
        accepted.append(right)
    return Replay(tuple(drafted), tuple(accepted))


Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Prompt:
    """Tokens to continue, and the group of their figures: a prompt length or a task's name."""

    group: int | str
    name: str
    tokens: tuple[int, ...]


def tile_text(tokens: Sequence[int], length: int) -> tuple[int, ...]:
    """Return the text repeated and cut to `length` tokens."""
    return tuple((list(tokens) * (length // len(tokens) + 1))[:length])


def tiled(text: Path, lengths: Iterable[int], encode: Encode) -> list[Prompt]:
    """Return one prompt per length. Raises ShardmillError if the text can't be read or contains no token."""
    tokens = encode(read_named(text))
    if not tokens:
        raise ShardmillError(f"{text} holds no token: give a text for the prompts")
    return [Prompt(length, text.name, tile_text(tokens, length)) for length in lengths]


def of_tasks(folder: Path, tasks: Iterable[str], count: int, encode: Encode) -> list[Prompt]:
    """Read at most `count` prompts of each task, in the order of their file names, without the last line break.

    Raises:
        ShardmillError: a task has no file.
    """
    by_task = {task: files(folder, task)[:count] for task in tasks}
    empty = [task for task, paths in by_task.items() if not paths]
    if empty:
        raise ShardmillError(f"{folder / empty[0]} holds no .txt file: each task is a folder of prompts")
    return [
        Prompt(task, path.name, tuple(encode(read_named(path).removesuffix("\n"))))
        for task, paths in by_task.items()
        for path in paths
    ]


def files(folder: Path, task: str) -> list[Path]:
    """Return the paths of a task's prompts."""
    return sorted((folder / task).glob("*.txt"))


def fitting(prompts: Iterable[Prompt], room: int) -> tuple[list[Prompt], dict[int | str, str]]:
    """Return the prompts that fit into the context, and the reason for each group with a prompt that does not."""
    taken, refused = [], {}
    for prompt in prompts:
        if len(prompt.tokens) <= room:
            taken.append(prompt)
        else:
            refused[prompt.group] = f"context has room for {max(room, 0)} prompt tokens"
    return taken, refused
