"""Constrained output: tokens that a grammar forbids are masked, and drafts are cut before them.

Grammars are compiled by llguidance (https://github.com/guidance-ai/llguidance), an optional dependency.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from drafted_decoding.engine import DecodeError


class Constraint(Protocol):
    """A grammar and the position of the output in it."""

    def allowed(self) -> NDArray[np.bool_]:
        """Return the mask [V] of the tokens that may come next."""

    def advance(self, token: int) -> None:
        """Record that `token` was appended to the output."""

    def valid_prefix(self, draft: Sequence[int]) -> int:
        """Return how many tokens of `draft` the grammar allows, one after the other."""

    def forced(self) -> Sequence[int]:
        """Return the next tokens, up to the first that the grammar leaves open: free drafts."""

    @property
    def finished(self) -> bool:
        """Return whether the output is complete, so that no token may follow."""


class GrammarTokenizer:
    """A tokenizer in the form that grammars need.

    Building one takes seconds for a large vocabulary, so it is built once per model. Any number of grammars may share
    it, in any threads.

    Args:
        tokenizer: the contents of the model's tokenizer.json.
        vocab: number of logits; may exceed the tokenizer's vocabulary. Added tokens beyond it count as plain text.
        eos: token that ends the output.

    Attributes:
        special: text -> token, for the tokens that text in a grammar does not match.

    Raises:
        DecodeError: llguidance is not installed, or it does not support the tokenizer.
    """

    def __init__(self, tokenizer: str, *, vocab: int, eos: int) -> None:
        llguidance = _library()
        self.vocab = vocab
        try:
            content = json.loads(tokenizer)
            within = [token for token in content["added_tokens"] if token["id"] < vocab]
            if within != content["added_tokens"]:  # the library takes no token without a logit
                tokenizer = json.dumps(content | {"added_tokens": within})
            self.prepared = llguidance.LLTokenizer(tokenizer, n_vocab=vocab, eos_token=eos)
        except Exception as error:  # llguidance may raise any exception
            raise DecodeError(f"the grammar library cannot use this tokenizer: {error}") from error
        added = {token["content"]: int(token["id"]) for token in within}
        self.special = {text: i for text, i in added.items() if self.prepared.is_special_token(i)}


class Grammar:
    """A constraint to a grammar.

    Args:
        grammar: the grammar in llguidance's dialect of Lark.
        tokenizer: the model's tokenizer.

    Raises:
        DecodeError: llguidance does not support the grammar, or a JSON schema in it.
    """

    def __init__(self, grammar: str, tokenizer: GrammarTokenizer) -> None:
        self._start(lambda matcher: matcher.grammar_from_lark(grammar), "grammar", tokenizer)

    def _start(self, compiled: Callable[[Any], str], what: str, tokenizer: GrammarTokenizer) -> None:
        matcher = _library().LLMatcher
        self._vocab = tokenizer.vocab
        try:
            self._matcher = matcher(tokenizer.prepared, compiled(matcher))
        except Exception as error:  # llguidance may raise any exception
            raise DecodeError(f"{what} rejected: {error}") from error
        self._check(what)
        self._mask = _bits().allocate_token_bitmask(1, tokenizer.prepared.vocab_size)

    def allowed(self) -> NDArray[np.bool_]:
        """See `Constraint`."""
        _bits().fill_next_token_bitmask(self._matcher, self._mask)
        self._check("grammar")
        packed = self._mask[0].view(np.uint8)
        return np.unpackbits(packed, bitorder="little")[: self._vocab].astype(np.bool_)

    def advance(self, token: int) -> None:
        """See `Constraint`."""
        self._matcher.consume_token(token)
        self._check("grammar")

    def valid_prefix(self, draft: Sequence[int]) -> int:
        """See `Constraint`."""
        count: int = self._matcher.validate_tokens(list(draft))
        return count

    def forced(self) -> Sequence[int]:
        """See `Constraint`."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        return tokens

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        stopped: bool = self._matcher.is_stopped()
        return stopped

    def _check(self, what: str) -> None:
        if self._matcher.is_error():
            raise DecodeError(f"{what} rejected: {self._matcher.get_error()}")


class LeastLength:
    """A constraint to a least length: the tokens that end an output are forbidden before.

    Args:
        count: the fewest tokens before an end.
        ends: the tokens that end an output.
        vocab: number of logits, V.
    """

    def __init__(self, count: int, ends: Collection[int], vocab: int) -> None:
        self._missing, self._ends = count, frozenset(ends)
        self._mask = np.ones(vocab, np.bool_)
        self._mask[[end for end in self._ends if end < vocab]] = False
        self._every = np.ones(vocab, np.bool_)

    def allowed(self) -> NDArray[np.bool_]:
        """See `Constraint`."""
        return self._mask if self._missing > 0 else self._every

    def advance(self, token: int) -> None:
        """See `Constraint`."""
        self._missing -= 1

    def valid_prefix(self, draft: Sequence[int]) -> int:
        """See `Constraint`."""
        early = (i for i, token in enumerate(draft[: max(0, self._missing)]) if token in self._ends)
        return next(early, len(draft))

    def forced(self) -> Sequence[int]:
        """See `Constraint`."""
        return ()

    @property
    def finished(self) -> bool:
        """See `Constraint`."""
        return False


class JsonSchema(Grammar):
    """A constraint to one JSON value that conforms to a schema.

    Args:
        schema: the JSON schema, as an object.
        tokenizer: the model's tokenizer.
        compact: allow no white space between JSON tokens; otherwise the model may write any amount, even without end.

    Raises:
        DecodeError: llguidance does not support the schema.
    """

    def __init__(self, schema: Mapping[str, Any], tokenizer: GrammarTokenizer, *, compact: bool = True) -> None:
        text, layout = json.dumps(schema), {"whitespace_flexible": not compact}
        self._start(lambda matcher: matcher.grammar_from_json_schema(text, overrides=layout), "JSON schema", tokenizer)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise DecodeError("JSON schemas need llguidance; in a clone: pip install -e '.[grammar]'") from error
    return llguidance


def _bits() -> Any:
    import llguidance.numpy

    return llguidance.numpy
