"""A model that thinks before it answers and calls functions in XML, as Qwen3.5's template teaches it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from bench.folder import build_folder
from models import tiny_families
from program_forms import FORMS, build
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shardmill.serve.chat import rendered, turn_end
from shardmill.serve.model import load_model
from shardmill.serve.tools import find_format

from . import templates
from .fake import NAME, Answerer, byte_tokenizer, fake_model
from .running import running

SPECIAL = ["<|end|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OFF = "{% set enable_thinking = false %}" + templates.QWEN_3_5  # as a file for --chat-template says it
QUESTION: Any = [{"role": "user", "content": "Rain in Rome?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
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


def test_functions_are_called_and_thoughts_before_the_last_question_left_out() -> None:
    """With OpenAI's client: the calls of an answer, and the conversation that goes on from it."""
    form = find_format(templates.QWEN_3_5)
    assert form is not None and form.name == "qwen-xml"
    with running(fake_model(Answerer(SAID), tools=form.name)) as up:
        said: Any = {"model": NAME, "messages": QUESTION, "tools": [WEATHER], "temperature": 0}
        choice: Any = up.client().chat.completions.create(**said).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Rome", "days": 2}
    assert choice.message.content == "The city is Rome.\n</think>"
    function = {"name": "weather", "arguments": {"city": "Rome", "days": 2}}
    turn = {"role": "assistant", "content": choice.message.content, "tool_calls": [{"function": function}]}
    talk = [*QUESTION, turn, {"role": "tool", "content": "dry"}]
    assert f"<think>\nThe city is Rome.\n</think>\n\n{CALL}" in shown(talk, tools=[WEATHER])
    later = shown([*talk, {"role": "assistant", "content": "No."}, {"role": "user", "content": "Sure?"}])
    assert "The city is Rome" not in later and CALL in later and "<tool_response>\ndry\n" in later


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
    ways: Any = ((None, {}), (off, {"enable_thinking": False}))
    for file, more in ways:
        model = load_model(folder, None, "fp32", chat_template=file)
        assert set(model.eos) == {SPECIAL.index(name) for name in SPECIAL[1:]}
        prompt: Any = theirs.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False, **more)
        with running(model) as up:
            asked: Any = {"model": model.name, "temperature": 0, "max_tokens": 12}
            said: Any = up.client().chat.completions.create(messages=QUESTION, **asked)
            expected: Any = up.client().completions.create(prompt=prompt, **asked)
        assert said.usage.prompt_tokens == len(prompt)
        assert said.choices[0].message.content == expected.choices[0].text
        answers.append(said.choices[0].message.content)
    assert answers[0] != answers[1]
