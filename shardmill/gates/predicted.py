"""The cost of the Neural Engine's reported arithmetic, predicted on the portable engine. No gate reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from portable_coreml.run import ane
from torch import Tensor

from shardmill.gates.distributions import compare_distributions
from shardmill.gates.passes import in_passes
from shardmill.gates.stack import feed
from shardmill.machine import load_programs_as
from shardmill.runtime.engine import Engine


def predicted_costs(
    load: Callable[[], Engine], tokens: Sequence[int], original: Tensor, precisions: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the cost of a text for fp16, and then for each precision.

    Args:
        load: builds an engine.
        tokens: the text, n tokens.
        original: logits [n, vocab] with the original weights in fp32.
        precisions: precisions that emulate the Neural Engine, see `portable_coreml.run.ane`.

    Yields:
        The precision, the deviations from fp16, `top1`, the share of positions with the same most likely token, and
        `kl`, the mean divergence in nats. If a logit is not finite, both are null in the file.
    """
    for precision in ("fp16", *precisions):
        with load_programs_as(precision):
            engine = load()
        shipped = torch.from_numpy(feed(engine, tokens, in_passes(len(tokens), [engine.tokens_max])))
        finite = bool(shipped.isfinite().all())
        comparison = compare_distributions(original, shipped)
        yield {
            "precision": precision,
            "deviations": [ane.OPTIONS[name] for name in sorted(ane.options_of(precision))],
            "top1": float(comparison.agree.float().mean()) if finite else None,
            "kl": float(comparison.divergence.mean()) if finite else None,
        }
