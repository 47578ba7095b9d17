"""What goes into a request and what comes out: options, events and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drafted_decoding.constraint import Constraint
from drafted_decoding.sampler import Sampling
from drafted_decoding.text import Detokenize


@dataclass(frozen=True)
class Options:
    """How a request is decoded, apart from its prompt and length.

    Attributes:
        detokenize: tokens of a text -> the text; incomplete characters become U+FFFD, as in every tokenizer.
        stop: strings that end the output; they need `detokenize`.
        keep_stop: the output ends after a stop string, not before it.
        constraint: a grammar that the output must obey; a new one for every request.
        top_logprobs: report each token's log-probability and this many of the likeliest; None: neither.
        prompt_logprobs: the same for the prompt's tokens. Each of them runs then, and none is reused.
        guard_margin: see `generate.verify_draft`; 0 switches the guard off.
        private: the drafter may keep nothing of this request and use nothing kept from other requests.
    """

    sampling: Sampling = field(default_factory=Sampling)
    detokenize: Detokenize | None = None
    stop: Sequence[str] = ()
    keep_stop: bool = False
    constraint: Constraint | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    guard_margin: float = 0.0
    private: bool = False


FinishReason = Literal["eos", "length", "context", "stop"]


@dataclass(frozen=True)
class PromptLogprob:
    """How likely the model finds a token of the prompt after the tokens before it.

    Attributes:
        token: the token.
        logprob: its log-probability; None for the first token, which follows nothing.
        rank: 1 for the likeliest token, 2 for the next.
        top: the likeliest tokens in its place and their log-probabilities.
    """

    token: int
    logprob: float | None = None
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PrefillEvent:
    """Progress after a pass of the prompt: `held` of its `total` tokens are in the slots. The caller may stop here.

    Attributes:
        scored: the prompt's next tokens, as far as this pass tells how likely they are; empty unless requested.
    """

    held: int
    total: int
    scored: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token.

    Attributes:
        from_draft: True if the drafter had proposed it.
        text: text that became final with it; empty without a detokeniser, or while text is held back.
        logprob: the model's log-probability for the token, before temperature and filters; None unless requested.
        top: the model's likeliest tokens and their log-probabilities.
        start: offset in the text at which this token's text begins, in characters.
        end: offset of the end of this token's text, including a partial character or stop string. A later token that
            completes a character may have a lower `end`; the lower value then applies to this token too.
    """

    token: int
    from_draft: bool
    text: str = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class GenerationResult:
    """The output of a request, and its cost.

    Attributes:
        tokens: emitted tokens, including a final EOS; the first comes from the prefill.
        text: their text up to the stop string, if there is a detokeniser.
        tail: the end of `text` that no event carried, held back because it might have changed or begun a stop string.
        finish_reason: "eos", "length" (max_new_tokens), "context" (slots used up) or "stop" (a stop string, or a
            grammar that is complete).
        prompt_tokens: length of the prompt.
        reused_tokens: prompt tokens that were reused from the KV cache.
        prefill_passes: engine calls for the prompt.
        accepted: drafts accepted, per decode pass.
        drafted: drafts verified, per decode pass.
        pass_seconds: the engine's time, per decode pass.
        verified_again: rows that the exactness guard ran again alone.
        prefill_seconds: the engine's time for the prompt.
        decode_seconds: from the end of the prefill to the last token, without the time that the caller took between
            tokens.
        drafter_seconds: time for proposing and observing.
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
        """Return the number of decode passes."""
        return len(self.accepted)

    @property
    def tokens_per_pass(self) -> float:
        """Return the decoded tokens per decode pass; 0 without a pass."""
        return (len(self.tokens) - 1) / self.passes if self.passes else 0.0
