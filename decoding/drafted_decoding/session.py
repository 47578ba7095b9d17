"""One sequence in an engine's KV slots: its committed tokens, the next pass, and reuse by a new prompt.

Tokens are fed after the committed ones and count only after `commit` keeps them. Other fed tokens are hidden by their
position and overwritten by the next call. Calls are padded to a configured width. Padding uses the slots that follow,
but never goes past the last slot, or into a slot that is still visible. A prompt may use wider calls than decoding; an
engine with `pads` pads these itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counting
from typing import TypeVar

import numpy as np

from drafted_decoding.engine import DecodeError, Engine, Logits, NotFiniteError, PromptTooLongError, decode_widths
from drafted_decoding.layout import SINKS, ContextPolicy, choose_layout
from drafted_decoding.prefixes import PrefixCache

Result = TypeVar("Result")
_PASS = 16  # cost of a call in tokens, added to its width; lab/benchmarks.md has the time of calls by width


def check_prompt(prompt: Sequence[int], *, vocab: int, room: int | None, beyond: bool = False) -> None:
    """Raise an error for a prompt that a model can't accept; only the model's sizes are needed.

    Args:
        prompt: the prompt's tokens.
        vocab: the model's vocabulary size.
        room: tokens that fit into the context; None: any number.
        beyond: whether the engine knows tokens beyond the vocabulary.

    Raises:
        DecodeError: the prompt is empty or contains tokens of another vocabulary.
        PromptTooLongError: the prompt does not fit.
    """
    if not prompt:
        raise DecodeError("the prompt is empty: give at least one token, e.g. the beginning-of-text token")
    if min(prompt) < 0 or (max(prompt) >= vocab and not beyond):
        raise DecodeError(f"the prompt holds a token outside the vocabulary of {vocab}: is it another model's?")
    if room is not None and len(prompt) > room:
        raise PromptTooLongError(
            f"the prompt has {len(prompt)} tokens, the context {room}: shorten it, or build with a larger context"
        )


@dataclass(frozen=True)
class Prefill:
    """The progress of a prompt into the slots.

    Attributes:
        row: logits [V] after the prompt's last token, or [labels] of the engine's labels alone; [0] before that token
            has run.
        held: the prompt's tokens in the slots.
        reused: how many of these tokens were reused from earlier requests.
        passes: number of engine calls so far.
        width: width of the last call.
        rows: logits [T, V] after each token of the last call; [0] if nobody needs them.
    """

    row: Logits
    held: int
    reused: int
    passes: int
    width: int
    rows: Logits


@dataclass(frozen=True, eq=False)
class SetAside:
    """A text that was set aside: its tokens, and copies of what the slots contained of them.

    Attributes:
        tokens: the committed tokens.
        keys: the engine's keys of the copies, in order.
        bytes: the size of the copies.
        needed: slots that the engine needs, so that the next pass has the context that it would have had.
        private: whether a prefix cache may keep nothing of the text.
        weights: the engine's name for the weights that have computed it.
    """

    tokens: tuple[int, ...] = ()
    keys: tuple[int, ...] = ()
    bytes: int = 0
    needed: int = 0
    private: bool = False
    weights: str = ""


class Session:
    """The owner of an engine's slots. `widths` are the widths of decode passes.

    Args:
        engine: the engine, used only by this session.
        context_policy: what happens when the slots are used up: stop, or slide the window.
        sinks: positions that a sliding window never evicts.
        block: positions that it evicts at a time; see `choose_layout`.
        prefixes: the kept prefixes of earlier texts; None to keep none.

    Raises:
        DecodeError: the engine accepts no single tokens, or its context is too small to slide.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        context_policy: ContextPolicy = "stop",
        sinks: int = SINKS,
        block: int | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._engine = engine
        self.widths = decode_widths(engine)
        self._wide = tuple(sorted(set(engine.widths)))  # widths for prompts too
        self._layout = choose_layout(context_policy, engine.slots, self.widths[-1], sinks=sinks, block=block)
        self._prefixes = prefixes
        self._keys = counting(-1, -1)  # a prefix cache counts upwards
        self.clear()

    def clear(self) -> None:
        """Forget the text and compute with the bare model; texts that were set aside can be taken back."""
        self._tokens: list[int] = []
        self._fed: list[int] = []
        self._first = self._layout.first_visible(0)  # first position, besides the sinks, that has not been evicted
        self._private, self._needed = False, 0
        self._copied: SetAside | None = None  # a copy of the whole text that is in the slots
        self._weights = ""  # the engine's name for its adapter; texts of other weights are not reused
        self._engine.adapt(None)  # an earlier session may have left it with an adapter
        self._engine.reset()

    @property
    def engine(self) -> Engine:
        """Return the engine whose slots these are."""
        return self._engine

    @property
    def tokens(self) -> Sequence[int]:
        """Return the committed tokens; callers must not change the list."""
        return self._tokens

    def use_adapter(self, name: str | None) -> None:
        """Compute with an adapter from now on, or with the bare model.

        If that changes the weights, the committed tokens are dropped: another model computed their keys and values.

        Raises:
            Exception: the engine's, if it can't take this one; the session then stays as it was.
        """
        if name is None and not self._weights:
            return
        weights = self._engine.adapt(name)
        if weights != self._weights:
            self.keep()
            self._weights = weights
            self.truncate(0)

    def room(self) -> int:
        """Return the most tokens that one `feed` may take; 0 when the context is full."""
        position = len(self._tokens)
        slots = self._layout.writable(position)
        widest = max((w for w in self.widths if w <= slots), default=0)
        window = self._layout.same_window(position)
        return widest if window is None else min(widest, window)

    def can_hold(self, count: int) -> bool:
        """Return whether a text of `count` tokens fits."""
        slots = self._layout.room(0)
        return slots is None or count <= slots

    def undoable(self) -> int:
        """Return how many tokens may be fed one by one, and committed, from here on and still be undone by `truncate`.

        An engine with a recurrence says for how many its state stays as it is.
        """
        position = len(self._tokens)
        slots, window = self._layout.room(position), self._layout.same_window(position)
        room = (slots or 0) if window is None else min(window, self.widths[-1])
        most = self._engine.undoable(position)
        return room if most is None else min(room, most)

    def pass_width(self, count: int) -> int:
        """Return the width of the engine call that `feed` would use for `count` tokens."""
        return next(w for w in self.widths if w >= count)

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raise an error for a prompt that `prefill` can't accept.

        Raises:
            DecodeError: the prompt is empty or contains tokens of another vocabulary.
            PromptTooLongError: the prompt does not fit.
        """
        engine = self._engine
        check_prompt(prompt, vocab=engine.vocab, room=self._layout.room(0), beyond=engine.beyond)

    def prefill(self, prompt: Sequence[int]) -> Prefill:
        """Make the committed tokens equal to `prompt`, and run only the tokens after a shared prefix.

        Raises:
            DecodeError: see `check_prompt`.
        """
        self.check_prompt(prompt)
        *_, last = self.prefill_passes(prompt)
        return last

    def prefill_passes(
        self, prompt: Sequence[int], *, private: bool = False, labels: bool = False, scored: bool = False
    ) -> Iterator[Prefill]:
        """Run `prefill` pass by pass, for a checked prompt. If the caller stops, finished passes stay committed.

        Args:
            prompt: the prompt.
            private: True if no copy of this text may be kept for later ones.
            labels: True for the logits of the engine's labels alone.
            scored: True for the logits after every token. Each token runs then: what is kept of a text has no logits.
        """
        call = self._engine.forward_labels if labels else self._engine.forward
        reused, branch = self._restart(len(prompt)) if scored else self._resume(prompt)
        self._private, done, passes = private, reused, 0
        while done < len(prompt):
            count, width = self._prompt_pass((branch if done < branch else len(prompt)) - done)
            tokens = prompt[done : done + count]
            done += count
            told = scored or done == len(prompt)
            rows = self._rows(tokens, width, call) if told else self._write(tokens, width)
            row = rows[-1] if told else rows
            self.commit(count)
            passes += 1
            if self._prefixes and self._prefixes.whole and done in (branch, len(prompt)):
                self.keep()
            yield Prefill(row, done, reused, passes, width, rows)

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Run `tokens` after the committed ones and return logits [len(tokens), V]. Nothing is committed yet.

        Raises:
            DecodeError: more tokens than `room()`.
        """
        if not 1 <= len(tokens) <= self.room():
            raise DecodeError(f"{len(tokens)} tokens do not fit into a pass, {self.room()} do")
        return self._rows(tokens, self.pass_width(len(tokens)), self._engine.forward)

    def refeed(self, index: int) -> Logits:
        """Run the `index`-th token of the last `feed` again, alone, and return its logits [V]."""
        row: Logits = self._run(self._engine.forward, [self._fed[index]], len(self._tokens) + index)[0]
        return self._finite(row)

    def commit(self, count: int) -> None:
        """Keep the first `count` tokens of the last `feed`."""
        if not 0 <= count <= len(self._fed):
            raise DecodeError(f"{count} tokens to commit, but {len(self._fed)} were fed")
        self._tokens.extend(self._fed[:count])
        self._fed = []

    def truncate(self, length: int) -> int:
        """Drop committed tokens from `length` on and return how many are kept.

        The result is `length`, or 0 if the engine no longer has the tokens that position `length` must see. Dropped
        slots are hidden by position; nothing is undone.
        """
        if not self._intact(length):
            self._engine.reset()
            self._first = self._layout.first_visible(0)
            length = 0
        if length < len(self._tokens):
            self._copied = None
        del self._tokens[length:]
        self._fed = []
        return length

    def keep(self) -> None:
        """Let the prefix cache copy the committed text, unless it is private, has slid, or a ring is past its end.

        Of a text that was set aside, which goes on, only blocks are worth a copy.
        """
        length, prefixes = len(self._tokens), self._prefixes
        if not prefixes or not length or self._private or (self._copied and prefixes.whole):
            return
        if self._is_plain(length) and self._intact(length):
            prefixes.keep(self._tokens, self._weights)

    def set_aside(self, most: int, before: SetAside | None = None) -> SetAside | None:
        """Copy the committed text out of the slots, where it stays until another text takes its place.

        Args:
            most: bytes that the copies may take.
            before: earlier copies of this text, which may not be used any more; they are freed, or become part of the
                result.

        Returns:
            The copies. None if they are too large, if the engine makes none, or if the text has slid or a ring is past
            its end: then nothing has changed.
        """
        position, rest = self._engine.copy_bytes()
        length = len(self._tokens)
        size = position * length + rest
        if not (position or rest) or size > most or not self._is_plain(length) or not self._intact(length):
            return None
        grown = before is not None and not rest and before.tokens == tuple(self._tokens[: len(before.tokens)])
        old = before if before is not None and grown else SetAside()
        keys, size, start = old.keys, old.bytes, len(old.tokens)
        if start < length:
            keys = (*keys, next(self._keys))
            size += sum(self._engine.copy_out({keys[-1]: (start, length)}, keys[-1] if rest else None).values())
        if before is not None and not grown:
            self.drop(before)
        self._copied = SetAside(tuple(self._tokens), keys, size, self._needed, self._private, self._weights)
        return self._copied

    def take_back(self, text: SetAside) -> None:
        """Make a text that was set aside the committed one, and leave its copies as they are.

        Its adapter must be in use, see `use_adapter`.

        Raises:
            DecodeError: other weights are in use; the adapter may have been replaced.
        """
        if text.weights != self._weights:
            raise DecodeError("the adapter was replaced in the middle of an answer: ask again")
        if self._copied is text:
            return
        self.keep()
        self.truncate(0)
        self._needed = text.needed
        self._engine.fit(self._needed)
        self._engine.copy_in(text.keys)
        self._tokens, self._private, self._copied = list(text.tokens), text.private, text

    def drop(self, text: SetAside) -> None:
        """Free the copies of a text that was set aside."""
        if self._copied is text:
            self._copied = None
        self._engine.drop_copies(text.keys)

    def _resume(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Make the slots hold as much of a prompt's beginning as they, or the kept prefixes, have.

        Returns:
            The number of its tokens that they hold. Also where the prompt leaves kept texts, if the cache knows these
            tokens and yet can't recall them; a copy is made there, since a third text may branch off, too. Otherwise 0.
        """
        shared = self._shared(prompt)
        if self._prefixes is None:
            filled = self.truncate(shared)
            self._fit(len(prompt))
            return filled, 0
        if shared < len(self._tokens):
            self.keep()
        beginning = self._prefixes.find(prompt, self._weights)
        filled = self.truncate(shared)
        self._fit(len(prompt))
        if beginning.length > filled:
            self._prefixes.recall(beginning, filled)
            self._tokens = list(prompt[: beginning.length])
            filled = self.truncate(min(beginning.length, len(prompt) - 1))
            self._fit(len(prompt))
        return filled, beginning.known if filled < beginning.known else 0

    def _restart(self, length: int) -> tuple[int, int]:
        """Empty the slots for a prompt of `length` tokens, and return the pair of numbers that `_resume` returns."""
        self.keep()
        self.truncate(0)
        self._fit(length)
        return 0, 0

    def _is_plain(self, length: int) -> bool:
        """Return whether each of the first `length` positions has the slot of its number, and nothing was evicted."""
        start = self._layout.first_visible(0)
        return length <= self._engine.slots and start == self._first == self._layout.first_visible(length)

    def _fit(self, length: int) -> None:
        """Tell the engine how many slots a text of `length` tokens and the next pass need.

        In every layout the first positions have the first slots, and later positions reuse existing slots.
        """
        self._needed = min(length + self.widths[-1], self._engine.slots)
        self._engine.fit(self._needed)

    def _prompt_pass(self, left: int) -> tuple[int, int]:
        """Return how many of the `left` prompt tokens to feed next, and the width of the call.

        The call is the one that feeds the most tokens for its cost. That cost is not a measured time, so a prompt is
        split alike in every run.
        """
        position = len(self._tokens)
        slots, window = self._layout.writable(position), self._layout.same_window(position)
        most = left if window is None else min(left, window)
        fitting = [w for w in self._wide if w <= slots]
        if not fitting:
            raise DecodeError(f"{left} tokens of the prompt are left, but the context is full")
        width = max(fitting, key=lambda w: (min(w, most) / (_PASS + w), w))
        return min(width, most), width

    def _rows(self, tokens: Sequence[int], width: int, call: Callable[..., Logits]) -> Logits:
        rows = self._run(call, self._padded(tokens, width), len(self._tokens))[: len(tokens)]
        self._fed = list(tokens)
        return self._finite(rows)

    def _finite(self, logits: Logits) -> Logits:
        """Return logits; if one is NaN or infinite, forget the text and raise NotFiniteError."""
        if np.isfinite(logits.max()):  # which is NaN if any logit is
            return logits
        self._engine.renew()
        self._tokens, self._fed = [], []
        self._first = self._layout.first_visible(0)
        raise NotFiniteError(
            "the model has computed a number that is not finite, so the text can't go on; `shardmill audit-range` says "
            "whether fp16 holds what the model computes"
        )

    def _write(self, tokens: Sequence[int], width: int) -> Logits:
        """Run tokens whose logits nobody needs, so an engine may skip the LM head. Return an empty array."""
        self._run(self._engine.write, self._padded(tokens, width), len(self._tokens))
        self._fed = list(tokens)
        return np.empty(0, np.float32)

    def _run(self, call: Callable[..., Result], tokens: Sequence[int], position: int) -> Result:
        """Call a method of the engine that takes tokens, which follow one another from a position on."""
        self._copied = None
        self._slide(self._layout.first_visible(position))
        positions = range(position, position + len(tokens))
        slots = [self._layout.slot(p) for p in positions]
        self._needed = max(self._needed, max(slots) + 1)
        return call(tokens, slots, positions)

    def _padded(self, tokens: Sequence[int], width: int) -> list[int]:
        missing = 0 if width > self.widths[-1] and self._engine.pads else width - len(tokens)
        return [*tokens, *[tokens[-1]] * missing]

    def _slide(self, first: int) -> None:
        if first > self._first:
            self._engine.forget([self._layout.slot(p) for p in range(self._first, first)])
            self._first = first

    def _intact(self, length: int) -> bool:
        """Return whether the engine still has all tokens that position `length` must see."""
        seen = self._layout.first_visible(length) == self._first
        return seen and (length == 0 or self._engine.rewindable(length))

    def _shared(self, prompt: Sequence[int]) -> int:
        limit = min(len(self._tokens), len(prompt) - 1)  # the last token must run: its logits are needed
        return next((i for i in range(limit) if self._tokens[i] != prompt[i]), limit)
