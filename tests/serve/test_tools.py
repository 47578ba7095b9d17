"""Function calls over HTTP, by OpenAI's own client: whole, streamed, with its helpers, and sent back with results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import pydantic_function_tool
from pydantic import BaseModel

from shardmill.serve.model import Limits, Settings

from .fake import NAME, Answerer, Reciter, Speaker, byte_tokens, fake_model, template
from .running import Running, running

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TWO = CALL % ("get_weather", '{"city": "Tōkyō 🙂", "days": 2}') + "\n" + CALL % ("get_time", "{}")
ASKED: Any = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """How the weather will be."""

    city: str
    days: int
    unit: Literal["C", "F"] | None = None


class Time(BaseModel):
    """The time."""


def chosen(mode: str, *names: str) -> dict[str, Any]:
    """A tool choice of several functions."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


TOOLS: Any = [pydantic_function_tool(Weather, name="get_weather"), pydantic_function_tool(Time, name="get_time")]
LOOSE: Any = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in TOOLS]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model(Answerer(f"Let me see.\n{TWO}"), tools="hermes")) as up:
        yield up


@pytest.fixture(scope="module")
def nonsense() -> Iterator[Running]:
    """Calls nothing by itself."""
    with running(fake_model(Speaker(slots=2048), tools="hermes")) as up:
        yield up


def say(server: Running, **more: Any) -> Any:
    request: dict[str, Any] = {"model": NAME, "messages": ASKED, "tools": LOOSE, "temperature": 0, **more}
    return server.client().chat.completions.create(**request)


def test_a_message_has_text_and_calls(server: Running) -> None:
    """OpenAI's API reference has it so: the arguments are a text of JSON, and the reason to finish is the calls."""
    (choice,) = say(server).choices
    weather, time = choice.message.tool_calls
    assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
    assert (weather.type, weather.function.name, time.function.name) == ("function", "get_weather", "get_time")
    assert json.loads(weather.function.arguments) == {"city": "Tōkyō 🙂", "days": 2}
    assert time.function.arguments == "{}" and weather.id != time.id


