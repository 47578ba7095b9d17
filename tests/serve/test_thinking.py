"""A model that thinks before it answers and calls functions in XML, as Qwen3.5's template teaches it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny
from bench.folder import build_folder
from drafted_decoding import GenerationResult, Sampling, TokenEvent, create_drafter
from models import tiny_families
from program_forms import FORMS, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardmill.serve.answer import Choice
from shardmill.serve.conversation import Conversation, Talk
from shardmill.serve.model import Model, Settings, load_model
from shardmill.serve.prepare import prepare
from shardmill.serve.requests import ChatRequest
from shardmill.serve.tool_reader import AnswerDelta
from shardmill.serve.tools import find_format
from shardmill.templates.render import rendered, turn_end
from shardmill.templates.thoughts import find_thoughts, thought_fields

from . import templates
from .fake import END, NAME, Answerer, byte_tokenizer, fake_model, token_bytes
from .running import Running, running

SPECIAL = ["<|end|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OFF = "{% set enable_thinking = false %}" + templates.QWEN_3_5  # as a file for --chat-template says it
QUESTION: Any = [{"role": "user", "content": "Rain in Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
HARMONY = 2 * "<|channel|>analysis<|message|>Hm.<|start|>assistant" + "<|channel|>final<|message|>Yes."
KINDS = ("thought", "content")
SAID = f"The city is Rome.\n</think>\n\n{CALL}</function>\n</tool_call>"


def transformers_of(made: Tokenizer, template: str | None = None) -> Any:
    """transformers' tokenizer with a template."""
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=made, chat_template=template)


def shown(messages: list[dict[str, Any]], template: str = templates.QWEN_3_5, **more: Any) -> str:
    """The text that transformers makes of a conversation."""
    fine, text = rendered(transformers_of(byte_tokenizer()), messages, template, **more)
    assert fine, text
    return text


def test_thinking_is_begun_or_already_over() -> None:
    """The file that turns it off does what transformers' keyword does."""
    assert shown(QUESTION).endswith("<|im_start|>assistant\n<think>\n")
    assert shown(QUESTION, OFF).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    theirs = transformers_of(byte_tokenizer(), templates.QWEN_3_5)
    for off, template in ((False, templates.QWEN_3_5), (True, OFF)):
        more: Any = {"enable_thinking": False} if off else {}
        text = theirs.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **more)
        assert text == shown(QUESTION, template)


def render(messages: Any, tools: Any = None, variables: Any = None) -> str:
    """Qwen3.5's template as a model has it."""
    theirs = transformers_of(byte_tokenizer(), templates.QWEN_3_5)
    return str(
        theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables or {})
    )


def thinker(said: str, opening: str = "<|im_start|>assistant\n<think>\n", tools: str | None = None) -> Model:
    """A model with that template that says this after every prompt."""
    model = fake_model(Answerer(said, opening), tools=tools, thoughts=templates.QWEN_3_5)
    return replace(model, template=render, template_variables=frozenset({"enable_thinking"}))


def say(up: Running, **more: Any) -> Any:
    asked: Any = {"model": NAME, "messages": QUESTION, "temperature": 0, **more}
    return up.client().chat.completions.create(**asked)


def test_a_thought_has_its_own_field_whole_and_streamed() -> None:
    """For every choice, and however short the answer is cut."""
    with running(thinker("It may\n rain.\n</think>\n\nYes.")) as up:
        for choice in say(up, n=2).choices:
            assert choice.message.reasoning_content == "It may\n rain." and choice.message.content == "Yes."
        chunks = [chunk.choices[0] for chunk in say(up, n=2, stream=True)]
        for index in range(2):
            deltas = [one.delta for one in chunks if one.index == index]
            assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "It may\n rain."
            assert "".join(delta.content or "" for delta in deltas) == "Yes."
        cut = say(up, max_tokens=6).choices[0]
        assert cut.message.content is None and cut.message.reasoning_content == "It may"
        assert cut.finish_reason == "length"
        later: Any = {"role": "user", "content": "And in Athens?"}  # before it thoughts are left out
        asked = say(up, messages=[*QUESTION, cut.message, later]).usage.prompt_tokens
        assert asked == len(render([*QUESTION, {"role": "assistant", "content": ""}, later]))
        plain = up.client().completions.create(model=NAME, prompt=render(QUESTION), temperature=0, max_tokens=50)
        assert plain.choices[0].text == "It may\n rain.\n</think>\n\nYes."


