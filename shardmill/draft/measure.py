"""How many tokens of a model's own texts a head drafts right, before the head is converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardmill.draft.states import compute_windows
from shardmill.draft.unrolled import unrolled
from shardmill.gates.eagle3 import ReferenceHead

CAPS = (3, 7)  # most drafts of a pass of 4 and of 8 tokens
PROMPT, NEW, TEXTS = 64, 128, 16  # tokens of a prompt and of the text after it; the most texts


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
def measure_acceptance(
    head: ReferenceHead, model: Any, windows: Tensor, taps: Sequence[int], table: Tensor, rows: Tensor
) -> Acceptance:
    """Return what a head's drafts are worth in the model's own greedy continuations of texts.

    Args:
        head: the head.
        model: transformers' model.
        windows: texts that the head has not seen, [windows, n].
        taps: the model's layers whose inputs the head reads.
        table: the embedding of each token, as the model's first layer reads it, [vocab, d].
        rows: the head's tokens, [rows].
    """
    texts = continued(model, windows[:TEXTS, :PROMPT])
    states, most = compute_windows(model, texts, taps), max(CAPS)
    right = torch.zeros(len(texts), texts.shape[1], most, dtype=torch.bool)
    for step, logits in enumerate(unrolled(head, table[texts], states.taps.float(), most)):
        guessed = rows[logits.argmax(-1)]  # [texts, count]; of row i, the token i + step + 2
        right[:, : guessed.shape[1] - 1, step] = guessed[:, :-1] == texts[:, step + 2 :]
    lengths = right.long().cumprod(-1).sum(-1)  # drafts accepted of those made of the pair at each position
    tried = [(lengths[:, PROMPT - 1 : -most - 1] >= place).float().mean() for place in range(most + 1)]
    return Acceptance(
        tokens=len(texts) * (NEW - 1),
        tokens_per_pass={str(cap): round(_tokens_per_pass(lengths, cap), 4) for cap in CAPS},
        by_place=[round(float(b / a), 4) if a else 0.0 for a, b in zip(tried, tried[1:], strict=False)],
    )


def continued(model: Any, prompts: Tensor) -> Tensor:
    """Return prompts with the model's greedy continuations, [texts, PROMPT + NEW]."""
    found: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
    )
    return found


def _tokens_per_pass(lengths: Tensor, cap: int) -> float:
    """Return emitted tokens per pass if every pass verifies `cap` drafts, given the accepted ones by position."""
    tokens = passes = 0
    for row in lengths.tolist():
        known, end = PROMPT + 1, PROMPT + NEW  # the prompt's pass has given a token
        while known < end:
            accepted = min(row[known - 2], cap, end - known - 1)
            known, passes = known + accepted + 1, passes + 1
        tokens += NEW - 1
    return tokens / passes
