"""The Responses API by OpenAI's own client: its examples, streamed and not, without anything stored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from .fake import NAME, Answerer, Speaker, fake_model, template
from .running import Running, running

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tōkyō"}}\n</tool_call>'
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "How the weather is.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
                   "additionalProperties": False},
    "strict": False,
}  # fmt: skip
ASKED: Any = [{"role": "user", "content": "How is the weather?"}]


class Weather(BaseModel):
    """The weather."""

    sunny: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(fake_model(Answerer(f"Let me see.\n{CALL}"), tools="hermes")) as up:
        yield up


def respond(server: Running, **more: Any) -> Any:
    return server.client().responses.create(**{"model": NAME, "input": ASKED, "temperature": 0, "store": False, **more})


def test_a_text_is_answered_as_a_chat_is(server: Running) -> None:
    """Instructions are the system's message; a text is the user's."""
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat: Any = server.client().chat.completions.create(model=NAME, messages=messages, temperature=0)
    answer = respond(server, instructions="Be brief.", input="Hello", metadata={"of": "a test"})
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "completed" and answer.object == "response" and not answer.store
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )
    assert answer.instructions == "Be brief." and answer.metadata == {"of": "a test"}


def test_the_tokens_of_an_input_are_counted(server: Running) -> None:
    """As an answer counts them; no answer is made."""
    asked: Any = {"model": NAME, "input": ASKED, "instructions": "Be brief.", "tools": [WEATHER]}
    before = server.metric('shardmill_tokens_total{kind="generated"}')
    counted = server.client().responses.input_tokens.count(**asked)
    assert server.metric('shardmill_tokens_total{kind="generated"}') == before
    assert counted.input_tokens == server.client().responses.create(**asked).usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        server.client().responses.input_tokens.count(**asked | {"model": "other"})


def test_calls_are_items_and_come_back_with_their_outputs(server: Running) -> None:
    """The client's example: append the output items and each call's result to the input, and ask again."""
    first = respond(server, tools=[WEATHER])
    message, call = first.output
    assert (message.type, message.content[0].text) == ("message", "Let me see.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Tōkyō"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"}
    again = [*ASKED, *first.output, result]
    with running(fake_model(Answerer("Fine."), tools="hermes")) as up:
        answer = respond(up, input=again, tools=[WEATHER])
        assert answer.output_text == "Fine."
        sent: Any = {
            "id": call.call_id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        messages: Any = [*ASKED, {"role": "assistant", "content": "Let me see.", "tool_calls": [sent]},
                         {"role": "tool", "tool_call_id": call.call_id, "content": "20 °C"}]  # fmt: skip
        tools: Any = [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]
        chat: Any = up.client().chat.completions.create(model=NAME, messages=messages, tools=tools, temperature=0)
        assert chat.usage.prompt_tokens == answer.usage.input_tokens


def test_events_tell_the_answer(server: Running) -> None:
    """In OpenAI's order, numbered; the deltas make up the items, and the last event has the whole answer."""
    events = list(respond(server, tools=[WEATHER], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events if not event.type.endswith("delta")]
    assert kinds == ["created", "in_progress", "output_item.added", "content_part.added", "output_text.done",
                     "content_part.done", "output_item.done", "output_item.added", "function_call_arguments.done",
                     "output_item.done", "completed"]  # fmt: skip
    texts = {kind: "".join(e.delta for e in events if e.type == f"response.{kind}.delta")
             for kind in ("output_text", "function_call_arguments")}  # fmt: skip
    whole = events[-1].response
    assert texts == {"output_text": whole.output_text, "function_call_arguments": whole.output[1].arguments}
    Response.model_validate(whole.model_dump())
    plain = respond(server, tools=[WEATHER])
    assert [item.model_dump(exclude={"id", "call_id"}) for item in plain.output] == [
        item.model_dump(exclude={"id", "call_id"}) for item in whole.output
    ]


def test_the_clients_helpers_understand_the_stream(server: Running) -> None:
    with server.client().responses.stream(model=NAME, input=ASKED, tools=[WEATHER], temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.output_text.delta" in kinds and final.output_text == "Let me see."


def test_a_format_is_obeyed() -> None:
    """`responses.parse` with a class, by an engine that speaks nonsense; a required call likewise."""
    pytest.importorskip("llguidance")
    with running(fake_model(Speaker(slots=1024), tools="hermes")) as up:
        parsed = up.client().responses.parse(model=NAME, input="How is it?", text_format=Weather)
        assert isinstance(parsed.output_parsed, Weather)
        ends: Any = {"type": "function", "name": "get_weather"}
        answer = respond(
            up, tools=[{**WEATHER, "strict": True}], tool_choice=ends, max_output_tokens=500, temperature=None
        )
        assert answer.output[0].type == "function_call" and answer.tool_choice.name == "get_weather"


def test_an_answer_that_is_cut_short_is_incomplete(server: Running) -> None:
    answer = respond(server, max_output_tokens=5)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "Let m" and answer.output[0].status == "incomplete"
    assert list(respond(server, max_output_tokens=5, stream=True))[-1].type == "response.incomplete"


def test_thoughts_are_items() -> None:
    """harmony's analysis, before the message; it may be sent back."""
    said = "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Hi."
    with running(fake_model(Answerer(said), tools="harmony")) as up:
        answer = respond(up, tools=[WEATHER])
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "Hm." and answer.output_text == "Hi."
        assert respond(up, input=[*ASKED, *answer.output, *ASKED], tools=[WEATHER]).output_text == "Hi."


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported, as answers are not stored"),
        ({"conversation": "conv_1"}, "conversation is not supported, as answers are not stored"),
        ({"background": True}, "background is not supported, as answers are not stored"),
        ({"tools": [{"name": "f"}]}, "tools.0.type: "),
        ({"tools": [{"type": "web_search"}] * 129}, "tools: there are 129, at most 128 are allowed"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"reasoning": {"effort": "endless"}}, "reasoning.effort: "),
        ({"input": [{"type": "custom_tool_call", "name": "f"}]}, "an item of type custom_tool_call needs call_id"),
        ({"input": []}, "input: "),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0: an item of type function_call needs call_id"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]},
         "input.0.content: this model takes no images: send text alone"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input: there is no message"),
        ({"tool_choice": "required"}, "tool_choice: required needs tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema needs json_schema.schema"),
        ({"max_tool_calls": 3}, "'max_tool_calls' is not supported"),
        ({"metadata": {"a": float("nan")}}, "metadata.a: "),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"maximum": float("inf")}}]},
         "tools.0.parameters: Out of range float values are not JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_named(server: Running, change: dict[str, Any], says: str, stream: bool) -> None:
    status, answer = server.post({"model": NAME, "input": "x", "stream": stream, **change}, "/v1/responses")
    assert status == 400 and says in answer["error"]["message"] and "\n" not in answer["error"]["message"]


