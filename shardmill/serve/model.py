"""What a server needs of a built model. Whatever makes one may be served: the tests make one of a fake engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardmill.decode import Engine, Session
from shardmill.serve.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
ChatTemplate = Callable[[Sequence[Message]], str]
SEAM = 8  # prompt tokens decoded together with the new ones: some tokenizers write a space by what precedes it


@dataclass(frozen=True)
class Model:
    """A resident model.

    Attributes:
        engine_name: what runs it: coreml or portable. eos: tokens that end an answer.
        template: messages -> text that ends where the assistant's answer begins; None: the checkpoint has none.
        draft_session: a session on a second model's engine, for the drafter `draft_model`.
        fingerprint: changes when the model does.
    """

    name: str
    engine: Engine
    engine_name: str
    tokenizer: Tokenizer
    eos: tuple[int, ...]
    template: ChatTemplate | None = None
    draft_session: Session | None = None
    fingerprint: str = ""

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The text of single tokens."""
        return Vocabulary(self.tokenizer)

    @cached_property
    def tokenizer_json(self) -> str:
        """The tokenizer, as its file has it."""
        return self.tokenizer.to_str()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of `text`; with what the tokenizer puts around every text, if it is `special`."""
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return tokens

    def text_after(self, prompt: Sequence[int]) -> Callable[[Sequence[int]], str]:
        """A detokeniser of the tokens that follow `prompt`."""
        seam = list(prompt[-SEAM:])
        known = len(self.tokenizer.decode(seam))

        def detokenize(tokens: Sequence[int]) -> str:
            text: str = self.tokenizer.decode([*seam, *tokens])[known:]
            return text

        return detokenize