@pytest.mark.parametrize("opened", [True, False])
def test_the_tokens_of_a_thought_are_counted(opened: bool) -> None:
    """Between the marks, as vLLM counts them, in a field of the official client; an end of text is no thought."""
    mark, thought = "" if opened else "<think>", "\nIt máy 🙂.\n"
    model = thinker(f"{mark}{thought}</think>\n\nYes.", "<think>\n" if opened else "assistant\n")
    if not opened:
        model = replace(model, template=lambda *_, **__: "assistant\n")
    count = len(thought.encode())  # the tokenizer has a token for each byte
    with running(model) as up:
        whole = say(up, n=2).usage
        assert whole.completion_tokens_details.reasoning_tokens == 2 * count
        *_, last = say(up, n=2, stream=True, stream_options={"include_usage": True})
        assert last.usage.completion_tokens_details == whole.completion_tokens_details
        for most, expected in ((len(mark) + 4, 4), (len(mark) + count, count), (500, count)):
            assert say(up, max_tokens=most).usage.completion_tokens_details.reasoning_tokens == expected
        create: Any = up.client().responses.create
        asked: Any = {"model": NAME, "input": QUESTION, "temperature": 0}
        answer = create(**asked)
        *_, end = create(**asked, stream=True)
        for usage in (answer.usage, end.response.usage):
            assert usage.output_tokens_details.reasoning_tokens == count
        plain = up.client().completions.create(model=NAME, prompt=render(QUESTION), temperature=0, max_tokens=50)
        assert plain.usage and plain.usage.completion_tokens_details
        assert plain.usage.completion_tokens_details.reasoning_tokens == 0
    with running(thinker("Yes.")) as up:  # the thought is never closed
        assert say(up).usage.completion_tokens_details.reasoning_tokens == len("Yes.")
    with running(thinker("Yes.", "</think>\n\n")) as up:
        off = say(up, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
        assert off.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["It", " may.</", "think>", "\n\nYes"], 2),
        (["It", " may.", "</think>Yes"], 2),
        (["It</think>Yes"], 1),
        (["</think>", "Yes"], 0),
    ],
)
def test_a_token_with_the_end_of_a_thought_and_of_its_mark_counts(texts: list[str], expected: int) -> None:
    """Whatever else is in its text."""
    model = thinker("")
    request = ChatRequest.model_validate({"model": NAME, "messages": QUESTION})
    choice = Choice(request, model, thinks=True)
    at = 0
    for text in texts:
        choice.digest([TokenEvent(1, False, text=text, start=at, end=at + len(text))])
        at += len(text)
    assert choice.reasoning == expected


def test_variables_of_the_template_are_set_by_a_request() -> None:
    """As transformers sets them; without thinking, the answer is text from its beginning."""
    off = {"enable_thinking": False}
    with running(thinker("</think> ends a thought.", "</think>\n\n")) as up:
        answer = say(up, extra_body={"chat_template_kwargs": off})
        assert answer.usage.prompt_tokens == len(render(QUESTION, variables=off))
        assert answer.choices[0].message.content == "</think> ends a thought."
        assert "reasoning_content" not in answer.choices[0].message.model_extra
        wrong: Any = {"thinking": True}, {"enable_thinking": "false"}, {"messages": []}, {"enable_thinking": 0}, [1]
        says = "no variable 'thinking'; it has enable_thinking", "must be true or false", "no variable 'messages'"
        for given, why in zip(wrong, [*says, "must be true or false", "chat_template_kwargs: "], strict=True):
            with pytest.raises(openai.BadRequestError, match=why) as caught:
                say(up, extra_body={"chat_template_kwargs": given})
            assert caught.value.param == "chat_template_kwargs"


def test_the_model_may_begin_the_thought_itself() -> None:
    """As Qwen 3 does; where the template knows no thoughts, the marks are text."""
    said = "<think>\nHm.\n</think>\n\nYes."
    for thoughts, expected in ((templates.THINKING, ("Hm.", "Yes.")), ("", (None, said))):
        with running(fake_model(Answerer(said), thoughts=thoughts)) as up:
            message = say(up).choices[0].message
            assert (getattr(message, "reasoning_content", None), message.content) == expected


def test_channels_are_read_without_functions_too() -> None:
    """gpt-oss always writes them, and may think twice."""
    with running(fake_model(Answerer(HARMONY), tools="harmony")) as up:
        answer = say(up)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.Hm.", "Yes.")
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("Hm.Hm.")


