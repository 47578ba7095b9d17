"""Constrained output obeys its schema, with drafts and without, and drafts do not change it."""

import json
from typing import Any

import numpy as np
import pytest
from drafted_decoding import DecodeError, GrammarTokenizer, JsonSchema, LeastLength, Options, Sampling, Session, run
from drafted_decoding.policies import AlwaysDraft
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from .scripted import OracleDrafter, ScriptedEngine

pytest.importorskip("llguidance")

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
WORDS = [*ALPHABET, "true", "false", '"name', '":', '{"', "<eos>"]
EOS = len(WORDS) - 1
VOCAB = len(WORDS) + 10  # as models do, more logits than tokens
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace", "barbara"]}, "alive": {"type": "boolean"}},
    "required": ["name", "alive"],
    "additionalProperties": False,
}


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE({w: i for i, w in enumerate(WORDS)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<eos>"])
    return made


def schema(content: dict[str, Any] | None = None, *, compact: bool = True) -> JsonSchema:
    prepared = GrammarTokenizer(tokenizer().to_str(), vocab=VOCAB, eos=EOS)
    return JsonSchema(content or SCHEMA, prepared, compact=compact)


def decode(seed: int, drafter: OracleDrafter | None = None) -> tuple[tuple[int, ...], Any, int]:
    """(tokens, parsed text, passes) of an engine that has no idea of JSON."""
    options = Options(
        sampling=Sampling(temperature=1.0, seed=seed),
        constraint=schema(),
        detokenize=lambda tokens: tokenizer().decode(list(tokens)),
    )
    session = Session(ScriptedEngine(vocab=VOCAB, slots=200))
    result = run(
        session,
        [1, 2, 3],
        max_new_tokens=100,
        eos={EOS},
        drafter=drafter,
        policy=AlwaysDraft(),
        options=options,
    )
    assert result.finish_reason in ("eos", "stop")
    return result.tokens, json.loads(result.text), result.passes


@pytest.mark.parametrize("seed", range(5))
def test_output_obeys_the_schema_whatever_is_drafted(seed: int) -> None:
    tokens, value, _ = decode(seed)
    assert value["name"] in SCHEMA["properties"]["name"]["enum"]  # type: ignore[index]
    assert isinstance(value["alive"], bool)
    for spoil in (False, True):
        assert decode(seed, OracleDrafter(tokens, VOCAB, spoil=spoil))[0] == tokens


def test_tokens_that_the_grammar_forces_are_free_drafts() -> None:
    """Even without a drafter, a schema with one possible key needs fewer passes than tokens."""
    tokens, _, passes = decode(0)
    assert passes < len(tokens) - 1


def test_drafts_are_cut_where_they_leave_the_grammar() -> None:
    made = schema()
    start = tokenizer().encode('{"name":"ada"').ids
    wrong = tokenizer().encode('{"nome"').ids
    assert made.valid_prefix(start) == len(start)
    assert made.valid_prefix(wrong) == 3
    assert made.valid_prefix(start) == len(start)  # asking changes nothing


def test_what_the_grammar_forbids_is_not_verified() -> None:
    """A draft that cannot be right costs no wider pass: only forced tokens are fed as drafts."""
    never = OracleDrafter([WORDS.index("]")] * 200, VOCAB, spoil=False)
    assert decode(0, never)[2] == decode(0)[2]
    drafted: list[int] = []
    for drafter in (None, never):
        options = Options(constraint=schema())
        session = Session(ScriptedEngine(vocab=VOCAB, slots=200))
        result = run(
            session,
            [1],
            max_new_tokens=100,
            eos={EOS},
            drafter=drafter,
            policy=AlwaysDraft(),
            options=options,
        )
        drafted.append(sum(result.drafted))
    assert drafted[0] == drafted[1]


def test_only_what_may_follow_is_allowed() -> None:
    made = schema(compact=False)
    assert made.allowed().shape == (VOCAB,)
    allowed = {WORDS[i] for i in np.flatnonzero(made.allowed())}
    assert "{" in allowed and '{"' in allowed
    assert not allowed & {"a", "true", "<eos>", "["}
    for token in tokenizer().encode('{"name":"ada","alive":true}').ids:
        made.advance(token)
    assert {WORDS[i] for i in np.flatnonzero(made.allowed())} <= {"<eos>", "Ġ", "Ċ", "č", "ĉ"}
    assert {WORDS[i] for i in np.flatnonzero(schema().allowed())} == {"{"}


def test_white_space_is_the_models_to_choose_only_on_request() -> None:
    """A model that likes blanks would write them without end."""
    spaced = tokenizer().encode('{ "name"').ids
    assert schema().valid_prefix(spaced) == 1
    assert schema(compact=False).valid_prefix(spaced) == len(spaced)


def test_one_prepared_tokenizer_serves_many_grammars() -> None:
    prepared = GrammarTokenizer(tokenizer().to_str(), vocab=VOCAB, eos=EOS)
    number, text = (JsonSchema({"type": kind}, prepared) for kind in ("integer", "string"))
    for token in tokenizer().encode("12").ids:
        number.advance(token)
    assert text.valid_prefix(tokenizer().encode('"a"').ids) == 3
    assert number.valid_prefix(tokenizer().encode('"a"').ids) == 0


def test_a_tokenizer_that_cannot_be_used_is_named() -> None:
    with pytest.raises(DecodeError, match="cannot use this tokenizer"):
        GrammarTokenizer("{}", vocab=VOCAB, eos=EOS)


def test_an_impossible_schema_is_named() -> None:
    with pytest.raises(DecodeError, match="JSON schema rejected"):
        schema({"type": "no such type"})


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(DecodeError, match="in a clone: pip install -e '.\\[grammar\\]'"):
        schema()


def test_a_token_that_the_model_has_no_row_for_is_plain_text() -> None:
    """Such as an image's mark in the tokenizer of a model without images."""
    made = tokenizer()
    made.add_tokens(["<image>"])
    prepared = GrammarTokenizer(made.to_str(), vocab=len(WORDS), eos=EOS)
    choice = JsonSchema({"enum": ["<image>"]}, prepared)
    assert choice.allowed().shape == (len(WORDS),)
    choice.advance(WORDS.index('"'))
    assert choice.allowed()[WORDS.index("<")]
    assert [WORDS[token] for token in choice.forced()][:3] == ["<", "i", "m"]


def test_the_least_length_forbids_ends_until_then() -> None:
    """Also in a draft, so that no pass is spent on what can't be accepted."""
    least = LeastLength(3, [1, 4], vocab=6)
    assert [*np.flatnonzero(least.allowed())] == [0, 2, 3, 5]
    assert [least.valid_prefix(draft) for draft in ([0, 2, 4], [0, 2, 3, 4, 1], [1], [])] == [2, 5, 0, 0]
    for _ in range(3):
        least.advance(0)
    assert least.allowed().all() and least.valid_prefix([4]) == 1 and not least.finished and not least.forced()