def test_a_stream_names_a_call_before_its_arguments(server: Running) -> None:
    """Index, id and name come first, the arguments follow in pieces, and together they are the whole answer."""
    chunks = list(say(server, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == say(server).usage.completion_tokens and not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert deltas[-1].finish_reason == "tool_calls" and deltas[-1].delta.content is None
    calls = [call for choice in deltas for call in choice.delta.tool_calls or ()]
    begun = [call for call in calls if call.id]
    assert [(c.index, c.function.name, c.function.arguments) for c in begun] == [
        (0, "get_weather", ""),
        (1, "get_time", ""),
    ]
    pieces = [[call.function.arguments for call in calls if call.index == i] for i in (0, 1)]
    assert len(pieces[0]) > 1  # how many depends on how fast the engine is
    whole = say(server).choices[0].message
    assert ["".join(piece) for piece in pieces] == [call.function.arguments for call in whole.tool_calls]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.content


def test_the_clients_own_helpers_parse_the_calls(nonsense: Running) -> None:
    """`stream` and `parse` with pydantic_function_tool, whose tools are strict: the arguments are of the class."""
    pytest.importorskip("llguidance")
    asked: Any = {"model": NAME, "messages": ASKED, "tools": TOOLS, "tool_choice": "required", "seed": 1}
    with nonsense.client().chat.completions.stream(**asked, max_tokens=400) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
    parsed = nonsense.client().chat.completions.parse(**asked, max_tokens=400)
    for completion in (final, parsed):
        calls = completion.choices[0].message.tool_calls
        assert calls and all(isinstance(call.function.parsed_arguments, Weather | Time) for call in calls)


@pytest.mark.thorough(but=["True"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_piece_of_a_required_call_is_text(stream: bool) -> None:
    """However far the answer gets: what is no call yet is nothing, and a piece of the last mark is nothing either."""
    pytest.importorskip("llguidance")
    asked: Any = {"tools": TOOLS[1:], "tool_choice": "required", "parallel_tool_calls": False, "stream": stream}
    said, names = CALL % ("get_time", "{}"), list[list[str]]()
    with running(fake_model(Answerer(said), tools="hermes")) as up:
        for most in range(1, len(said) + 1):
            answer = say(up, **asked, max_tokens=most)
            told = [chunk.choices[0].delta for chunk in answer] if stream else [answer.choices[0].message]
            assert not any(one.content for one in told), most
            calls = [call for one in told for call in one.tool_calls or ()]
            names.append([call.function.name for call in calls if call.function.name])
    assert names[0] == [] and names[-1] == ["get_time"] == names[len(said) - 4]


@pytest.mark.parametrize("seed", range(4))
def test_a_named_function_is_called_once(nonsense: Running, seed: int) -> None:
    """The model would say anything else; the arguments obey the schema."""
    pytest.importorskip("llguidance")
    named = {"type": "function", "function": {"name": "get_weather"}}
    ends = {byte_tokens()[ord('"')]: 9, byte_tokens()[ord("}")]: 9}  # or its texts and numbers would not
    (choice,) = say(nonsense, tool_choice=named, seed=seed, temperature=1, logit_bias=ends, max_tokens=400).choices
    (call,) = choice.message.tool_calls
    assert choice.message.content is None and choice.finish_reason == "tool_calls"
    Weather.model_validate_json(call.function.arguments)


def test_required_with_an_answer_in_json(nonsense: Running) -> None:
    """A call if one is required, otherwise a call or the answer, whichever the model prefers."""
    pytest.importorskip("llguidance")
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    only = say(nonsense, tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False, response_format=wanted)
    assert [call.function.name for call in only.choices[0].message.tool_calls] == ["get_time"]
    assert only.choices[0].message.tool_calls[0].function.arguments == "{}"
    kinds = {"[": "stop", "<": "tool_calls"}  # the first character decides
    for first, reason in kinds.items():
        likely = {byte_tokens()[ord(first)]: 50}
        (choice,) = say(nonsense, tools=TOOLS[1:], response_format=wanted, logit_bias=likely, max_tokens=300).choices
        assert choice.finish_reason == reason
        if reason == "stop":
            assert all(isinstance(value, bool) for value in json.loads(choice.message.content))


def test_strict_functions_are_strict_when_the_model_chooses() -> None:
    """Text is free, but what follows the format's mark obeys the schema, though the engine would recite otherwise."""
    pytest.importorskip("llguidance")
    said = "Now: " + CALL % ("get_weather", '{"city": "Rome", "days": "many", "x": 1}')
    with running(fake_model(Answerer(said), tools="hermes")) as up:
        (choice,) = say(up, tools=TOOLS, max_tokens=300).choices
        assert choice.message.content.startswith("Now:")
        Weather.model_validate_json(choice.message.tool_calls[0].function.arguments)
        loose = say(up).choices[0].message.tool_calls[0].function.arguments
        assert json.loads(loose)["days"] == "many"


@pytest.mark.parametrize(("place", "names"), [("tools: f", "fg"), ("response_format", "fg"), ("response_format", "")])
@pytest.mark.parametrize("mark", ["", "<think>"])
def test_a_schema_that_no_grammar_takes_is_named(place: str, names: str, mark: str) -> None:
    """In one short line, without the grammar that the library quotes; also after a thought."""
    pytest.importorskip("llguidance")
    broken, fine = {"properties": {"a": {"type": "nonsense"}}}, {"type": "object"}
    functions = [{"name": name, "parameters": broken if place.endswith(f" {name}") else fine} for name in names]
    schema = {"name": "x", "schema": broken if place == "response_format" else fine}
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": one} for one in functions],
        "response_format": {"type": "json_schema", "json_schema": schema},
    }
    model = replace(fake_model(tools="hermes", thoughts=mark), template=lambda *_, **more: f"x{mark}")
    with running(model) as up:
        status, answer = up.post(body, "/v1/chat/completions")
    assert status == 400 and answer["error"]["param"] == place.partition(":")[0]
    assert answer["error"]["message"] == f"{place}: JSON schema rejected: Invalid type: nonsense"


def test_only_one_call_without_parallel_calls(server: Running) -> None:
    message = say(server, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]


def test_no_tools_are_shown_or_read_if_the_choice_is_none(server: Running) -> None:
    """The prompt is the one without tools, and the answer is all text."""
    (choice,) = say(server, tool_choice="none").choices
    assert choice.message.tool_calls is None and choice.message.content.endswith("</tool_call>")
    assert say(server, tool_choice="none").usage.prompt_tokens == say(server, tools=None).usage.prompt_tokens


@pytest.mark.parametrize(
    ("more", "reason", "whole"),
    [
        ({"stop": "Tōk"}, "stop", False),
        ({"max_tokens": 70}, "length", False),
        ({"stop": ["</tool_call>"]}, "tool_calls", True),
    ],
)
def test_a_call_that_is_cut_short_says_so(server: Running, more: dict[str, Any], reason: str, whole: bool) -> None:
    """A stop string and the limit apply to what the model writes; half a call is not reported as one to be made."""
    (choice,) = say(server, **more).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == reason and call.function.arguments.startswith('{"city"')
    assert call.function.arguments.endswith("}") == whole


def test_log_probabilities_cover_the_calls_too(server: Running) -> None:
    rows = say(server, logprobs=True).choices[0].logprobs.content
    assert bytes(byte for row in rows for byte in row.bytes).decode() == f"Let me see.\n{TWO}"


def test_a_template_reads_calls_and_results(server: Running) -> None:
    """The client's own message and the results go back: arguments as objects, and each result with its function."""
    seen: list[Sequence[Mapping[str, Any]]] = []

    def watched(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        seen.append(messages)
        return template(messages, tools)

    model = replace(fake_model(Answerer("Fine."), tools="hermes"), template=watched)
    message = say(server).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "20 °C"}]}
               for call in message.tool_calls]  # fmt: skip
    with running(model) as up:
        answer = say(up, messages=[*ASKED, message, *results])
    assert answer.choices[0].message.content == "Fine." and answer.choices[0].finish_reason == "stop"
    _, called, weather, time = seen[-1]
    first, second = called["tool_calls"]
    assert first["function"] == {"name": "get_weather", "arguments": {"city": "Tōkyō 🙂", "days": 2}}
    assert second["function"] == {"name": "get_time", "arguments": {}}
    assert weather == {"role": "tool", "content": "20 °C", "tool_call_id": first["id"], "name": "get_weather"}
    assert time["name"] == "get_time"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools.0.type: "),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name: "),
        ({"tools": [*LOOSE, LOOSE[0]]}, "two functions have the same name"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "no tool has the name 'x'"),
        ({"tool_choice": "sometimes"}, "tool_choice: must be none, auto, required, {"),
        ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
        ({"messages": [{"role": "tool", "content": "20"}]}, "needs the tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}]},
         "a message of role user can't have tool_calls"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(server: Running, change: dict[str, Any], says: str) -> None:
    body = {"model": NAME, "messages": ASKED, "tools": LOOSE, **change}
    status, answer = server.post(body, "/v1/chat/completions")
    assert status == 400 and says in answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_a_template_without_tools_is_named() -> None:
    """The error says which formats are known, and nothing changes for requests without tools."""
    with running(fake_model()) as up:
        with pytest.raises(
            openai.BadRequestError, match=r"'fake' teaches no calls in a known format \(harmony, gemma, "
        ):
            say(up)
        assert say(up, tools=[], max_tokens=3).choices[0].message.content


TEXT = st.text(st.characters(), max_size=20)
NAMES = st.sampled_from(["get_weather", "get_time", "unknown", ""])
ARGUMENTS = (
    st.sampled_from(["{}", "", "null", "[1]", '{"city": "x"}', '{"city"', '"text"', "[" * 3000, '{"a": NaN}']) | TEXT
)
FUNCTION = st.fixed_dictionaries({"name": NAMES, "arguments": ARGUMENTS})
CALL_DRAWN = st.fixed_dictionaries({"id": TEXT, "type": st.just("function"), "function": FUNCTION})
CALLS = st.lists(CALL_DRAWN, min_size=1, max_size=3)
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=2)
ROLES = st.sampled_from(["system", "user", "assistant", "tool", "developer", "function"])
PROPER = st.one_of(
    st.fixed_dictionaries({"role": st.just("assistant"), "content": TEXT | st.none(), "tool_calls": CALLS}),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": st.text(min_size=1), "content": TEXT | PARTS}),
    st.fixed_dictionaries({"role": st.just("user"), "content": TEXT | PARTS}, optional={"name": TEXT}),
)
ANY = st.fixed_dictionaries(
    {"role": ROLES},
    optional={"content": TEXT | st.none() | PARTS, "tool_calls": CALLS | st.none(), "tool_call_id": TEXT, "name": TEXT,
              "refusal": st.none() | TEXT, "reasoning_content": TEXT},
)  # fmt: skip
HISTORY = st.lists(PROPER, min_size=1, max_size=4) | st.lists(PROPER | ANY, min_size=1, max_size=4)


