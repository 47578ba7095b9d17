"""What a server needs of a built model. Anything that provides it can be served; the tests use a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from shardmill.decode import Engine, GrammarTokenizer, Session
from shardmill.serve.errors import invalid
from shardmill.serve.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
ChatTemplate = Callable[[Sequence[Message]], str]


@dataclass(frozen=True)
class Model:
    """A resident model.

    Attributes:
        name: what clients call it.
        engine: what computes its logits.
        engine_name: what runs the programs: coreml or portable.
        tokenizer: its tokenizer.
        eos: tokens that end an answer.
        template: messages -> text that ends where the assistant's answer begins; None if the checkpoint has none.
        draft_session: a session on a second model's engine, for the drafter `draft_model`.
        fingerprint: changes when the model does.
        tokenizer_digest: changes when its tokenizer does.
        threads: how many it computes with, if it has a choice.
    """

    name: str
    engine: Engine
    engine_name: str
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    template: ChatTemplate | None = None
    draft_session: Session | None = None
    fingerprint: str = ""
    tokenizer_digest: str = ""
    threads: int | None = None
    _grammar: Lock = field(default_factory=Lock, repr=False, compare=False)
    _prepared: list[GrammarTokenizer] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of single tokens."""
        return Vocabulary(self.tokenizer)

    def grammar_tokenizer(self) -> GrammarTokenizer:
        """The tokenizer in the form that grammars need; the first request that asks makes it, others wait for it.

        Raises:
            DecodeError: the grammar library is missing, or it cannot use the tokenizer.
        """
        with self._grammar:
            if not self._prepared:
                self._prepared.append(
                    GrammarTokenizer(self.tokenizer.to_str(), vocab=self.engine.vocab, eos=self.eos[0])
                )
        return self._prepared[0]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encodes a text.

        Args:
            text: the text.
            special: whether to add what the tokenizer puts around every text.

        Raises:
            ApiError: the text holds half of a surrogate pair, which no tokenizer takes.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid("the prompt is no valid Unicode: it holds half of a surrogate pair") from error
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes tokens of a text."""
        text: str = self.tokenizer.decode(tokens)
        return text