def test_a_talk_reads_channels_whose_marks_are_special_tokens() -> None:
    """`shardmill chat` shows no channel's name, and keeps the analysis apart for the next turn's template."""
    content = json.loads(byte_tokenizer().to_str())
    vocab = content["model"]["vocab"]
    unused = [symbol for symbol, token in vocab.items() if token not in token_bytes() and token != END]
    for mark, symbol in zip(("<|start|>", "<|channel|>", "<|message|>"), unused, strict=False):
        vocab[mark] = vocab.pop(symbol)
        content["added_tokens"].append(content["added_tokens"][0] | {"content": mark, "id": vocab[mark]})
    engine = Answerer("")
    model = replace(fake_model(engine, tools="harmony"), tokenizer=Tokenizer.from_str(json.dumps(content)))
    engine._answer = [*model.encode(HARMONY, special=False), END]
    assert "channel" not in model.decode(engine._answer) and len(engine._answer) < len(HARMONY)
    conversation = Conversation(model)
    *pieces, _ = Talk(model, create_drafter("none"), Sampling(), 200).turn(conversation, "hi", [])
    said = {kind: "".join(p.text for p in pieces if isinstance(p, AnswerDelta) and p.kind == kind) for kind in KINDS}
    assert said == {"thought": "Hm.Hm.", "content": "Yes."}
    assert conversation.messages[-1] == {"role": "assistant", "content": "Yes.", **thought_fields("Hm.Hm.")}


@pytest.mark.parametrize("refuses", [True, False])
def test_a_talk_goes_on_after_a_turn_that_ended_in_its_thought(refuses: bool) -> None:
    """Mistral's templates refuse an answer without text."""

    def written(messages: Any, tools: Any = None, variables: Any = None) -> str:
        if refuses and any(m["role"] == "assistant" and not m["content"] for m in messages):
            raise ValueError("Assistant message must have a string")
        return f"{messages[-1]['content']}[THINK]"

    model = replace(fake_model(Answerer("Hm.[/THINK]Yes.", "[THINK]"), thoughts="[THINK]"), template=written)
    conversation = Conversation(model)
    for most, turns in ((2, not refuses), (200, 2 - refuses)):
        done = [*Talk(model, create_drafter("none"), Sampling(), most).turn(conversation, "hi", [])][-1]
        assert isinstance(done, GenerationResult) and len(conversation.messages) == 2 * turns
    assert conversation.messages[-1]["content"] == "Yes."


def test_special_tokens_around_a_thought_are_no_part_of_it() -> None:
    """Gemma 4's marks are special tokens, which other answers do not show."""
    made = Tokenizer.from_str(byte_tokenizer().to_str())
    made.add_special_tokens(["<|channel>", "<channel|>"])
    model = replace(fake_model(), tokenizer=made, thoughts=find_thoughts("<|channel>thought"))
    said = "<|channel>thought\nHm.<channel|>Yes.<|end|>"
    asked = ChatRequest.model_validate({"model": NAME, "messages": QUESTION})
    options = prepare(asked, model, Settings())[0].options
    assert options.detokenize is not None
    assert options.detokenize(made.encode(said).ids) == said.removesuffix("<|end|>")


def test_json_follows_a_thought() -> None:
    """The thought is free, and the answer obeys the schema, though the model would recite otherwise."""
    pytest.importorskip("llguidance")
    schema: Any = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    schema["additionalProperties"] = False
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with running(thinker("It may. {</think>\n\nIt rains.")) as up:
        message = say(up, response_format=wanted, max_tokens=200).choices[0].message
        assert message.reasoning_content == "It may. {" and json.loads(message.content)["rain"] in (True, False)
    with running(thinker("It rains.", "</think>\n\n")) as up:
        body = {"chat_template_kwargs": {"enable_thinking": False}}
        message = say(up, response_format=wanted, max_tokens=200, extra_body=body).choices[0].message
        assert json.loads(message.content)["rain"] in (True, False)


