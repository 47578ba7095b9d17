"""The interface that a server needs from a built model. Anything that provides it can be served."""

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
        name: the model's name for clients.
        engine: computes the logits.
        engine_name: the engine that runs the programs: coreml or portable.
        tokenizer: the model's tokenizer.
        eos: tokens that end an answer.
        template: messages -> text that ends where the assistant's answer begins; None if the checkpoint has none.
        draft_session: a session on a second model's engine, for the drafter `draft_model`.
        fingerprint: changes when the model does.
        tokenizer_digest: changes when the tokenizer does.
        threads: number of the engine's threads, if it can choose.
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
        """Return the text of single tokens."""
        return Vocabulary(self.tokenizer)

    def grammar_tokenizer(self) -> GrammarTokenizer:
        """Return the tokenizer in the form that grammars need; built by the first request while others wait.

        Raises:
            DecodeError: the grammar library is missing, or it can't use the tokenizer.
        """
        with self._grammar:
            if not self._prepared:
                self._prepared.append(
                    GrammarTokenizer(self.tokenizer.to_str(), vocab=self.engine.vocab, eos=self.eos[0])
                )
        return self._prepared[0]

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Encode a text.

        Args:
            text: the text.
            special: True to add the tokenizer's special tokens around the text.

        Raises:
            ApiError: the text contains half of a surrogate pair, which no tokenizer accepts.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise invalid("the prompt is not valid Unicode: it contains half of a surrogate pair") from error
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens of a text."""
        text: str = self.tokenizer.decode(tokens)
        return text
