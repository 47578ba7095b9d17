"""Grammars of calls in every format: whatever they let through is read back as calls that obey the schemas.

The witness for the schemas is jsonschema. The text is drawn at random from what llguidance allows.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from drafted_decoding import Grammar, GrammarTokenizer
from tokenizers import Tokenizer

from shardmill.serve.answer_grammar import COMPACT, json_value
from shardmill.serve.protocol import ApiError, FunctionDefinition
from shardmill.serve.tool_grammar import write_grammar
from shardmill.serve.tool_reader import AnswerDelta, CallReader
from shardmill.serve.tools import FORMATS, ToolFormat

from . import templates
from .fake import byte_tokenizer, byte_tokens

pytest.importorskip("llguidance")
UNIT = {"anyOf": [{"type": "string", "enum": ["C", "F"]}, {"type": "null"}]}
PLACE = {"type": "object", "properties": {"lat": {"type": "integer"}, "on": {"type": "boolean"}}, "required": ["lat"],
         "additionalProperties": False}  # fmt: skip
WEATHER = FunctionDefinition(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {
            "unit": UNIT,
            "city": {"type": "string", "maxLength": 8},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "places": {"type": "array", "items": PLACE, "maxItems": 2},
            "place": {"$ref": "#/$defs/Place"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"Place": PLACE},
    },
)
SIMPLE = FunctionDefinition(name="get_weather", parameters={**WEATHER.parameters, "properties": {  # type: ignore[dict-item]
    name: value for name, value in WEATHER.parameters["properties"].items() if name != "place"}})  # type: ignore[index]  # fmt: skip
CHOICE = FunctionDefinition(
    name="choose",
    parameters={"type": "object", "properties": {"a": {"type": "boolean"}, "b": UNIT}, "additionalProperties": False},
)
EMPTY = FunctionDefinition(name="get_time")
FORM = {form.name: form for form in FORMATS}
ENDS = {"harmony": ["<|end|>", '"'], "gemma": ['<|"|>'], "xml": ["\n</parameter>\n", '"']}  # of free texts
MARKED = [(name, True) for name in FORM] + [(name, False) for name in ("hermes", "qwen-xml", "llama", "granite")]


def functions(form: ToolFormat) -> list[FunctionDefinition]:
    return [SIMPLE if form.style == "gemma" else WEATHER, CHOICE, EMPTY]


@cache
def tokenizers(form: str, special: bool) -> tuple[Tokenizer, GrammarTokenizer]:
    """Bytes, and the format's own tokens if they are special."""
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([*((*FORM[form].tokens, "</think>") if special else ()), "<|stop|>"])
    end = tokenizer.encode("<|stop|>").ids[0]
    return tokenizer, GrammarTokenizer(tokenizer.to_str(), vocab=tokenizer.get_vocab_size(), eos=end)


def drawn(
    form: str, special: bool, seed: int, likely: str = "", go_on: int = 0, **wanted: Any
) -> tuple[str, list[AnswerDelta], CallReader]:
    """A text that the grammar allows, which does not end at its first `go_on` ends, and what the reader finds in it."""
    tokenizer, prepared = tokenizers(form, special)
    end = prepared.special["<|stop|>"]
    grammar = write_grammar(FORM[form], functions(FORM[form]), prepared.special, **{"parallel": True, **wanted})
    constraint, generator = Grammar(grammar, prepared), np.random.default_rng(seed)
    scores = np.zeros(prepared.vocab)
    scores[[byte_tokens()[ord(c)] for c in "}]),;"]] = 4.0  # or objects would not end
    scores[end] = 4.0
    closing = [tokenizer.encode(text, add_special_tokens=False).ids for text in ENDS.get(FORM[form].style, ['"'])]
    tokens: list[int] = []
    pending = list(tokenizer.encode(likely, add_special_tokens=False).ids)
    while len(tokens) < 4000 and not constraint.finished:
        if not pending and generator.random() < 0.3:  # or free texts would not end
            pending = next((list(ids) for ids in closing if constraint.valid_prefix(ids) == len(ids)), [])
        allowed = constraint.allowed()
        if allowed[end] and go_on and allowed.sum() > 1:
            go_on, allowed[end] = go_on - 1, False
        scored = np.where(allowed, scores + generator.gumbel(size=len(scores)), -np.inf)
        token = pending.pop(0) if pending else int(scored.argmax())
        assert np.isfinite(scored[token]), tokenizer.decode([*tokens, token], skip_special_tokens=False)
        if token == end:
            break
        tokens.append(token)
        constraint.advance(token)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    reader = CallReader(FORM[form], {one.name: one.parameters or {} for one in functions(FORM[form])})
    return text, reader.push(text) + reader.finish(), reader


