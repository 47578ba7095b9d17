"""A format for runtimes without Jinja, proven equal to the checkpoint's template, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from shardmill.errors import CheckpointError
from shardmill.templates import chat_format as formats
from shardmill.templates.chat_format import chat_format
from shardmill.templates.derive import DAYS, Render, UnprovenError, derive
from shardmill.templates.form import ChatFormat, Clock
from shardmill.templates.render import RenderError, dated, has_template, own_template, rendered

from . import templates
from .fake import byte_tokenizer

IM_END = "<|im_end|>\n"


def renderer(template: str) -> Render:
    """A template rendered in this process."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())

    def render(talk: Sequence[Mapping[str, Any]], answers: bool, clock: Clock) -> str:
        with dated(clock):
            fine, text = rendered(tokenizer, [dict(message) for message in talk], template, answers)
        if not fine:
            raise RenderError(text)
        return text

    return render


def plain(template: str) -> ChatFormat:
    """The format of `chat`."""
    found, _ = derive(renderer(template), template)
    assert found is not None
    return found


def whole(template: str) -> ChatFormat:
    """The format of `conversation`."""
    _, found = derive(renderer(template), template)
    assert found is not None
    return found


def around(before: str, after: str, **strip: bool) -> dict[str, Any]:
    return {"before": before, "after": after, **strip}


LLAMA = {
    role: around(f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", strip=True)
    for role in ("system", "user", "assistant")
}
FOUND: dict[str, dict[str, Any]] = {
    templates.CHATML: {
        "begin": "",
        "system": around("<|im_start|>system\n", IM_END),
        "user": around("<|im_start|>user\n", IM_END),
        "assistant": around("<|im_start|>assistant\n", IM_END),
        "generate": "<|im_start|>assistant\n",
    },
    templates.HELPFUL: {
        "begin": "<|im_start|>system\n",
        "without_system": "You are helpful.<|im_end|>\n",
        "system": around("", IM_END),
        "user": around("<|im_start|>user\n", IM_END),
        "assistant": around("<|im_start|>assistant\n", IM_END),
        "generate": "<|im_start|>assistant\n",
    },
    templates.LLAMA: {"begin": "<|begin_of_text|>", **LLAMA, "generate": LLAMA["assistant"]["before"]},
    templates.GEMMA_2: {
        "begin": "<bos>",
        "user": around("<start_of_turn>user\n", "<end_of_turn>\n", strip=True),
        "assistant": around("<start_of_turn>model\n", "<end_of_turn>\n", strip=True),
        "generate": "<start_of_turn>model\n",
    },
    templates.GEMMA_4: {
        "begin": "<bos>",
        "system": around("<|turn>system\n", "<turn|>\n", strip=True),
        "user": around("<|turn>user\n", "<turn|>\n", strip=True),
        "assistant": around("<|turn>model\n", "<turn|>\n", strip=True),
        "generate": "<|turn>model\n",
    },
    templates.MISTRAL: {
        "begin": "<s>",
        "user": around("[INST] ", "[/INST]"),
        "assistant": around(" ", "</s>"),
        "generate": "",
    },
    templates.PHI_4: {
        "begin": "",
        "system": around("<|im_start|>system<|im_sep|>", "<|im_end|>"),
        "user": around("<|im_start|>user<|im_sep|>", "<|im_end|>"),
        "assistant": around("<|im_start|>assistant<|im_sep|>", "<|im_end|>"),
        "generate": "<|im_start|>assistant<|im_sep|>",
    },
}


@pytest.mark.parametrize("template", FOUND)
def test_the_format_of_usual_templates_is_found(template: str) -> None:
    assert plain(template).as_json() == FOUND[template]


@pytest.mark.parametrize("template", [templates.GEMMA_3, templates.PHI_3])
def test_where_a_message_s_surroundings_are_cut_does_not_matter(template: str) -> None:
    render, found = renderer(template), plain(template)
    assert found.system is not None
    talk = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": " one"},
        {"role": "assistant", "content": "two\n"},
        {"role": "user", "content": "three"},
    ]
    for said in (talk, talk[1:]):
        assert found.text(said) == render(said, True, DAYS[0].strftime)