OTHERS: Any = [
    {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"},
    {"type": "namespace", "name": "mcp\r\nX: y, z", "tools": [WEATHER]},
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_other_kinds_are_left_out_and_named(server: Running, stream: bool) -> None:
    """Codex offers them beside its functions: the model is shown the functions alone, and a header says what is not."""
    body = {"model": NAME, "input": ASKED, "temperature": 0, "stream": stream}
    sent = {"Content-Type": "application/json"}
    asked = [json.dumps(body | {"tools": tools}).encode() for tools in ([WEATHER], [OTHERS[0], WEATHER, *OTHERS[1:]])]
    (_, plain, first), (status, headers, second) = (server.request("POST", "/v1/responses", one, sent) for one in asked)
    assert status == 200 and "shardmill-tools-left-out" not in plain
    names = "web_search, custom:apply_patch, local_shell, namespace:mcp??X:?y??z"
    assert headers.get("shardmill-tools-left-out") == names
    if not stream:
        one, other = json.loads(first), json.loads(second)
        assert one["usage"]["input_tokens"] == other["usage"]["input_tokens"]
        assert [tool["name"] for tool in other["tools"]] == ["get_weather"]


def test_what_codex_sends_is_taken(server: Running) -> None:
    """Its own fields, and a custom tool's call in the history, which the template sees as a function's."""
    seen: list[Any] = []

    def watched(messages: Any, tools: Any = None, variables: Any = None) -> str:
        seen.append((messages, variables))
        return template(messages, tools)

    model = replace(
        fake_model(Answerer("Fine."), tools="hermes"),
        template=watched,
        template_variables=frozenset({"reasoning_effort"}),
    )
    history = [
        *ASKED,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin\n"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
    ]
    asked = {"model": NAME, "input": history, "client_metadata": {"installation": "1"}, "include": []}
    with running(model) as up:
        for effort in ("none", "minimal", "medium", "xhigh"):
            status, answer = up.post({**asked, "reasoning": {"effort": effort, "summary": "auto"}}, "/v1/responses")
            assert status == 200, answer
    assert [variables for _, variables in seen] == [
        None,
        *({"reasoning_effort": one} for one in ("low", "medium", "high")),
    ]
    assert [message["role"] for message in seen[0][0]] == ["user", "assistant", "tool"]
    _, call, output = seen[0][0]
    assert call["tool_calls"][0]["function"] == {"name": "apply_patch", "arguments": {"input": "*** Begin\n"}}
    assert (output["role"], output["name"], output["content"]) == ("tool", "apply_patch", "ok")
    status, _ = server.post({"model": NAME, "input": "x", "reasoning": {"effort": "high"}}, "/v1/responses")
    assert status == 200  # a template that does not read it


def test_a_failure_in_mid_answer_is_told() -> None:
    """The last event says that the response has failed, and nothing of the inside."""

    class Late(Speaker):
        """Fails after ten passes."""

        def forward(self, *arguments: Any) -> Any:
            if self.passes > 10:
                raise RuntimeError("the engine caught fire")
            return super().forward(*arguments)

    with running(fake_model(Late())) as up:
        last = list(respond(up, input="x", max_output_tokens=100, stream=True))[-1]
        assert last.type == "response.failed" and "fire" not in last.response.error.message
        with pytest.raises(openai.InternalServerError):
            respond(up, input="x", max_output_tokens=100)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_a_chat(server: Running, stream: bool) -> None:
    """Each token once, in a stream with the text that it ends."""
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 9}
    chat = server.client().chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "Hi"}],
        temperature=0,
        max_tokens=9,
        logprobs=True,
        top_logprobs=2,
    )
    expected = [(row.token, row.logprob, len(row.top_logprobs)) for row in chat.choices[0].logprobs.content]
    if stream:
        events = list(respond(server, input="Hi", stream=True, **asked))
        deltas = [row for event in events if event.type == "response.output_text.delta" for row in event.logprobs]
        (done,) = (event.logprobs for event in events if event.type == "response.output_text.done")
        told = [(row.token, row.logprob, len(row.top_logprobs)) for row in deltas]
        assert told and told == expected[: len(told)] and [row.token for row in done] == [row[0] for row in expected]
        answer = events[-1].response
    else:
        answer = respond(server, input="Hi", **asked)
    rows = answer.output[0].content[0].logprobs
    assert [(row.token, row.logprob, len(row.top_logprobs)) for row in rows] == expected


def test_what_asks_to_be_stored_is_answered_and_not_stored(server: Running) -> None:
    assert respond(server, store=True).store is False


def test_an_earlier_refusal_is_taken_back(server: Running) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert respond(server, input=[{"role": "user", "content": "Hi"}, refused, {"role": "user", "content": "Why?"}])