@pytest.mark.thorough
def test_any_history_is_answered_or_refused(request: pytest.FixtureRequest) -> None:
    """Three hundred drawn histories of calls and results: 200 or 400, never a failure."""
    statuses: list[int] = []
    quick = Reciter("Fine.")
    quick.delay = 0.0
    with running(fake_model(quick, tools="hermes"), Settings(port=0, limits=Limits(max_tokens=4))) as up:

        @settings(max_examples=300, derandomize=True)
        @given(HISTORY, st.sampled_from(["auto", "none", None]), st.booleans())
        def tried(messages: list[dict[str, Any]], choice: str | None, stream: bool) -> None:
            body = {
                "model": NAME,
                "messages": [*ASKED, *messages],
                "tools": LOOSE[1:],
                "tool_choice": choice,
                "stream": stream,
            }
            sent = json.dumps(body).encode()
            status, _, content = up.request("POST", "/v1/chat/completions", sent, {"Content-Type": "application/json"})
            statuses.append(status)
            assert status in (200, 400), content
            assert status == 400 or not stream or content.endswith(b"data: [DONE]\n\n")

        tried()
    assert statuses.count(200) > 30 and statuses.count(400) > 30


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_allowed_tools_the_model_is_shown_no_other(nonsense: Running, mode: str) -> None:
    """It costs the same tokens as a request with these tools alone, and is answered alike."""
    choice = "auto" if mode == "auto" else "required"
    alone = say(nonsense, tools=LOOSE[1:], tool_choice=choice, max_tokens=60)
    among = say(nonsense, tools=LOOSE, tool_choice=chosen(mode, "get_time"), max_tokens=60)
    assert among.usage.prompt_tokens == alone.usage.prompt_tokens
    calls = [[call.function.name for call in answer.choices[0].message.tool_calls or ()] for answer in (alone, among)]
    assert calls[0] == calls[1] and among.choices[0].message.content == alone.choices[0].message.content
    assert mode == "auto" or calls[0] == ["get_time"] * len(calls[0]) != []


def test_an_allowed_tool_that_is_no_tool_is_named(nonsense: Running) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice: no tool has the name 'get_news'"):
        say(nonsense, tool_choice=chosen("auto", "get_time", "get_news"))
