"""Turns single answers into the figures of a group: medians of ratios within pairs, sums over passes.

A pair is a T = 1 answer and, right after it, a drafted one to the same prompt, so that a slow moment of the machine
affects both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

from shardmill.bench.client import Answer
from shardmill.bench.prompts import Prompt
from shardmill.bench.replay import Replay
from shardmill.decode.verify import agreement

Json = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """Answers to one prompt at T = 1 and with one drafter."""

    prompt: Prompt
    drafter: str
    plain: Answer
    drafted: Answer
    margin: float | None = None  # between the two best logits at the first different token; None without one


@dataclass(frozen=True)
class Prefill:
    """The answer to a prompt that the server had not cached."""

    prompt: Prompt
    answer: Answer

    @property
    def tokens_per_second(self) -> float:
        """Return the prompt tokens per second."""
        return len(self.prompt.tokens) / self.answer.prefill_seconds


def row(pairs: Sequence[Pair], replays: Sequence[Replay]) -> Json:
    """Return the figures of one drafter on one group of prompts; `replays` have the same drafter and prompts."""
    drafted = [pair.drafted for pair in pairs]
    ratios = [pair.plain.seconds_per_token / pair.drafted.seconds_per_token for pair in pairs]
    return {
        "drafter": pairs[0].drafter,
        "requests": len(pairs),
        "new_tokens": median(len(answer.tokens) for answer in drafted),
        "ended": dict(Counter(answer.finish_reason for answer in drafted)),
        "ms_per_token": 1e3 * median(answer.seconds_per_token for answer in drafted),
        "plain_ms_per_token": 1e3 * median(pair.plain.seconds_per_token for pair in pairs),
        "speedup": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "drafter_us_per_token": 1e6 * median(a.drafter_seconds / len(a.tokens) for a in drafted),
        "exact": sum(pair.plain.tokens == pair.drafted.tokens for pair in pairs) / len(pairs),
        "differs": differences(pairs),
        "verified_again": sum(answer.verified_again for answer in drafted),
        "verified_again_share": sum(a.verified_again for a in drafted) / max(1, sum(a.decoded for a in drafted)),
        "mj_per_token": millijoules(drafted),
        "plain_mj_per_token": millijoules([pair.plain for pair in pairs]),
        "live": acceptance(drafted),
        "oracle": acceptance(replays) if replays else None,
    }


def differences(pairs: Sequence[Pair]) -> list[Json]:
    """Return the prompts whose drafted answer differs from the answer at T = 1, each with the first different token.

    The margin is the distance between the two best logits at that token at T = 1, None if unknown.
    """
    found = {
        (pair.prompt.name, agreement(pair.drafted.tokens, pair.plain.tokens)): pair.margin
        for pair in pairs
        if pair.plain.tokens != pair.drafted.tokens
    }
    return [{"prompt": name, "token": token, "margin": found[name, token]} for name, token in sorted(found)]


def acceptance(runs: Sequence[Answer] | Sequence[Replay]) -> Json:
    """Return the acceptance of drafts: [accepted, drafted] per draft position, their sums, and tokens per pass."""
    passes = list(chain.from_iterable(zip(run.accepted, run.drafted, strict=True) for run in runs))
    accepted, drafted = sum(a for a, _ in passes), sum(d for _, d in passes)
    longest = max((d for _, d in passes), default=0)
    return {
        "tokens_per_pass": sum(run.decoded for run in runs) / len(passes) if passes else None,
        "accepted": accepted,
        "drafted": drafted,
        "rate": accepted / drafted if drafted else None,
        "by_position": [[sum(a > i for a, _ in passes), sum(d > i for _, d in passes)] for i in range(longest)],
    }


def millijoules(answers: Sequence[Answer]) -> float | None:
    """Return the energy of the whole chip per token; None without a meter, or if the meter did not move."""
    used = [answer.joules for answer in answers if answer.joules is not None]
    return 1e3 * sum(used) / sum(len(answer.tokens) for answer in answers) if sum(used) else None


def pass_seconds(pairs: Sequence[Pair], widths: Sequence[int]) -> dict[str, float]:
    """Return the median time of a decode pass by width; a pass takes the narrowest width that fits its tokens."""
    found: dict[int, list[float]] = {}
    for run in chain.from_iterable((pair.plain, pair.drafted) for pair in pairs):
        for drafted, seconds in zip(run.drafted, run.pass_seconds, strict=True):
            found.setdefault(min(w for w in widths if w > drafted), []).append(seconds)
    return {str(width): median(found[width]) for width in sorted(found)}