def check(form: str, text: str, pieces: list[AnswerDelta]) -> list[str]:
    """Check the arguments of all calls; return the names."""
    schemas = {one.name: one.parameters or {"maxProperties": 0} for one in functions(FORM[form])}
    names = [piece.text for piece in pieces if piece.kind == "call"]
    for index, name in enumerate(names):
        arguments = "".join(p.text for p in pieces if p.kind == "arguments" and p.index == index)
        schema = {**schemas[name], "properties": dict(schemas[name].get("properties", {}))}
        if FORM[form].style in ("xml", "gemma"):  # whose texts are not counted
            schema["properties"] |= {"city": {"type": "string"}} if name == "get_weather" else {}
        jsonschema.validate(json.loads(arguments), schema)
    return names


@pytest.mark.parametrize(("form", "special"), MARKED)
def test_a_required_call_is_read_back_and_obeys_its_schema(form: str, special: bool) -> None:
    """The format's marks may be special tokens or text; nothing is left over as text."""
    found: set[str] = set()
    for seed in range(12):
        text, pieces, reader = drawn(form, special, seed, required=True, parallel=False)
        names = check(form, text, pieces)
        assert len(names) == 1 and reader.complete, text
        assert not any(piece.kind == "content" for piece in pieces), text
        found |= set(names)
    assert len(found) > 1


@pytest.mark.parametrize("form", [name for name, form in FORM.items() if form.between is not None])
def test_several_calls_are_allowed_only_in_parallel(form: str) -> None:
    counts = [len(check(form, *drawn(form, True, seed, go_on=1, required=True)[:2])) for seed in range(8)]
    assert max(counts) > 1


FREE = {form.name: "Well, {then} < it is so. " for form in FORMATS} | {"harmony": "<|channel|>final<|message|>Well."}


@pytest.mark.parametrize(("form", "special"), MARKED)
def test_text_is_free_until_a_call_begins(form: str, special: bool) -> None:
    """Any text may come; from the format's mark on, only a call that obeys its schema."""
    text, pieces, reader = drawn(form, special, 0, FREE[form], required=False)
    assert not reader.calls or check(form, text, pieces)
    assert pieces[0].text.startswith("Well")
    before = "" if FORM[form].unmarked or form == "harmony" else FREE[form]
    opening = FORM[form].around[0] or FORM[form].call.partition("NAME")[0]
    for seed in range(4):
        text, pieces, reader = drawn(form, special, seed, before + opening, required=False)
        assert check(form, text, pieces), text


@pytest.mark.parametrize("begin", [begin for begin, _ in FORM["hermes"].unmarked])
@pytest.mark.parametrize("special", [False, True])
def test_a_call_behind_other_marks_obeys_its_schema_too(special: bool, begin: str) -> None:
    """Models that do not know the format's mark write a fence, another mark or nothing."""
    for seed, name in enumerate(("get_weather", "choose", "get_time")):
        likely = f'{begin}\n{{\n  "name": "{name}",\n  "arguments": {{'
        text, pieces, reader = drawn("hermes", special, seed, likely, required=False)
        assert check("hermes", text, pieces)[:1] == [name] and reader.complete, text
        assert not any(piece.kind == "content" for piece in pieces), text


