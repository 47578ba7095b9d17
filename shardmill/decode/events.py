"""What a request yields: how far its prompt is, then a token at a time, and at the end what it took."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["eos", "length", "context", "stop"]


@dataclass(frozen=True)
class PrefillEvent:
    """A pass of the prompt is over; `held` of its `total` tokens are in the slots. A place to stop at."""

    held: int
    total: int


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        from_draft: the drafter had proposed it.
        text: text that became final with it; empty without a detokeniser, or while text is held back.
        logprob: the model's log-probability of it, before temperature and filters; None unless asked for.
        top: the model's likeliest tokens and their log-probabilities.
    """

    token: int
    from_draft: bool
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    """What a request gave and what it took.

    Attributes:
        tokens: emitted tokens, an ending EOS included. text: their text up to the stop string, if there
            is a detokeniser. tail: the part of `text` that no event carried, held back as it might have
            begun a stop string. finish_reason: "eos", "length" (max_new_tokens), "context" (slots used
            up), "stop" (a stop string, or a
            grammar that is complete).
        accepted, drafted, pass_seconds: per decode pass, drafts accepted and verified, and the engine's time for it.
        The first token comes from the prefill. verified_again: rows that the exactness guard ran again alone.
    """

    tokens: tuple[int, ...]
    text: str
    tail: str
    finish_reason: FinishReason
    prompt_tokens: int
    reused_tokens: int
    prefill_passes: int
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    pass_seconds: tuple[float, ...]
    verified_again: int
    prefill_seconds: float
    decode_seconds: float
    drafter_seconds: float

    @property
    def passes(self) -> int:
        """Decode passes."""
        return len(self.accepted)

    @property
    def tokens_per_pass(self) -> float:
        """Decoded tokens per decode pass; 0 without a pass."""
        return (len(self.tokens) - 1) / self.passes if self.passes else 0.0
