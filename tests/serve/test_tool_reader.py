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
TEXT = {"type": "string"}
TOOLS: dict[str, Any] = {
    "searchTool": {}, "getOpenIncidentsTool": {}, "complexTool": {}, "calculate_area": AREA, "get_time": {},
    "get_weather": {"properties": {"city": TEXT, "days": {"type": "integer"}, "options": {"type": "object"}}},
    "write_file": {"properties": {"path": TEXT, "content": TEXT}},
}  # fmt: skip
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
CITY = "<parameter=city>\nTokyo\n</parameter>\n"
DAYS = ("get_weather", {"city": "Tokyo", "days": 2})
NOW: tuple[str, dict[str, Any]] = ("get_time", {})
XML = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
OBJECT = '{"name": "get_weather", "arguments": {"city": "Tokyo"}}'
ENDS = "</tool_call>, </parameter> and <parameter=path>\n</function>\n</tool_call>\nlast"
CUT = "<tool_call>\n<function=write_file>\n<parameter=content>\na\n</tool_call>\nb"
STRINGS = r"""f(a='''b'c''' 'd\x41\u00e9\'\q', r=r'\d', t=(1,), u=(2), v={'k': {'x': -1.5e3}, 2: None})"""
LOOSE: list[tuple[str, str, list[tuple[str, dict[str, Any]]], str]] = [  # calls not quite in the format
    # Qwen3-Coder leaves tags out now and then: vLLM's issue 23099, ollama's 16686 and 18530
    ("qwen-xml", XML % ("get_weather", "<parameter=city>\nTokyo\n<parameter=days>\n2\n</parameter>\n"), [DAYS], ""),
    ("qwen-xml", XML % ("get_weather", "<parameter=city>\nTokyo\n"), [WEATHER], ""),
    ("qwen-xml", XML % ("get_weather", "<parameter=city>\nTokyo\n<parameter=days>\n2\n"), [DAYS], ""),
    ("qwen-xml", XML % ("get_weather", "<parameter=city>\nTokyo\n") + XML % ("get_time", ""), [WEATHER, NOW], ""),
    ("qwen-xml", f"Well.\n<function=get_weather>\n{CITY}</function>\n</tool_call>", [WEATHER], "Well."),
    ("qwen-xml", f"<function=get_weather>\n{CITY}</function>\nIt rains.", [WEATHER], "It rains."),
    ("qwen-xml", f"<tool_call>\n<function=get_weather>\n{CITY}</tool_call>", [WEATHER], ""),
    ("qwen-xml", XML % ("get_weather", f"{CITY}</function>\n<function=get_time>\n"), [WEATHER, NOW], ""),
    ("qwen-xml", f"<tool_call>\n{OBJECT}\n</tool_call>", [WEATHER], ""),
    ("qwen-xml", XML % ("get_weather", '{"city": "Tokyo"}'), [WEATHER], ""),
    ("qwen-xml", XML % ("get_weather", "{'city': 'Tokyo'}"), [WEATHER], ""),
    ("qwen-xml", XML % ("get_weather", "<parameter=options>\n{'k': True}\n</parameter>\n"),
     [("get_weather", {"options": {"k": True}})], ""),
    # tags in a parameter's text
    ("qwen-xml", XML % ("write_file", f"<parameter=content>\n{ENDS}\n</parameter><parameter=path>\na\n</parameter>\n"),
     [("write_file", {"content": ENDS, "path": "a"})], ""),
    ("qwen-xml", XML % ("write_file", "<parameter=content>\n<parameter=other>\n</parameter>\n"),
     [("write_file", {"content": "<parameter=other>"})], ""),
    # what may go on is no call, and neither is what stands between the tags
    ("qwen-xml", CUT, [], CUT),
    ("qwen-xml", XML % ("get_weather", f"{CITY}days=2\n"), [], XML % ("get_weather", f"{CITY}days=2\n")),
    ("qwen-xml", "Write <function=f> or <function=get_time>.", [], "Write <function=f> or <function=get_time>."),
    # Seed-OSS: vLLM's tests/tool_parsers/test_seed_oss_tool_parser.py
    ("seed-oss", "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Tokyo</parameter>\n"
     "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>", [DAYS], ""),
    ("seed-oss", "<seed:tool_call><function=get_weather><parameter=city>Tokyo<parameter=days>2</function>"
     "</seed:tool_call>", [DAYS], ""),
    # JSON between tags: functionary, Llama 3.1
    ("function-json", '<function=get_weather>{"city": "Tokyo"}</function>', [WEATHER], ""),
    ("function-json", '<function=write_file>{"content": "</function>"}</function> <function=get_time>{}</function>',
     [("write_file", {"content": "</function>"}), NOW], ""),
    ("function-json", "Write <function=f>.", [], "Write <function=f>."),
    # Granite 3.1 writes another mark than 3.0, or none: granite-io's issue 49
    ("granite", f"<tool_call>[{OBJECT}]", [WEATHER], ""),
    ("granite", f"[{OBJECT}]", [WEATHER], ""),
    # Qwen 2.5 and Granite 4
    ("hermes", '<tool_call>\n{"name": "get_time"}\n</tool_call>', [NOW], ""),
    ("hermes", '<tool_call>\n{"name": "get_time", "arguments": null}\n</tool_call>', [NOW], ""),
    ("hermes", f'<tool_call>\n[{OBJECT}, {{"name": "get_time", "arguments": {{}}}}]\n</tool_call>', [WEATHER, NOW], ""),
    ("hermes", '<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "Tokyo"}}}}\n</tool_call>', [WEATHER], ""),
    ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {{"city": "Tokyo"}}}\n</tool_call>', [WEATHER], ""),
    ("hermes", '<tool_call>\n{"function": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>', [WEATHER], ""),
    ("hermes", "<tool_call>\n{'name': 'write_file', 'arguments': {'content': 'it\\'s } \"'}}\n</tool_call>",
     [("write_file", {"content": 'it\'s } "'})], ""),
    ("hermes", f"<tool_call>\n<function=get_weather>\n{CITY}</function>\n</tool_call>", [WEATHER], ""),
    ("hermes", '<tool_call>\n{"name": "write_file", "arguments": {"content": "a\n\tb \\n\\" \n"}}\n</tool_call>',
     [("write_file", {"content": 'a\n\tb \n" \n'})], ""),
    ("hermes", '<tool_call>\n{"arguments": {"content": "a\nb"}, "name": "write_file"}\n</tool_call>',
     [("write_file", {"content": "a\nb"})], ""),
    ("llama", '{"type": "function", "function": {"name": "get_weather", "parameters": {"city": "Tokyo"}}}',
     [WEATHER], ""),
    ("llama", f"```json\n{OBJECT}\n```", [WEATHER], ""),
    # LFM2: names that are none in Python, and what its strings may hold
    ("lfm2", "<|tool_call_start|>[get-weather(city='Tokyo'), 2fa(code=\"1\"), class(name='a', from='b', user-id=7, "
     "2nd=[])]<|tool_call_end|>", [("get-weather", {"city": "Tokyo"}), ("2fa", {"code": "1"}),
                           ("class", {"name": "a", "from": "b", "user-id": 7, "2nd": []})], ""),
    ("lfm2", f"<|tool_call_start|>[{STRINGS}]<|tool_call_end|>",
     [("f", {"a": "b'cdAé'\\q", "r": "\\d", "t": [1], "u": 2, "v": {"k": {"x": -1500.0}, "2": None}})], ""),
    *[("lfm2", f"<|tool_call_start|>{wrong}<|tool_call_end|>", list[tuple[str, dict[str, Any]]](),
       f"<|tool_call_start|>{wrong}<|tool_call_end|>")
      for wrong in ("[f(a=1)", "[f(a=1, a=2)]", "[f(a=g(1))]", "[f(a=1+1)]", "[f(a=1e999)]", "[f(a=007)]", "f(a=1) g",
                    "[]", "[f(a=" + "[" * 200 + "]" * 200 + ")]")],
]  # fmt: skip


