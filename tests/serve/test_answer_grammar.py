"""Grammars of answers without calls: nothing is invented in JSON, and a text is the one that was asked for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from drafted_decoding import Grammar, GrammarTokenizer

from shardmill.serve.answer_grammar import choice_answer, closed, json_value, regex_answer, write_answer
from shardmill.serve.protocol import ApiError

from .fake import END, VOCAB, byte_tokenizer

pytest.importorskip("llguidance")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
DAYS = {"type": "object", "properties": {"days": {"type": "integer"}}}
TO_CITY = {"$ref": "#/$defs/City"}


@cache
def prepared() -> GrammarTokenizer:
    return GrammarTokenizer(byte_tokenizer().to_str(), vocab=VOCAB, eos=END)


def takes(answer: str, text: str, *, thought_end: str = "") -> bool:
    """Whether the answer may be this text, and end there."""
    grammar = Grammar(write_answer(answer, thought_end, prepared().special), prepared())
    tokens = [*byte_tokenizer().encode(text).ids, END]
    return grammar.valid_prefix(tokens) == len(tokens)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        (CITY, {"city": "Oslo"}, {"city": "Oslo", "city2": "Rome"}),
        ({"type": "object", "properties": {}}, {}, {"a": 1}),
        ({**CITY, "additionalProperties": {"type": "integer"}}, {"city": "Oslo", "a": 1}, {"city": "Oslo", "a": "b"}),
        ({"type": "array", "items": CITY}, [{"city": "Oslo"}], [{"city": "Oslo", "a": 1}]),
        ({"type": "array", "prefixItems": [CITY]}, [{"city": "Oslo"}], [{"city": "Oslo", "a": 1}]),
        ({"anyOf": [CITY, {"type": "null"}]}, {"city": "Oslo"}, {"city": "Oslo", "a": 1}),
        (
            {"properties": {"to": TO_CITY}, "$defs": {"City": CITY}},
            {"to": {"city": "Oslo"}},
            {"to": {"city": "Oslo", "a": 1}},
        ),
        (
            {"properties": {"to": {"allOf": [TO_CITY]}}, "$defs": {"City": CITY}},
            {"to": {"city": "Oslo"}},
            {"to": {"city": "Oslo", "a": 1}},
        ),
        ({"allOf": [{"properties": {"to": CITY}}, DAYS]}, {"to": {"city": "Oslo"}}, {"to": {"city": "Oslo", "a": 1}}),
        ({"type": "object", "additionalProperties": CITY}, {"a": {"city": "Oslo"}}, {"a": {"city": "Oslo", "b": 1}}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_objects_take_no_invented_properties(schema: dict[str, Any], taken: Any, refused: Any) -> None:
    answer = json_value(schema)
    assert takes(answer, written(taken)) and not takes(answer, written(refused))


@pytest.mark.parametrize(
    ("schema", "taken"),
    [
        ({"type": "object"}, {"a": 1}),  # json_object
        ({**CITY, "additionalProperties": True}, {"city": "Oslo", "a": 1}),
        ({"allOf": [CITY, DAYS]}, {"city": "Oslo", "days": 2}),
        ({**CITY, "allOf": [DAYS]}, {"city": "Oslo", "days": 2}),
        ({"allOf": [TO_CITY, DAYS], "$defs": {"City": CITY}}, {"city": "Oslo", "days": 2}),
        (
            {
                "allOf": [{"$ref": "#/$defs/Further"}, DAYS],
                "$defs": {"City": CITY, "Further": {"allOf": [TO_CITY, {"type": "object"}]}},
            },
            {"city": "Oslo", "days": 2},
        ),
        ({**CITY, "required": ["city", "days"]}, {"city": "Oslo", "days": 2}),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_must_stay_open_does(schema: dict[str, Any], taken: Any) -> None:
    """An object that says so, that names nothing, or that several schemas describe together."""
    assert takes(json_value(schema), written(taken))


def test_what_is_no_schema_is_left_as_it_is() -> None:
    """A property may be called like a keyword, and a value like a schema."""
    odd = {"properties": {"properties": {"type": "string"}}, "enum": [{"properties": {}}], "default": CITY}
    assert closed(odd) == {**odd, "additionalProperties": False}


def test_a_schema_without_end_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        closed(deep)


@pytest.mark.parametrize(
    ("answer", "taken", "refused"),
    [
        (regex_answer(r"\d{2}/\d{2}"), "11/22", "1/22"),
        (regex_answer(r"a\/b"), "a/b", r"a\/b"),
        (regex_answer("a\nb"), "a\nb", "ab"),
        (regex_answer(r"yes|no"), "no", "yesno"),
        (choice_answer(["yes", 'a "quoted" one\n', "Tōkyō"]), 'a "quoted" one\n', "yesTōkyō"),
        (choice_answer(["yes", "yes, it is"]), "yes, it is", "yes, it"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_text_is_the_one_that_was_asked_for(answer: str, taken: str, refused: str) -> None:
    """As a whole, also after a thought that the prompt has opened."""
    assert takes(answer, taken) and not takes(answer, refused)
    assert takes(answer, f"Hm.</think>\n{taken}", thought_end="</think>")
    assert not takes(answer, taken, thought_end="</think>")


def written(value: Any) -> str:
    """The value in JSON, as models are trained to write it."""
    import json

    return json.dumps(value)
