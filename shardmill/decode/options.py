"""Options of a request besides its prompt and length."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shardmill.decode.constraint import Constraint
from shardmill.decode.distribution import Sampling
from shardmill.decode.text import Detokenize


@dataclass(frozen=True)
class Options:
    """How a request is decoded, apart from its prompt and length.

    Attributes:
        detokenize: tokens of a text -> the text; incomplete characters become U+FFFD, as in every tokenizer.
        stop: strings that end the output; they need `detokenize`.
        constraint: a grammar that the output must obey; a new one for every request.
        top_logprobs: report each token's log-probability and this many of the likeliest; None: neither.
        guard_margin: see `verify.verify`; 0 switches the guard off.
        private: the drafter may keep nothing of this request and use nothing kept from other requests.
    """

    sampling: Sampling = field(default_factory=Sampling)
    detokenize: Detokenize | None = None
    stop: Sequence[str] = ()
    constraint: Constraint | None = None
    top_logprobs: int | None = None
    guard_margin: float = 0.0
    private: bool = False