def refuses(when: str) -> str:
    return "{% if " + when + " %}{{ raise_exception('no') }}{% endif %}" + templates.CHATML


UNPROVEN = {
    "something at random is written": (templates.CHATML + "{{ [1, 2] | random }}", "at random"),
    "something at random is quoted": ("{{ lipsum() }}" + templates.CHATML, "at random"),
    "the time is written": (templates.DATED.replace("%d", "%H"), "the date or the time in a way"),
    "every conversation is refused": ("{{ raise_exception('no') }}", "it refuses a plain conversation: no"),
    "empty messages are refused": (refuses("messages[0].content == ''"), "it changes or omits a message of the user"),
    "several turns are refused": (refuses("messages|length > 1"), "it refuses a plain conversation: no"),
    "nothing is written": ("hello", "a message is not written once"),
    "messages are written twice": (templates.CHATML * 2, "a message is not written once"),
    "other characters are stripped": (templates.CHATML.replace("m.content", "m.content.strip('p')"), "omits a message"),
    "long conversations are cut": (
        templates.CHATML.replace("in messages", "in messages[-9:]"),
        "it changes or omits a message",
    ),
    "the first question differs": (
        templates.CHATML.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}!{% endif %}").replace(
            "{% for m", "{% if messages|length > 2 %}again{% endif %}{% for m"
        ),
        "the first question or the last one depends",
    ),
    "a message is interpreted": (templates.CHATML.replace("m.content", "m.content|e"), "it changes or omits a message"),
}


@pytest.mark.parametrize("name", UNPROVEN)
def test_a_template_that_does_more_has_none(name: str) -> None:
    template, why = UNPROVEN[name]
    with pytest.raises(UnprovenError, match=why):
        derive(renderer(template), template)


def test_an_odd_system_message_costs_only_the_place_for_it() -> None:
    loud = templates.CHATML.replace("m.content", "(m.content|upper if m.role == 'system' else m.content)")
    found = plain(loud).as_json()
    assert found == {key: value for key, value in FOUND[templates.CHATML].items() if key != "system"}


THINK = {"begin": "<think>", "end": "</think>"}
LINES = {"ends": "start", "characters": "\n"}
EMPTY_IS_NONE = (  # as LFM2 has it
    "<s>{% if messages[0].role == 'system' %}{% if messages[0].content %}<|im_start|>system\n{{ messages[0].content }}"
    "<|im_end|>\n{% endif %}{% set messages = messages[1:] %}{% endif %}" + templates.CHATML
)
SWITCH = templates.CHATML.replace("{{ m.content }}", "{{ m.content.replace('/off', '') }}")
TOLD = {  # template -> the keys in which its whole format is not plain
    templates.THINKING: {
        "assistant": around("<|im_start|>assistant\n", IM_END)
        | {"strip": LINES, "cut": {"mark": "</think>", "strip": LINES}},
        "thoughts": THINK,
    },
    templates.DATED: {"dates": {"⟦%d %b %Y⟧": "%d %b %Y"}, "begin": "⟦%d %b %Y⟧<|begin_of_text|>", **LLAMA},
    EMPTY_IS_NONE: {"system": around("<|im_start|>system\n", IM_END) | {"skip_empty": True}, "begin": "<s>"},
    templates.CHATML.replace("m.content", "m.content.lstrip()"): {
        role: around(f"<|im_start|>{role}\n", IM_END) | {"strip": {"ends": "start"}}
        for role in ("system", "user", "assistant")
    },
    SWITCH: {
        role: around(f"<|im_start|>{role}\n", IM_END) | {"interprets": ["/off"]}
        for role in ("system", "user", "assistant")
    },
    templates.CHATML + "{# <think> #}": {"thoughts": THINK},
    templates.CHATML + "{# <|channel|> #}": {"channels": True},
}


@pytest.mark.parametrize("template", TOLD)
def test_what_a_plain_format_can_t_say_is_in_the_whole_one(template: str) -> None:
    found = whole(template).as_json()
    if template != templates.DATED:
        assert found == FOUND[templates.CHATML] | TOLD[template]
    assert found | TOLD[template] == found