def read(form: str, pieces: list[str], *, parallel: bool = True) -> tuple[list[tuple[str, Any]], str, CallReader]:
    """Calls, text and the reader."""
    reader = CallReader(FORM[form], TOOLS, parallel=parallel)
    told: list[AnswerDelta] = [piece for text in pieces for piece in reader.push(text)] + reader.finish()
    names = [piece.text for piece in told if piece.kind == "call"]
    arguments = ["".join(p.text for p in told if p.kind == "arguments" and p.index == i) for i in range(len(names))]
    text = "".join(piece.text for piece in told if piece.kind == "content")
    return [(name, value(one)) for name, one in zip(names, arguments, strict=True)], text, reader


def value(arguments: str) -> Any:
    """Of a JSON text; the text itself if it is none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@pytest.mark.parametrize(("form", "answer", "calls", "text"), [*RECORDED, *LOOSE])
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


@pytest.mark.parametrize(
    ("form", "answer"),
    [
        ("hermes", '<tool_call>\n{"name": "searchTool", "arguments": {}}\n</tool_call>'),
        ("qwen-xml", "<tool_call>\n<function=searchTool>\n</function>\n</tool_call>"),
    ],
)
def test_a_piece_of_the_last_mark_is_no_text(form: str, answer: str) -> None:
    for cut in range(len("</tool_call>")):
        found, text, _ = read(form, [answer[: len(answer) - cut]])
        assert (found, text) == ([("searchTool", {})], ""), cut


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
    assert several or form in ("qwen-xml", "seed-oss", "function-json")


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
        "{'",
        '{"a": 1}',
        '{"name": "searchTool", "arguments": ',
        "f(a=1)",
        "call:f{a:1}",
    ]
    xml = ["<function=f>", "<function=get_weather>", "</function>", "\n</function>", "\n<parameter=city>",
           "\n<parameter=days>", "\n</parameter>", "\n</tool_call>"]  # fmt: skip
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
