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
from shardmill.templates.chat_format import UnprovenError, chat_format, derive
from shardmill.templates.render import RenderError, has_template, own_template, rendered

from . import templates
from .fake import byte_tokenizer

IM_END = "<|im_end|>\n"


def renderer(template: str) -> formats.Render:
    """A template rendered in this process."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer())

    def render(talk: Sequence[Mapping[str, Any]], answers: bool) -> str:
        fine, text = rendered(tokenizer, [dict(message) for message in talk], template, answers)
        if not fine:
            raise RenderError(text)
        return text

    return render


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
    assert derive(renderer(template)).as_json() == FOUND[template]


@pytest.mark.parametrize("template", [templates.GEMMA_3, templates.PHI_3])
def test_where_a_message_s_surroundings_are_cut_does_not_matter(template: str) -> None:
    render = renderer(template)
    found = derive(render)
    assert found.system is not None
    talk = [
        {"role": "system", "content": "Be brief. "},
        {"role": "user", "content": " one"},
        {"role": "assistant", "content": "two\n"},
        {"role": "user", "content": "three"},
    ]
    assert found.text(talk) == render(talk, True)
    assert found.text(talk[1:]) == render(talk[1:], True)


def refuses(when: str) -> str:
    return "{% if " + when + " %}{{ raise_exception('no') }}{% endif %}" + templates.CHATML


UNPROVEN = {
    "thoughts are left out": (templates.THINKING, "it changes or omits a message"),
    "every conversation is refused": ("{{ raise_exception('no') }}", "it refuses a plain conversation: no"),
    "empty messages are refused": (refuses("messages[0].content == ''"), "it refuses a plain conversation: no"),
    "several turns are refused": (refuses("messages|length > 1"), "it refuses a plain conversation: no"),
    "nothing is written": ("hello", "a message is not written once"),
    "messages are written twice": (templates.CHATML * 2, "a message is not written once"),
    "only the beginning is stripped": (templates.CHATML.replace("m.content", "m.content.lstrip()"), "omits a message"),
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
        derive(renderer(template))


def test_an_odd_system_message_costs_only_the_place_for_it() -> None:
    loud = templates.CHATML.replace("m.content", "(m.content|upper if m.role == 'system' else m.content)")
    found = derive(renderer(loud)).as_json()
    assert found == {key: value for key, value in FOUND[templates.CHATML].items() if key != "system"}


def checkpoint(folder: Path, template: str, **more: str) -> Path:
    """A checkpoint's folder with a tokenizer and a template."""
    tokenizer: Tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, str] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template} | more
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_checkpoint_s_has_the_token_that_ends_an_answer(tmp_path: Path) -> None:
    assert chat_format(checkpoint(tmp_path, templates.CHATML)) == ({**FOUND[templates.CHATML], "stop": [258]}, "")


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
    assert (found["chat"], found["differs"]) == ({**FOUND[templates.CHATML], "stop": [258]}, "")


def test_a_template_in_chat_template_json_alone_is_read(tmp_path: Path, probed: Callable[[Path], Any]) -> None:
    """transformers reads this file for processors, and checkpoints with a vision part have no other."""
    folder = checkpoint(tmp_path, "")
    assert not has_template(folder)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": templates.CHATML}))
    assert has_template(folder)
    assert probed(folder)["chat"] == {**FOUND[templates.CHATML], "stop": [258]}
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
    answer = json.dumps({"chat": None, "why": "", "differs": "token 1 is 2, not 3"})
    monkeypatch.setattr(formats, "MAIN", f"print({answer!r})")
    with pytest.raises(CheckpointError, match="token 1 is 2, not 3"):
        chat_format(tmp_path)


@pytest.mark.thorough
def test_what_differs_each_day_is_left_out(tmp_path: Path) -> None:
    assert chat_format(checkpoint(tmp_path, templates.DATED)) == (None, "it writes the date, or something at random")
    assert all(formats.CHANGING.search(f"{{{{ {text} }}}}") for text in ("[1, 2]|random", "[1] | random", "lipsum()"))


@pytest.mark.thorough
def test_a_damaged_checkpoint_has_none(tmp_path: Path) -> None:
    found, why = chat_format(tmp_path)
    assert found is None and why and "\n" not in why


HOSTILE = {  # template -> why it has no format; a Mac limits no memory
    "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3: "its template needs too much time or memory",
    "{{ 'x' * 10 ** 10 }}": "too much",
}


@pytest.mark.thorough
@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_costs_seconds(tmp_path: Path, template: str) -> None:
    found, why = chat_format(checkpoint(tmp_path, template))
    assert found is None and HOSTILE[template] in why
