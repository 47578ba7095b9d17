"""Ways to split a sequence into passes; each of these ways must give the same result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardmill.plan import Part

LONG = 2048  # tokens of the text in which a recurrence's errors may add up
STRETCH, SAMPLED = 256, 32  # tokens of a stretch of this text; at its last ones the divergence is measured
REJECTED, MOVING = "rejected drafts", "moving between contexts"  # schedules with wrong drafts


@dataclass(frozen=True)
class Pass:
    """One call: the tokens of the sequence to run, their positions, and the number of rows of the result to keep."""

    tokens: tuple[int, ...]  # indices into the sequence; the index of a wrong draft is not its position
    positions: tuple[int, ...]
    kept: int
    slots: int = 0  # of the context in which the pass runs; 0 for the whole context
    offset: int = 0  # added to a position to get its slot
    noise: float = 0.0  # amplitude of random numbers in the columns of an encoder's pass that no text fills

    @property
    def places(self) -> tuple[int, ...]:
        """Return the slots that the tokens are written to."""
        return tuple(position + self.offset for position in self.positions)

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """Return the tokens of each text in a pass of an encoder; each text begins at position 0."""
        starts = [at for at, position in enumerate(self.positions) if position == 0]
        return [self.tokens[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def together(texts: Sequence[Sequence[int]], noise: float = 0.0) -> Pass:
    """Return an encoder's pass of texts, each given as indices into the rows."""
    tokens, positions = (tuple(chain.from_iterable(each)) for each in (texts, (range(len(text)) for text in texts)))
    return Pass(tokens, positions, len(tokens), noise=noise)


def spans_of(counts: Sequence[int]) -> list[range]:
    """Return the indices of the rows of texts that follow one another, each of so many rows."""
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def one_by_one(counts: Sequence[int]) -> list[Pass]:
    """Return an encoder's passes of one text each."""
    return [together([span]) for span in spans_of(counts)]


def in_passes(length: int, widths: Sequence[int]) -> Iterator[Pass]:
    """Cover `length` tokens with passes of the given widths in rotation; the last one may be narrower."""
    start = turn = 0
    while start < length:
        end = min(start + widths[turn % len(widths)], length)
        span = tuple(range(start, end))
        yield Pass(span, span, end - start)
        start, turn = end, turn + 1


def sampled(count: int) -> list[int]:
    """Return the last SAMPLED positions of each stretch of a text of `count` tokens."""
    spans = [(start, min(start + STRETCH, count)) for start in range(0, count, STRETCH)]
    return [position for start, stop in spans for position in range(max(start, stop - SAMPLED), stop)]


def filled_up(passes: Iterable[Pass], widths: Sequence[int], slots: int) -> Iterator[Pass]:
    """Pad each pass to the next of the widths, as a session does: with its last token, in the slots that follow.

    Args:
        passes: passes of any widths.
        widths: the widths at which a program is run; empty if it runs at any.
        slots: slots of the whole context. A pass that padding would extend beyond its context stays as it is.
    """
    for p in passes:
        count = len(p.tokens)
        fitting = (w for w in widths if w >= count and p.places[0] + w <= (p.slots or slots))
        more = min(fitting, default=count) - count
        following = range(p.positions[-1] + 1, p.positions[-1] + 1 + more)
        yield replace(p, tokens=(*p.tokens, *[p.tokens[-1]] * more), positions=(*p.positions, *following))


def with_rejected_drafts(length: int, width: int) -> Iterator[Pass]:
    """Yield passes of `width` with a right first token and wrong drafts, so that one row of each pass is kept.

    Narrower passes of right tokens follow each of these passes, and must not see rejected slots that are not
    overwritten yet. The drafts are tokens from elsewhere in the sequence.
    """
    start = turn = 0
    while start < length:
        wrong = turn % 3 == 0
        end = min(start + (width, 1, max(width - 2, 1))[turn % 3], length)
        positions = tuple(range(start, end))
        tokens = (start, *((7 * p + 3) % length for p in positions[1:])) if wrong else positions
        count = 1 if wrong else end - start
        yield Pass(tokens, positions, count)
        start, turn = start + count, turn + 1


