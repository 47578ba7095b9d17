"""What a generation gave and took: its text as it comes, a JSON object, and a closing line for a person."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from shardmill.decode import GenerationResult, PrefillEvent, TokenEvent

_ENDINGS = {
    "eos": "the model ended the text",
    "length": "--max-new-tokens reached",
    "context": "the context is full: build with a larger one for more",
    "stop": "a stop string came",
}


def consume(events: Iterable[PrefillEvent | TokenEvent | GenerationResult], out: TextIO | None) -> GenerationResult:
    """Writes text to `out`, if there is one, as soon as it is final; returns the result."""
    from shardmill.decode import GenerationResult, PrefillEvent

    for event in events:
        if isinstance(event, PrefillEvent):
            continue
        piece = event.tail if isinstance(event, GenerationResult) else event.text
        if out is not None and piece:
            out.write(piece)
            out.flush()
        if isinstance(event, GenerationResult):
            return event
    raise AssertionError("the decoding loop ended without a result")


def summary(result: GenerationResult) -> dict[str, Any]:
    """The result as --json prints it; speeds are null where nothing was measured."""
    return {
        "tokens": list(result.tokens),
        "text": result.text,
        "passes": result.passes,
        "accepted": list(result.accepted),
        "drafted": list(result.drafted),
        "prompt_tokens": result.prompt_tokens,
        "finish_reason": result.finish_reason,
        "prefill_tok_s": _rate(result.prompt_tokens - result.reused_tokens, result.prefill_seconds),
        "decode_tok_s": _rate(len(result.tokens) - 1, result.decode_seconds),  # the prefill gives the first token
    }


def closing_line(result: GenerationResult, engine: str, accept_top_p: float | None = None) -> str:
    """What it took, in one line; says first if the text is not exact.

    Args:
        result: of the generation.
        engine: what ran the programs.
        accept_top_p: the share of lossy acceptance, if it was asked for.
    """
    figures = summary(result)
    speeds = ", ".join(
        f"{name} {figures[key]:.1f} tok/s"
        for name, key in (("prefill", "prefill_tok_s"), ("decode", "decode_tok_s"))
        if figures[key] is not None
    )
    drafts = f"{sum(result.accepted)} of {sum(result.drafted)} drafted tokens accepted"
    ended = _ENDINGS[result.finish_reason]
    lossy = "" if accept_top_p is None else f"LOSSY: drafts within {accept_top_p:g} of the probability accepted; "
    return (
        f"[{lossy}{len(result.tokens)} tokens in {result.passes} passes, {drafts}; {speeds}; {engine} engine; {ended}]"
    )


def _rate(tokens: int, seconds: float) -> float | None:
    """Tokens per second; None where there is nothing to divide."""
    return round(tokens / seconds, 2) if tokens > 0 and seconds > 0 else None