@pytest.mark.parametrize("form", ["hermes", "llama"])
@pytest.mark.parametrize("text", ['```json\n{"a": 1}\n```', '{"a": 1}', "```python\n{}\n```"])
def test_other_objects_are_free_text(form: str, text: str) -> None:
    found, pieces, reader = drawn(form, True, 0, text, required=False)
    assert found.startswith(text) and not reader.calls
    assert pieces[0].text.startswith(text[:3])


@pytest.mark.parametrize("form", FORM)
def test_an_answer_in_json_may_take_the_place_of_calls(form: str) -> None:
    likely = "<|channel|>final<|message|>[" if form == "harmony" else "["
    answer = json_value({"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, COMPACT)
    _, pieces, reader = drawn(form, True, 1, likely, required=False, answer=answer)
    assert not reader.calls
    assert all(isinstance(x, bool) for x in json.loads("".join(p.text for p in pieces if p.kind == "content")))
    opening = FORM[form].around[0] or FORM[form].call.partition("NAME")[0]
    text, pieces, _ = drawn(form, True, 1, opening, required=False, answer=answer)
    assert check(form, text, pieces)


@pytest.mark.parametrize("special", [False, True])
def test_a_thought_that_the_prompt_began_comes_first(special: bool) -> None:
    """It ends at its first mark, which is a special token or text."""
    text, pieces, _ = drawn("hermes", special, 0, "It rains.</think>\n\n", required=True, thought_end="</think>")
    assert check("hermes", text, pieces) and text.startswith("It rains.</think>")


def test_what_gemma_cannot_spell_is_refused() -> None:
    with pytest.raises(ApiError, match="can't be required in the format of this chat template"):
        write_grammar(FORM["gemma"], [WEATHER], {}, required=True, parallel=True)


@pytest.mark.parametrize("form", FORM)
@pytest.mark.parametrize("name", ["GET_ARGUMENTS", "NAME", "2fa-NAME.x"])
def test_a_function_may_be_called_like_a_place_in_the_format(form: str, name: str) -> None:
    """The words of `ToolFormat.call`; or have a name that is none in Python."""
    _, prepared = tokenizers(form, True)
    function = FunctionDefinition(name=name, parameters=CHOICE.parameters)
    grammar = Grammar(write_grammar(FORM[form], [function], prepared.special, required=True, parallel=False), prepared)
    before, _, rest = (FORM[form].around[0] + FORM[form].call).partition("NAME")
    opening = f"{before}{name}{rest.partition('ARGUMENTS')[0]}"
    tokens = tokenizers(form, True)[0].encode(opening, add_special_tokens=False).ids
    assert grammar.valid_prefix(tokens) == len(tokens)


@pytest.mark.parametrize(("form", "parameter"), [("lfm2", "a=b"), ("lfm2", "a b"), ("qwen-xml", "a>"), ("gemma", "a:")])
def test_a_parameter_that_could_not_be_read_back_is_refused(form: str, parameter: str) -> None:
    function = FunctionDefinition(name="f", parameters={"properties": {parameter: {"type": "string"}}})
    with pytest.raises(ApiError, match="has no spelling for the parameter"):
        write_grammar(FORM[form], [function], {}, required=True, parallel=True)


def test_each_format_is_found_by_its_mark() -> None:
    """The first that fits: templates of Qwen's newer models contain the marks of two."""
    from shardmill.serve.tools import find_format

    for form in FORMATS:
        assert find_format(f"{{% if tools %}} {form.marks[0]} {{% endif %}}") is form
    assert find_format("<tool_call>\n<function=f>\n<parameter=a>") is FORM["qwen-xml"]
    assert find_format("<seed:tool_call>\n<function=f>\n<parameter=a>") is FORM["seed-oss"]
    assert find_format('<function=f>{"a": 1}</function>') is FORM["function-json"]
    assert find_format(templates.GEMMA_4) is FORM["gemma"]
    assert find_format("{{ messages }}") is None
