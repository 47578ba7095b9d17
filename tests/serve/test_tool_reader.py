"""Calls in recorded answers: what other projects' parsers expect of the same text, however the text is cut.

The texts are those of vLLM's tests (github.com/vllm-project/vllm, tests/tool_parsers/test_*_tool_parser.py) and of
harmony's documentation (github.com/openai/harmony, docs/format.md), shortened.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardmill.serve.tool_reader import AnswerDelta, CallReader
from shardmill.serve.tools import FORMATS

FORM = {form.name: form for form in FORMATS}
AREA = {"properties": {"shape": {"type": "string"}, "dimensions": {"type": "object"}, "precision": {"type": "integer"}}}
TOOLS: dict[str, Any] = {"searchTool": {}, "getOpenIncidentsTool": {}, "complexTool": {}, "calculate_area": AREA}
WEATHER = ("get_weather", {"city": "Tokyo"})
FOUND = ("searchTool", {"city": "Tokyo"})
STATUS = ("get_candidate_status", {"candidate_id": "12345"})
JOHN = {"name": "John Doe", "age": 37, "address": {"city": "San Francisco", "state": "CA"}, "role": None,
        "passed_test": True, "aliases": ["John", "Johnny"]}  # fmt: skip
SEARCH = '{"name": "searchTool", "parameters": {"query": "test {value} [\\"complex\\"]"}}'
THOUGHT = "<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>{"location":"Rome"}'
RECORDED: list[tuple[str, str, list[tuple[str, dict[str, Any]]], str]] = [  # format, answer, calls, text
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>', [WEATHER], ""),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "a } \\" b", "deep": [{"x": {}}]}}\n</tool_call>',
        [WEATHER, ("get_time", {"zone": 'a } " b', "deep": [{"x": {}}]})],
        "Let me see.",
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Tokyo"}, "name": "get_weather"}</tool_call>', [WEATHER], ""),
    ("hermes", '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Tokyo\\"}"}', [WEATHER], ""),
    ("hermes", "<tool_call>\nno call\n</tool_call> x", [], "<tool_call>\nno call\n</tool_call> x"),
    ("hermes", '{"name": "searchTool", "arguments": {"query": "x"}}\n{"name": "complexTool", "arguments": {}}',
     [("searchTool", {"query": "x"}), ("complexTool", {})], ""),
    ("hermes", '{"name": "unknown", "arguments": {}}', [], '{"name": "unknown", "arguments": {}}'),
    ("hermes", '<tool_call>{"name": "get_we', [], '<tool_call>{"name": "get_we'),
    ("hermes", "a < b <tool_ \n\n", [], "a < b <tool_ \n\n"),
    ("llama", SEARCH, [("searchTool", {"query": 'test {value} ["complex"]'})], ""),
    ("llama", f"<|python_tag|>{SEARCH}", [("searchTool", {"query": 'test {value} ["complex"]'})], ""),
    (
        "llama",
        '{"name": "searchTool", "parameters": {"query": "test1"}} ; '
        '{"name": "getOpenIncidentsTool", "parameters": {}};{"name": "searchTool", "arguments": {"query": "test2"}}',
        [("searchTool", {"query": "test1"}), ("getOpenIncidentsTool", {}), ("searchTool", {"query": "test2"})],
        "",
    ),
    ("llama", f"{SEARCH} I used {{searchTool}}.", [("searchTool", {"query": 'test {value} ["complex"]'})],
     "I used {searchTool}."),
    ("llama", '{"parameters": {}}', [], '{"parameters": {}}'),
    ("llama", '{"name": "toolWithoutParams"}', [], '{"name": "toolWithoutParams"}'),
    ("llama", '{"name": "unknown", "parameters": {}}', [], '{"name": "unknown", "parameters": {}}'),
    ("llama", " Just some text {", [], " Just some text {"),
    # Qwen2.5-Coder, in place of <tool_call>: vLLM's issues 32926 and 29192
    ("hermes", '<tools>\n{"name": "searchTool", "arguments": {"city": "Tokyo"}}\n</tools>', [FOUND], ""),
    ("hermes", '```json\n{\n  "name": "searchTool",\n  "arguments": {\n    "city": "Tokyo"\n  }\n}\n```', [FOUND], ""),
    ("hermes", '<tools>\n[{"name": "searchTool", "arguments": {"city": "Tokyo"}}, '
     '{"name": "complexTool", "arguments": {}}]\n</tools>', [FOUND, ("complexTool", {})], ""),
    ("hermes", '```\n{"name": "searchTool", "arguments": {"city": "Tokyo"}}\n```\nIt rains.', [FOUND], "It rains."),
    ("hermes", '```json\n{"name": "unknown", "arguments": {}}\n```', [],
     '```json\n{"name": "unknown", "arguments": {}}\n```'),
    ("hermes", '```json\n{"a": 1}\n```', [], '```json\n{"a": 1}\n```'),
    ("hermes", '```json\n{"a": 1, "name": "searchTool", "arguments": {}}', [],
     '```json\n{"a": 1, "name": "searchTool", "arguments": {}}'),
    ("hermes", "```python\nprint({})\n```", [], "```python\nprint({})\n```"),
    ("hermes", "<tools>", [], "<tools>"),
    ("hermes", '<tools>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', [("f", {})], "<tools>"),
    ("hermes", '```json\n[1, {"name": "searchTool", "arguments": {}}]', [],
     '```json\n[1, {"name": "searchTool", "arguments": {}}]'),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}, '
        '{"name": "get_weather", "arguments":{"city": "Tokyo"}, "id": "abcdefghi"}]',
        [("add", {"a": 3.5, "b": 4}), WEATHER],
        "",
    ),
    ("mistral", '[TOOL_CALLS] [ {"arguments":{"city": "Tokyo"}, "name": "get_weather"}]', [WEATHER], ""),
    ("mistral", '[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}', [("add_this_and_that", {"a": 3.5, "b": 4})], ""),
    (
        "mistral-11",
        'bla [TOOL_CALLS]add_this_and_that[ARGS]{"a": 3.5, "b": 4}[TOOL_CALLS]get_weather[ARGS]{"city": "Tokyo"}',
        [("add_this_and_that", {"a": 3.5, "b": 4}), WEATHER],
        "bla",
    ),
    ("mistral-11", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Tokyo"}', [WEATHER], ""),
    ("mistral-11", "[TOOL_CALLS]nothing at all", [], "[TOOL_CALLS]nothing at all"),
    ("granite", '<|tool_call|> [{"name": "get_weather", "arguments": {"city": "Tokyo"}}]', [WEATHER], ""),
    (
        "granite",
        "Let me check the weather for you.\n<|tool_call|> [\n  "
        '{"arguments": {"city": "Tokyo"}, "name": "get_weather"},\n  '
        '{"name": "get_time", "arguments": {"timezone": "Asia/Tokyo"}}\n]\nI will get it.',
        [WEATHER, ("get_time", {"timezone": "Asia/Tokyo"})],
        "Let me check the weather for you.I will get it.",
    ),
    ("lfm2", "<|tool_call_start|>[get_candidate_status(candidate_id='12345')]<|tool_call_end|>\nChecking.",
     [STATUS], "Checking."),
    (
        "lfm2",
        "<|tool_call_start|> [get_candidate_status(candidate_id='12345'), register_user(name='John Doe', age=37, "
        "address={'city': 'San Francisco', 'state': 'CA'}, role=None, passed_test=True, aliases=['John', 'Johnny'])]"
        "<|tool_call_end|>",
        [STATUS, ("register_user", JOHN)],
        "",
    ),
    ("lfm2", "<|tool_call_start|>[label(tags={'urgent', 'bug'}), grocery.order(n=-1)]<|tool_call_end|>",
     [("label", {"tags": ["urgent", "bug"]}), ("grocery.order", {"n": -1})], ""),
    ("lfm2", "<|tool_call_start|>[exec(command='cat > f.py << EOF\nimport csv\nEOF')]<|tool_call_end|>",
     [("exec", {"command": "cat > f.py << EOF\nimport csv\nEOF"})], ""),
    ("lfm2", '<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Tokyo"}}]<|tool_call_end|>',
     [WEATHER], ""),
    ("lfm2", "<|tool_call_start|>[f(1)]<|tool_call_end|>", [], "<|tool_call_start|>[f(1)]<|tool_call_end|>"),
    (
        "gemma",
        '<|tool_call>call:get_weather{city:<|"|>Tokyo<|"|>}<tool_call|><|tool_call>call:f{count:42,flag:true,none:null,'
        'nested:{inner_key:<|"|>a, b: {<|"|>},items:[<|"|>a<|"|>,-1.5],bare:celsius}<tool_call|>',
        [WEATHER, ("f", {"count": 42, "flag": True, "none": None, "nested": {"inner_key": "a, b: {"},
                         "items": ["a", -1.5], "bare": "celsius"})],
        "",
    ),
    ("gemma", "<|tool_call>call:f{}<tool_call|>", [("f", {})], ""),
    (
        "qwen-xml",
        "Let me calculate that area for you.<tool_call>\n<function=calculate_area>\n<parameter=shape>\n12\n</parameter>"
        '\n<parameter=dimensions>\n{"width": 10, \n "height": 20}\n</parameter>\n<parameter=precision>\n2\n'
        "</parameter>\n</function>\n</tool_call>",
        [("calculate_area", {"shape": "12", "dimensions": {"width": 10, "height": 20}, "precision": 2})],
        "Let me calculate that area for you.",
    ),
    ("qwen-xml", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</para", [],
     "<tool_call>\n<function=f>\n<parameter=a>\n1\n</para"),
    ("harmony", THOUGHT + CALLED, [("get_current_weather", {"location": "Rome"})], ""),
    (
        "harmony",
        f"{CALLED}<|call|><|start|>assistant<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"
        ' to=functions.f<|channel|>commentary json<|message|>{"a": {}}',
        [("get_current_weather", {"location": "Rome"}), ("f", {"a": {}})],
        "Wait.",
    ),
    ("harmony", f"{THOUGHT}<|channel|>final<|message|>It is 20 °C < 30 °C.", [], "It is 20 °C < 30 °C."),
    ("harmony", "plain text", [], "plain text"),
]  # fmt: skip


def read(form: str, pieces: list[str], *, parallel: bool = True) -> tuple[list[tuple[str, Any]], str, CallReader]:
    """Calls, text and the reader."""
    reader = CallReader(FORM[form], TOOLS, parallel=parallel)
    told: list[AnswerDelta] = [piece for text in pieces for piece in reader.push(text)] + reader.finish()
    names = [piece.text for piece in told if piece.kind == "call"]
    arguments = ["".join(p.text for p in told if p.kind == "arguments" and p.index == i) for i in range(len(names))]
    text = "".join(piece.text for piece in told if piece.kind == "content")
    return [(name, json.loads(one)) for name, one in zip(names, arguments, strict=True)], text, reader


@pytest.mark.parametrize(("form", "answer", "calls", "text"), RECORDED)
def test_a_recorded_answer_has_the_calls_that_others_find(
    form: str, answer: str, calls: list[tuple[str, dict[str, Any]]], text: str
) -> None:
    """Whole, character by character, and cut in two at every place."""
    for pieces in [[answer], list(answer), *([answer[:i], answer[i:]] for i in range(len(answer)))]:
        found, told, reader = read(form, pieces)
        assert (found, told) == (calls, text), pieces
        assert reader.calls == len(calls) and reader.complete


def test_arguments_arrive_in_pieces_after_the_name() -> None:
    """A client sees the call before its end."""
    reader = CallReader(FORM["hermes"], TOOLS)
    first = reader.push('<tool_call>\n{"name": "f", "arguments": {"a": "x')
    assert [(p.kind, p.text) for p in first] == [("call", "f"), ("arguments", '{"a": "x')]
    assert re.fullmatch("[a-zA-Z0-9]{9}", first[0].id)  # Mistral's templates refuse others
    assert [(p.kind, p.text) for p in reader.push('y"}}')] == [("arguments", 'y"}')]
    assert reader.complete and not reader.push("\n</tool_call>") + reader.finish()


def test_a_call_that_was_cut_short_is_not_complete() -> None:
    """Its arguments end where the answer ended."""
    reader = CallReader(FORM["llama"], TOOLS)
    pieces = reader.push('{"name": "searchTool", "parameters": {"query": "te') + reader.finish()
    assert [piece.text for piece in pieces] == ["searchTool", '{"query": "te'] and not reader.complete


def test_thoughts_are_apart() -> None:
    reader = CallReader(FORM["harmony"], TOOLS)
    pieces = reader.push(THOUGHT + CALLED) + reader.finish()
    assert (pieces[0].kind, pieces[0].text) == ("thought", "Need to use function get_current_weather.")


@pytest.mark.parametrize("form", FORM)
def test_without_parallel_calls_only_the_first_remains(form: str) -> None:
    several = [answer for name, answer, calls, _ in RECORDED if name == form and len(calls) > 1]
    for answer in several:
        found, _, _ = read(form, list(answer), parallel=False)
        assert found == read(form, [answer])[0][:1]
    assert several or form in ("qwen-xml",)


@settings(max_examples=300, derandomize=True)
@given(st.data())
def test_any_text_is_read_the_same_in_any_pieces(data: st.DataObject) -> None:
    """Texts made of the formats' own parts in any order: nothing fails, and no cut changes anything."""
    form = data.draw(st.sampled_from(FORMATS))
    around = [mark for pair in form.unmarked for mark in pair]
    own = [form.begin, form.end, *around, *form.around, *form.tokens, form.call.replace("NAME", "searchTool")]
    others = [
        "ARGUMENTS",
        *'{}"[],; \n\\<f',
        '{"a": 1}',
        '{"name": "searchTool", "arguments": ',
        "f(a=1)",
        "call:f{a:1}",
    ]
    xml = ["<function=f>", "</function>", "<parameter=a>"]
    parts = [*own, *others, *xml]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def told(pieces: list[str]) -> Any:
        reader = CallReader(form, TOOLS)
        found = [piece for one in pieces for piece in reader.push(one)] + reader.finish()
        return (
            "".join(p.text for p in found if p.kind == "content"),
            [(p.index, p.text) for p in found if p.kind == "call"],
            [(i, "".join(p.text for p in found if (p.kind, p.index) == ("arguments", i))) for i in range(reader.calls)],
            reader.complete,
        )

    assert told(pieces) == told([text]) == told(list(text))
