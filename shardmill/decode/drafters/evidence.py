"""Weights of the contexts that predict the next token, fitted by tools/fit_evidence.py.

A token's score is the sum over its contexts (follow.py), each multiplied by a trust, plus a bonus if the text contains
the token. The trust depends on how long a context is known in the text itself and in the table. A token's probability
is the softmax of its score over all candidates and one more outcome: that no candidate is right.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

from shardmill.decode.drafters.follow import Found, Weights

FILE = Path(__file__).with_name("evidence.json")
OFTEN = 5  # occurrences in the text beyond which the bonus no longer grows


@dataclass(frozen=True)
class Evidence:
    """Fitted weights.

    Attributes:
        own, table: weights by kind of context, for this text and for earlier texts; None for kinds that are not kept.
            The
            first three, the contexts without a gap, are always kept: they determine the situation.
        own_trust, table_trust: by situation (see `situation`), one trust for each kept kind.
        held: bonus of a token that occurs 0, 1, ... `OFTEN` times in the text.
        none: exponential of the score of "no candidate".
    """

    own: tuple[Weights | None, ...]
    table: tuple[Weights | None, ...]
    own_trust: tuple[tuple[float, ...], ...]
    table_trust: tuple[tuple[float, ...], ...]
    held: tuple[float, ...]
    none: float


@cache
def fitted() -> Evidence:
    """Read the fitted weights."""
    return parse(json.loads(FILE.read_text(encoding="utf-8")))


def parse(content: Mapping[str, Any]) -> Evidence:
    """Build the weights from the content of their file."""
    by_count, present = content["held"]
    return Evidence(
        own=tuple(_weights(row) for row in content["own"]),
        table=tuple(_weights(row) for row in content["table"]),
        own_trust=tuple(tuple(row) for row in content["own_trust"]),
        table_trust=tuple(tuple(row) for row in content["table_trust"]),
        held=(0.0, *(by_count * n / OFTEN + present for n in range(1, OFTEN + 1))),
        none=exp(content["none"]),
    )


def situation(own: Found, table: Found) -> int:
    """Return the index of the longest contexts, up to three tokens each, that the text and the table know."""
    return 4 * _longest(own) + _longest(table)


def _longest(found: Found) -> int:
    for length in (3, 2, 1):
        if found[length - 1] is not None:
            return length
    return 0


def _weights(row: Sequence[float] | None) -> Weights | None:
    return None if row is None else (row[0], row[1], row[2])
