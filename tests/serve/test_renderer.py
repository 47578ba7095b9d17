"""A chat template that never ends, or takes all memory, costs its own request only."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import PATIENCE, wait_until

from shardmill.templates import render as serve_chat
from shardmill.templates.render import Renderer, RenderError

from .fake import byte_tokenizer, fake_model
from .running import ask, running

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
# A Mac limits no process: there time ends it, unless there is no address left.
TOO_LARGE = "it took more than 1 s|it needs too much memory" if sys.platform == "darwin" else "it needs too much memory"
MANY = "{% for i in range(99999) %}"
HOSTILE: dict[str, tuple[str, str]] = {  # what someone says -> what the template makes of it, and what is told
    "loop": (MANY * 3 + "{% endfor %}" * 3, "it took more than 1 s"),
    "count": ("{{ 10 ** (10 ** (messages[0].content|length + 3)) }}", "it took more than 1 s"),
    "grow": ("{{ messages[0].content * 10 ** 10 }}", TOO_LARGE),
    "talk": ("{{ messages[0].content * 10 ** 7 }}", "it wrote 40000004 characters, more than 16777216"),
    "refuse": ("{{ raise_exception('say more\\nplease') }}", "say more"),
}


@pytest.fixture(scope="module")
def render(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """A checkpoint's template that does this, and renders everything else as it should be."""
    folder = tmp_path_factory.mktemp("source")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    evil = "".join(
        "{% if messages[0].content == '" + said + f"' %}}{does}{{% endif %}}" for said, (does, _) in HOSTILE.items()
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": evil + "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Renderer(folder, None)


def test_the_process_has_no_pytorch(render: Renderer) -> None:
    """Which takes 180 MB, and no template needs it."""
    assert render(HELLO) == "hi" and render.pid is not None
    if Path(f"/proc/{render.pid}/maps").exists():  # only Linux tells
        assert "libtorch" not in Path(f"/proc/{render.pid}/maps").read_text()
    assert psutil.Process(render.pid).memory_info().rss < 150 << 20


@pytest.mark.parametrize("said", HOSTILE)
def test_what_costs_too_much_is_ended(render: Renderer, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """In one line that says why; and the next conversation is rendered."""
    assert render(HELLO) == "hi"
    ended_by_time = "1 s" in HOSTILE[said][1]
    monkeypatch.setattr(serve_chat, "SECONDS", 1.0 if ended_by_time else PATIENCE)
    with pytest.raises(RenderError, match=HOSTILE[said][1]) as caught:
        render([{"role": "user", "content": said}])
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(serve_chat, "SECONDS", PATIENCE)
    assert render(HELLO) == "hi"


def test_a_process_that_was_killed_is_started_again(render: Renderer) -> None:
    assert render._running is not None
    process, _ = render._running
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with pytest.raises(RenderError, match="its process ended"):
        render(HELLO)
    assert render(HELLO) == "hi"


@pytest.mark.thorough
def test_on_a_mac_nothing_that_has_threads_is_forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process begins anew there, also after one was ended."""
    monkeypatch.setattr(sys, "platform", "darwin")
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    render = Renderer(tmp_path, None)
    for _ in range(2):
        assert render(HELLO) == "hi"
        assert render._running is not None
        process, _ = render._running
        assert isinstance(process, multiprocessing.get_context("spawn").Process)
        assert parent_of(process.pid) == os.getpid()
        render._end()


def parent_of(process: int) -> int:
    """Which process has begun it."""
    return psutil.Process(process).ppid()


def test_a_tokenizer_that_can_not_be_loaded_is_told(tmp_path: Path) -> None:
    with pytest.raises(RenderError):
        Renderer(tmp_path, None)


def test_conversations_that_hang_hold_up_no_completion() -> None:
    """More of them than there are threads for all: the others are answered while they wait."""
    free = threading.Event()

    def hanging(messages: Any) -> str:
        assert free.wait(PATIENCE)
        return "hi"

    with running(replace(fake_model(), template=hanging)) as up:
        chat = {"model": "fake", "messages": HELLO, "max_tokens": 1}
        asked = [threading.Thread(target=up.post, args=(chat, "/v1/chat/completions")) for _ in range(48)]
        for thread in asked:
            thread.start()
        wait_until(lambda: sum(one.cycle is not None for one in [*up.server.server_state.connections]) == len(asked))  # type: ignore[union-attr]
        assert up.post(ask())[0] == 200
        assert not free.is_set()
        free.set()
        for thread in asked:
            thread.join()
        assert up.post(ask())[0] == 200


def test_what_is_known_of_a_template(tmp_path: Path) -> None:
    """Its text, and the variables that a request may set: not what transformers or the tokenizer gives it."""
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>"}
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    text = (
        "{%- set keep = keep | default(false) %}{{ bos_token }}"
        "{% if thinking is defined and thinking %}<think>{% endif %}"
        "{% set date = strftime_now('%d') %}{% for m in messages %}{% if not m %}{% continue %}{% endif %}"
        "{%- generation -%}{{ m.content }}{{ style }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "chat_template.jinja").write_text(text)
    render = Renderer(tmp_path, None)
    facts = render.facts()
    assert facts.variables == {"keep", "thinking", "style"} and facts.text == text and not facts.tools
    assert render(HELLO) == "<|end|>hi" and render(HELLO, variables={"style": "!"}) == "<|end|>hi!"
    assert render(HELLO, variables={"thinking": True, "keep": 1}) == "<|end|><think>hi"
    render._end()
    assert Renderer(tmp_path, "{% if %}").facts().variables == frozenset()