def with_padding(length: int, width: int) -> Iterator[Pass]:
    """Yield passes of `width` that keep half of their rows; the rest is padding, which later tokens overwrite."""
    start = 0
    while start < length:
        positions = tuple(range(start, min(start + width, length)))
        count = -(-len(positions) // 2)
        last = positions[count - 1]
        yield Pass((*positions[:count], *[last] * (len(positions) - count)), positions, count)
        start += count


def as_shipped(length: int, verify: int, upper: int, pads: bool = False) -> Iterator[Pass]:
    """Yield passes as a session feeds them: of the widest width, padded, and of the narrower widths, in turn.

    Args:
        length: tokens of the sequence.
        verify: the most tokens of a decode pass.
        upper: the most tokens of any pass.
        pads: whether the program itself must pad passes that are wider than `verify`.
    """
    start = turn = 0
    while start < length:
        positions = tuple(range(start, min(start + (upper, upper, verify, 1)[turn % 4], length)))
        count = len(positions) if turn % 4 != 1 else -(-len(positions) // 2)
        tokens = positions[:count] if pads else (*positions[:count], *[positions[count - 1]] * (len(positions) - count))
        yield Pass(tokens, positions[: len(tokens)], count)
        start, turn = start + count, turn + 1


def at_lengths(count: int, widths: Sequence[int], verify: int, lengths: Sequence[int]) -> dict[str, list[Pass]]:
    """Return passes of every width in each shorter context, and passes that move between contexts, by name.

    Some of the moving passes have wrong drafts, which move with the context and must stay hidden; others first fill a
    context.

    Args:
        count: tokens of the sequence; a shorter context gets only the tokens that fit.
        widths: the widths of the program's functions.
        verify: the most tokens of a decode pass.
        lengths: slots of all contexts, ascending.
    """
    if len(lengths) < 2:
        return {}
    ways = {
        f"context of {slots}": [replace(p, slots=slots) for p in in_passes(min(count, slots), widths)]
        for slots in lengths[:-1]
    }
    ends = {f"over the end of {a} slots": _over_the_end(count, widths, a, b) for a, b in pairwise(lengths)}
    return ways | {MOVING: list(_moving(count, verify, lengths))} | ends


def _over_the_end(count: int, widths: Sequence[int], slots: int, following: int) -> list[Pass]:
    """Return passes with half of the tokens in the last slots of a context, and the others behind them in the next.

    A context may have many times the slots that a test has tokens. Without these passes its last slots would never be
    written, or moved.
    """
    before = min(slots, (count + 1) // 2)
    after = min(count - before, following - slots)
    filling = [replace(p, slots=slots) for p in in_passes(before, widths)]
    behind = [_later(replace(p, slots=following), before) for p in in_passes(after, widths)]
    return [replace(p, offset=slots - before) for p in (*filling, *behind)]


def _later(one: Pass, by: int) -> Pass:
    """Return a pass that comes `by` tokens later in a text."""
    span = tuple(position + by for position in one.positions)
    return replace(one, tokens=span, positions=span)


def _moving(count: int, verify: int, lengths: Sequence[int]) -> Iterator[Pass]:
    """Yield passes, every second one with wrong drafts, so that each move between lengths follows wrong drafts."""
    slots = lengths[0]
    for start in range(count):
        positions = range(start, start + 1 if start % 2 else min(start + verify, count))
        if start % 2:
            slots = max(slots, lengths[start * len(lengths) // count])
        slots = next(length for length in lengths if length >= slots and length > positions[-1])
        yield Pass((start, *((7 * p + 3) % count for p in positions[1:])), tuple(positions), 1, slots)


def compared_widths(verify: int, upper: int) -> tuple[int, ...]:
    """Return the widths that are compared with one token a pass: every width that decoding may use, and the widest."""
    return tuple(sorted({*range(2, verify + 1), upper} - {1}))


def schedules(length: int, verify: int, upper: int, pads: bool = False) -> dict[str, list[Pass]]:
    """Return the schedules to test, by name: each width, a mixture of widths, rejected drafts, and padded passes.

    The result of each must equal the result of one token a pass. Padding is tested if prompts use wider passes than
    decoding.

    Args:
        length: tokens of the sequence.
        verify: the most tokens of a decode pass.
        upper: the most tokens of any pass.
        pads: whether the program itself must pad passes that are wider than `verify`.
    """
    ways = {f"T={t}": list(in_passes(length, [t])) for t in compared_widths(verify, upper)}
    if upper > 1:
        narrow = (verify,) if 1 < verify < upper else ()
        ways["mixed"] = list(in_passes(length, [1, *narrow, upper, 2, upper - 1 or 1, 1, 1, upper]))
    if verify > 1:
        ways[REJECTED] = list(with_rejected_drafts(length, verify))
    if verify < upper:
        ways["padded"] = list(in_passes(length, [-(-upper // 2)]) if pads else with_padding(length, upper))
    return ways


def part_schedules(part: Part, count: int, verify: int) -> dict[str, list[Pass]]:
    """Return the schedules to test, by name; a part without states needs passes of each width only."""
    ways = schedules(count, verify, part.spec.tokens, part.spec.blocks > 1)
    return ways if part.spec.layers else {name: passes for name, passes in ways.items() if name.startswith("T=")}