@pytest.mark.parametrize("template", [templates.CHATML, templates.CHATML.replace("{{ m.c", "{{ m.thinking }}{{ m.c")])
def test_a_plain_template_has_no_second_format_nor_one_that_keeps_thoughts(template: str) -> None:
    found, more = derive(renderer(template), template)
    assert more is None and found is not None and found.as_json() == FOUND[templates.CHATML]


def test_dates_are_those_of_the_day() -> None:
    """But for messages, which may contain what stands for a date."""
    render, found = renderer(templates.DATED), whole(templates.DATED)
    talk = [{"role": "user", "content": "⟦%d %b %Y⟧"}]
    texts = {found.text(talk, day.strftime) for day in DAYS}
    assert texts == {render(talk, True, day.strftime) for day in DAYS} and len(texts) == len(DAYS)


def checkpoint(folder: Path, template: str, **more: str) -> Path:
    """A checkpoint's folder with a tokenizer and a template."""
    tokenizer: Tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, str] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_s_has_the_token_that_ends_an_answer(tmp_path: Path) -> None:
    assert chat_format(checkpoint(tmp_path, templates.CHATML)) == (
        {"chat": {**FOUND[templates.CHATML], "stop": [258]}},
        "",
    )


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], dict[str, Any]]:
    """What the process that runs a template finds, in this process, which must keep its memory."""
    monkeypatch.setattr(formats, "limit_memory", lambda: None)
    return formats._probed


def test_a_token_that_ends_an_answer_need_not_be_flagged(tmp_path: Path, probed: Callable[[Path], Any]) -> None:
    """Some checkpoints name it as eos_token only, and in no config of generation."""
    folder = checkpoint(tmp_path, templates.CHATML)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    for token in content["added_tokens"]:
        token["special"] = False
    file.write_text(json.dumps(content))
    found = probed(folder)
    assert (found["formats"], found["differs"]) == ({"chat": {**FOUND[templates.CHATML], "stop": [258]}}, "")


def test_a_template_in_chat_template_json_alone_is_read(tmp_path: Path, probed: Callable[[Path], Any]) -> None:
    """transformers reads this file for processors, and checkpoints with a vision part have no other."""
    folder = checkpoint(tmp_path, "")
    assert not has_template(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": templates.CHATML}))
    assert has_template(folder)
    assert probed(folder)["formats"]["chat"] == {**FOUND[templates.CHATML], "stop": [258]}
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert own_template(folder) is None  # transformers finds one


@pytest.mark.parametrize("template", [templates.CHATML, templates.DATED])
def test_other_tokens_of_a_conversation_than_transformers_are_told(
    tmp_path: Path, probed: Callable[[Path], Any], template: str
) -> None:
    """Also where the template has no format: a chat is served all the same."""
    folder = checkpoint(tmp_path, template, tokenizer_class="Qwen2Tokenizer")
    said = f"{folder / 'tokenizer.json'}: gives a text other tokens than transformers' Qwen2Tokenizer does (token "
    assert probed(folder)["differs"].startswith(said)


def test_a_checkpoint_with_other_tokens_than_transformers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = json.dumps({"formats": {}, "why": "", "differs": "token 1 is 2, not 3"})
    monkeypatch.setattr(formats, "MAIN", f"print({answer!r})")
    with pytest.raises(CheckpointError, match="token 1 is 2, not 3"):
        chat_format(tmp_path)


@pytest.mark.thorough
def test_a_damaged_checkpoint_has_none(tmp_path: Path) -> None:
    found, why = chat_format(tmp_path)
    assert not found and why and "\n" not in why


HOSTILE = {  # template -> why it has no format; a Mac limits no memory
    "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3: "its template needs too much time or memory",
    "{{ 'x' * 10 ** 10 }}": "too much",
}


@pytest.mark.thorough
@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_costs_seconds(tmp_path: Path, template: str) -> None:
    found, why = chat_format(checkpoint(tmp_path, template))
    assert not found and HOSTILE[template] in why
