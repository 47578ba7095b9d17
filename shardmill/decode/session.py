"""One sequence in an engine's KV slots: what is committed, what may be fed next, what a new prompt can reuse.

Tokens are fed after the committed ones and count only once `commit` keeps them; what is not kept is hidden by its
position and overwritten by the next call. Calls are padded to a configured width; the padding takes the slots that
follow and never goes past the last one, nor to one that is still seen. A prompt may take wider calls than decoding.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.decode.engine import Engine, Logits, decode_widths
from shardmill.decode.errors import DecodeError, PromptTooLongError
from shardmill.decode.slots import SINKS, ContextPolicy, choose_layout

_PASS = 16  # tokens that a call costs beside its own; see docs/benchmarks.md for how long calls take by their width


def check_prompt(prompt: Sequence[int], *, vocab: int, room: int | None) -> None:
    """Refuses a prompt that a model cannot take; needs the model's sizes only.

    Args:
        prompt: its tokens.
        vocab: the model's vocabulary size.
        room: tokens that its context holds; None: any number.

    Raises:
        DecodeError: the prompt is empty or holds tokens of another vocabulary.
        PromptTooLongError: it does not fit.
    """
    if not prompt:
        raise DecodeError("the prompt is empty: give at least one token, e.g. the beginning-of-text token")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise DecodeError(f"the prompt holds a token outside the vocabulary of {vocab}: is it another model's?")
    if room is not None and len(prompt) > room:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens, the context {room}: shorten it, or build with a larger context"
        )


@dataclass(frozen=True)
class Prefill:
    """A prompt in the slots, or as much of it as was run so far.

    Attributes:
        row: logits [V] after its last token, [0] while that has not been run.
        held: its tokens in the slots, `reused` of them from before.
        passes: engine calls made. width: of the last one.
    """

    row: Logits
    held: int
    reused: int
    passes: int
    width: int


class Session:
    """Owns an engine's slots. `widths` are those of decode passes.

    Args:
        engine: the engine, for this session alone.
        context_policy: what happens when the slots are used up: stop, or slide the window.
        sinks: positions that a sliding window never gives up.
        block: positions that it gives up at a time; see `choose_layout`.

    Raises:
        DecodeError: the engine takes no single tokens, or its context is too small to slide.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        context_policy: ContextPolicy = "stop",
        sinks: int = SINKS,
        block: int | None = None,
    ) -> None:
        self._engine = engine
        self.widths = decode_widths(engine)
        self._wide = tuple(sorted(set(engine.widths)))  # those of prompts too
        self._layout = choose_layout(context_policy, engine.slots, self.widths[-1], sinks=sinks, block=block)
        self._tokens: list[int] = []
        self._fed: list[int] = []
        self._first = self._layout.first_visible(0)  # first position, sinks apart, that has not been given up
        engine.reset()

    @property
    def engine(self) -> Engine:
        """The engine whose slots these are."""
        return self._engine

    @property
    def tokens(self) -> Sequence[int]:
        """The committed tokens; callers must not change them."""
        return self._tokens

    def room(self) -> int:
        """Most tokens that one `feed` may take now; 0 when the context is full."""
        position = len(self._tokens)
        slots = self._layout.writable(position)
        widest = max((w for w in self.widths if w <= slots), default=0)
        window = self._layout.same_window(position)
        return widest if window is None else min(widest, window)

    def can_hold(self, count: int) -> bool:
        """Whether a text of `count` tokens fits."""
        slots = self._layout.room(0)
        return slots is None or count <= slots

    def undoable(self) -> int:
        """How many tokens may be committed from here on and still be taken back by `truncate`."""
        position = len(self._tokens)
        slots, window = self._layout.room(position), self._layout.same_window(position)
        if window is not None:
            return min(window, self.widths[-1])
        return slots or 0

    def pass_width(self, count: int) -> int:
        """Width of the engine call that `feed` would use for `count` tokens."""
        return next(w for w in self.widths if w >= count)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuses a prompt that `prefill` cannot take.

        Raises:
            DecodeError: it is empty or holds tokens of another vocabulary.
            PromptTooLongError: it does not fit.
        """
        check_prompt(prompt, vocab=self._engine.vocab, room=self._layout.room(0))

    def prefill(self, prompt: Sequence[int]) -> Prefill:
        """Makes the committed tokens equal to `prompt`, running only what a shared prefix does not
        already hold.

        Raises:
            DecodeError: see `check_prompt`.
        """
        self.check_prompt(prompt)
        *_, last = self.prefill_passes(prompt)
        return last

    def prefill_passes(self, prompt: Sequence[int]) -> Iterator[Prefill]:
        """Runs `prefill` pass by pass, for a checked prompt. If the caller stops, the session holds what was run."""
        reused = done = self.truncate(self._shared(prompt))
        self._fit(len(prompt))
        passes = 0
        while done < len(prompt):
            count, width = self._prompt_pass(len(prompt) - done)
            tokens = prompt[done : done + count]
            done += count
            row = self._rows(tokens, width)[-1] if done == len(prompt) else self._write(tokens, width)
            self.commit(count)
            passes += 1
            yield Prefill(row, done, reused, passes, width)

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Runs `tokens` after the committed ones; logits [len(tokens), V]. Nothing is committed yet.

        Raises:
            DecodeError: more tokens than `room()`.
        """
        if not 1 <= len(tokens) <= self.room():
            raise DecodeError(f"{len(tokens)} tokens do not fit into a pass, {self.room()} do")
        return self._rows(tokens, self.pass_width(len(tokens)))

    def refeed(self, index: int) -> Logits:
        """Runs the `index`-th token of the last `feed` once more, alone; logits [V]."""
        row: Logits = self._forward([self._fed[index]], len(self._tokens) + index)[0]
        return row

    def commit(self, count: int) -> None:
        """Keeps the first `count` tokens of the last `feed`."""
        if not 0 <= count <= len(self._fed):
            raise DecodeError(f"{count} tokens to commit, but {len(self._fed)} were fed")
        self._tokens.extend(self._fed[:count])
        self._fed = []

    def truncate(self, length: int) -> int:
        """Drops committed tokens from `length` on and returns how many are still held.

        That is `length`, or 0 if the engine no longer holds what the token at `length` must see. Slots are hidden by
        position; nothing is undone.
        """
        if not self._intact(length):
            self._engine.reset()
            self._first = self._layout.first_visible(0)
            length = 0
        del self._tokens[length:]
        self._fed = []
        return length

    def _fit(self, length: int) -> None:
        """Tells the engine how many slots a text of so many tokens and the pass after it take, if it wants to know.

        In every layout the first positions have the first slots, and later ones no others than there are.
        """
        fit = getattr(self._engine, "fit", None)
        if fit is not None:
            fit(min(length + self.widths[-1], self._engine.slots))

    def _prompt_pass(self, left: int) -> tuple[int, int]:
        """How many of the `left` tokens of a prompt are fed next, and the width of the call: that which feeds most for
        its cost. That is no measured time, so that a prompt is cut alike in every run.
        """
        position = len(self._tokens)
        slots, window = self._layout.writable(position), self._layout.same_window(position)
        most = left if window is None else min(left, window)
        fitting = [w for w in self._wide if w <= slots]
        if not fitting:
            raise DecodeError(f"{left} tokens of the prompt are left, but the context is full")
        width = max(fitting, key=lambda w: (min(w, most) / (_PASS + w), w))
        return min(width, most), width

    def _rows(self, tokens: Sequence[int], width: int) -> Logits:
        rows: Logits = self._forward(_padded(tokens, width), len(self._tokens))
        self._fed = list(tokens)
        return rows[: len(tokens)]

    def _write(self, tokens: Sequence[int], width: int) -> Logits:
        """`_rows` for tokens whose logits nobody needs, so an engine may skip them. Returns an empty array."""
        self._forward(_padded(tokens, width), len(self._tokens), getattr(self._engine, "write", None))
        self._fed = list(tokens)
        return np.empty(0, np.float32)

    def _forward(self, tokens: Sequence[int], position: int, call: Callable[..., Any] | None = None) -> Any:
        self._slide(self._layout.first_visible(position))
        positions = range(position, position + len(tokens))
        return (call or self._engine.forward)(tokens, [self._layout.slot(p) for p in positions], positions)

    def _slide(self, first: int) -> None:
        if first > self._first:
            self._engine.forget([self._layout.slot(p) for p in range(self._first, first)])
            self._first = first

    def _intact(self, length: int) -> bool:
        """Whether the engine still holds all that the token at `length` must see."""
        rewindable = getattr(self._engine, "rewindable", None)
        seen = self._layout.first_visible(length) == self._first
        return seen and (length == 0 or rewindable is None or bool(rewindable(length)))

    def _shared(self, prompt: Sequence[int]) -> int:
        limit = min(len(self._tokens), len(prompt) - 1)  # the last token has to run: its logits are wanted
        return next((i for i in range(limit) if self._tokens[i] != prompt[i]), limit)


def _padded(tokens: Sequence[int], width: int) -> list[int]:
    return [*tokens, *[tokens[-1]] * (width - len(tokens))]