def test_functions_are_called_after_a_thought_which_is_sent_back() -> None:
    """With OpenAI's client: the calls of an answer, and the conversation that goes on from it."""
    form = find_format(templates.QWEN_3_5)
    assert form is not None and form.name == "qwen-xml"
    with running(thinker(SAID, tools=form.name)) as up:
        choice = say(up, tools=[WEATHER]).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
        assert choice.message.reasoning_content == "The city is Rome."
        function = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
        turn = {"role": "assistant", "content": "", "reasoning_content": "The city is Rome."}
        talk = [*QUESTION, turn | {"tool_calls": [{"function": function}]}, {"role": "tool", "content": "dry"}]
        shown = render(talk, [WEATHER])
        assert f"<think>\nThe city is Rome.\n</think>\n\n{CALL}" in shown
        result = {"role": "tool", "tool_call_id": call.id, "content": "dry"}
        theirs = choice.message.model_dump(exclude={"reasoning_content"}) | {"reasoning": "The city is Rome."}
        for message in (choice.message, theirs):  # vLLM calls it `reasoning`
            usage = say(up, messages=[*QUESTION, message, result], tools=[WEATHER]).usage
            assert usage.prompt_tokens == len(shown)
    later = render([*talk, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Sure?"}])
    assert "The city is Rome" not in later and CALL in later and "<tool_response>\ndry\n" in later


def test_a_thought_is_an_item_of_a_response() -> None:
    """Whole and in events; it may be sent back."""
    with running(thinker("It may.\n</think>\n\nYes.")) as up:
        create: Any = up.client().responses.create
        answer = create(model=NAME, input=QUESTION, temperature=0)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert answer.output[0].content[0].text == "It may." and answer.output_text == "Yes."
        events = create(model=NAME, input=[*QUESTION, *answer.output, *QUESTION], temperature=0, stream=True)
        told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert told == "It may."


def test_no_label_is_decided_inside_a_thought() -> None:
    with running(thinker("")) as up:
        asked: Any = {"model": NAME, "messages": QUESTION, "labels": ["yes", "no"]}
        status, answer = up.post(asked, "/v1/decide")
        assert status == 400 and "turn thinking off by chat_template_kwargs" in answer["error"]["message"]
        off = {"enable_thinking": False}
        status, answer = up.post(asked | {"chat_template_kwargs": off}, "/v1/decide")
        assert status == 200 and answer["usage"]["prompt_tokens"] == len(render(QUESTION, variables=off))
        status, answer = up.post(
            {"model": NAME, "input": "x", "labels": ["a"], "chat_template_kwargs": off}, "/v1/decide"
        )
        assert status == 400 and "chat_template_kwargs needs messages" in answer["error"]["message"]


def tokenizer() -> Tokenizer:
    """A byte-level BPE of the tiny model's size, which has Qwen's special tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=tiny.VOCAB, special_tokens=SPECIAL, show_progress=False)
    made.train_from_iterator([tiny.sample_text()], trainer)
    return made


def test_an_answer_ends_where_the_template_ends_a_turn() -> None:
    ours = tokenizer()
    assert turn_end(lambda talk: shown([dict(message) for message in talk]), ours) == ours.token_to_id("<|im_end|>")


@pytest.mark.slow
@pytest.mark.usefixtures("fp32")
def test_the_tiny_model_chats_with_thoughts_and_without(tmp_path: Path) -> None:
    """The answer to a conversation is what the model says after transformers' tokens of it."""
    checkpoint, folder = tiny_families.write_tiny("qwen3_5_text", tmp_path / "checkpoint"), tmp_path / "build"
    tokenizer().save(str(checkpoint / "tokenizer.json"))
    ends = [SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_start|>")]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    off = tmp_path / "off.jinja"
    off.write_text(OFF)
    programs = tmp_path / "programs"
    programs.mkdir()
    folder.mkdir()
    source = tiny.fetched(checkpoint, tmp_path / "source")
    changes: Any = {"context": 128, "topology": "auto", "head": {"slices": 1}}
    build_folder(build(source, programs, FORMS["fixed, host"], **changes), folder)
    (folder / "chat_template.jinja").write_text(templates.QWEN_3_5)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    theirs = transformers_of(tokenizer(), templates.QWEN_3_5)
    answers = []
    without = {"enable_thinking": False}
    ways: Any = ((None, {}, {}), (off, {}, without), (None, without, without))
    for file, given, more in ways:
        model = load_model(folder, None, "fp32", chat_template=file)
        assert set(model.eos) == {SPECIAL.index(name) for name in SPECIAL[1:]}
        assert ("enable_thinking" in model.template_variables) == (file is None)
        prompt: Any = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False, **more)
        with running(model) as up:
            asked: Any = {"model": model.name, "temperature": 0, "max_tokens": 12}
            body = {"chat_template_kwargs": given}
            said: Any = up.client().chat.completions.create(messages=QUESTION, extra_body=body, **asked)
            expected: Any = up.client().completions.create(prompt=prompt, **asked)
        assert said.usage.prompt_tokens == len(prompt)
        message = said.choices[0].message
        answers.append(message.content if more else message.reasoning_content)
        assert answers[-1] == (expected.choices[0].text if more else expected.choices[0].text.strip())
    assert answers[0] != answers[1] == answers[2]
