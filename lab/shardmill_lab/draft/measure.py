"""How many tokens of a model's own texts a head drafts right, before the head is converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardmill.models.eagle3_head import Eagle3Head
from shardmill_lab.draft.states import Windows
from shardmill_lab.draft.unrolled import Rows, asked_rows, right_drafts, unrolled

CAPS = (3, 7)  # most drafts of a pass of 4 and of 8 tokens


@dataclass(frozen=True)
class Acceptance:
    """What greedy decoding of texts would accept of a head's drafts.

    Attributes:
        tokens: tokens of the texts, without the first of each, which the prompt's pass gives.
        tokens_per_pass: by the most drafts of a pass.
        by_place: the share of right drafts at each place of a draft, if all before it are right.
    """

    tokens: int
    tokens_per_pass: dict[str, float]
    by_place: list[float]

    def plain(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)


@torch.no_grad()
def measure_acceptance(head: Eagle3Head, texts: Windows, table: Tensor, ids: Tensor) -> Acceptance:
    """Return what a head's drafts are worth in texts that the model has written greedily.

    Args:
        head: the head.
        texts: texts that the head has not seen.
        table: the embedding of each token, as the model's first layer reads it, [vocab, d].
        ids: the token of each of the head's rows.
    """
    lengths, compare = torch.zeros_like(texts.tokens), right_drafts(texts.tokens, texts.own, ids)
    shares = list[float]()

    def goes_on(step: int, rows: Rows) -> Tensor:
        right, further = compare(step, rows)
        lengths.scatter_add_(1, rows.places, right.long())
        shares.append(round(float(right.sum() / rows.real.sum()), 4))
        return further

    asked = asked_rows(texts.own)
    for _ in unrolled(head, table[texts.tokens], texts.taps.float(), asked, max(CAPS), goes_on):
        pass
    pairs = list(zip(texts.own.tolist(), lengths.tolist(), strict=True))
    tokens = int((texts.own.sum(1) - 1).sum())
    per_pass = {str(cap): round(tokens / max(1, sum(_passes(*pair, cap) for pair in pairs)), 4) for cap in CAPS}
    return Acceptance(tokens, per_pass, shares)


def _passes(chosen: Sequence[bool], lengths: Sequence[int], cap: int) -> int:
    """Return the passes of a text if each verifies `cap` drafts, given how many are right at each position."""
    known, passes = chosen.index(True) + 1, 0  # the prompt's pass has given a token
    while known < len(chosen) and chosen[known]:
        known, passes = known + min(lengths[known - 2], cap) + 1, passes + 1
    return passes
