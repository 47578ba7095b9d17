"""The page to chat with, in a real browser: conversations, hostile answers, servers that end, and who can read it."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from browser import CONTROL, SHIFT, Page, browser
from media.hostile import photo, saved
from numpy.typing import NDArray
from patience import PATIENCE, wait_until
from programs import skip_or_fail
from tokenizers import AddedToken, Tokenizer

from report import sample
from shardmill.report.page import render
from shardmill.runtime import label
from shardmill.serve import pages
from shardmill.serve.model import Settings

from .fake import END, Speaker, byte_tokenizer, fake_model, token_bytes
from .fake import NAME as FAKE
from .running import Running, running
from .test_encoder import running as encoding
from .test_images import seeing_model
from .test_process import process
from .test_warming import FIRST_PASSES, PROGRAMS, Served, Slow

NAME = 'a "quoted" <b>model\'s</b> `name`'
LONG = "".join(f"Line {i} of a long answer.\n\n" for i in range(4000))  # over 100,000 characters
SCRIPTS = (
    "<script>document.title = 'broken'</script>\n\n<img src=x onerror=\"document.title = 'broken'\">\n\n"
    "<a id=text name=log href=https://evil.example>x</a> <style>* { display: none }</style> "
    "[script](javascript:document.title='broken') [data](data:text/html,x) ![pixel](https://evil.example/pixel.png) "
    "[fine](https://fine.example/) <svg><a xlink:href='javascript:1'><math><iframe src=https://evil.example>"
)
BOMBS = {
    "quotes": ">" * 50_000 + " x",
    "brackets": "[" * 50_000,
    "stars": "*a **b " * 10_000,
    "lists": "".join(f"{'  ' * i}- x\n" for i in range(300)),
    "cells": f"{'|a' * 500}|\n{'|-' * 500}|\n" + "|b\n" * 600,  # HTML of 3 MB at once
    "strong": "**a" * 50_000,  # takes marked several seconds, and gives HTML that would do
    "ticks": "".join("`" * i + " " for i in range(400)),
}
SCRIPT = {
    "hello": ["**Bold**", " words, and\n\n", "```python\nprint(1)\n```\n", "\n| a | b |\n|---|---|\n| 1 | 2 |\n"],
    "scripts": [SCRIPTS],
    "long": [LONG[at : at + 2000] for at in range(0, len(LONG), 2000)],
    "think": ["<think>", "A quiet thought.", "</think>", "An answer."],
    "call": ['<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'],
    **{name: [text] for name, text in BOMBS.items()},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


class Actor(Speaker):
    """Answers each question of the script with its pieces, each of which is a token; to any other it speaks on."""

    def __init__(self) -> None:
        super().__init__(slots=600)
        self.pieces = [piece for pieces in SCRIPT.values() for piece in pieces]
        self.vocab = END + 1 + len(self.pieces)

    def _row(self, position: int) -> NDArray[np.float32]:
        tokens = [token for place, token in sorted(self._held.values()) if place <= position]
        said = "".join(chr(token_bytes().get(token, 0)) if token < END else chr(0x4000 + token) for token in tokens)
        before, _, answer = said.rpartition("assistant: ")
        pieces = SCRIPT.get(before.rpartition("user: ")[2].strip())
        row = np.zeros(self.vocab, np.float32)
        if pieces is None:
            row[:END] = super()._row(position)[:END]
            row[END:] = -np.inf
        else:
            row[self.number(pieces[len(answer)]) if len(answer) < len(pieces) else END] = 20
        return row

    def number(self, piece: str) -> int:
        return END + 1 + self.pieces.index(piece)

    @property
    def tokenizer(self) -> Tokenizer:
        made = Tokenizer.from_str(byte_tokenizer().to_str())
        made.add_tokens([AddedToken(piece, normalized=False) for piece in self.pieces])
        return made


@pytest.fixture(scope="module")
def actor() -> Actor:
    return Actor()


@pytest.fixture(scope="module")
def server(actor: Actor) -> Iterator[Running]:
    made = fake_model(actor, tools="hermes", thoughts="<think></think>")
    made = replace(made, name=NAME, tokenizer=actor.tokenizer, template_variables=frozenset({"enable_thinking"}))
    with running(made, Settings(port=0, drafter="none")) as up:
        yield up


PAGE = Path(pages.__file__).parent / "page" / "page.js"
(GIVES_UP,) = re.findall(r"const PATIENCE = (\d+);", PAGE.read_text())  # milliseconds for the Markdown of a text
PATIENT = f"""{{ const real = window.setTimeout;
window.setTimeout = (work, time) => real(work, time === {GIVES_UP} ? {int(1000 * PATIENCE)} : time); }}"""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A window whose pages give up no Markdown because this machine is slow."""
    with browser(tmp_path_factory.mktemp("browser")) as page:
        page.call("Page.addScriptToEvaluateOnNewDocument", source=PATIENT)
        yield page


@pytest.fixture
def page(window: Page) -> Iterator[Page]:
    """A window in which nothing may go wrong, and of which nothing may ask another server."""
    window.errors.clear()
    window.asked.clear()
    window.resize(900, 700)
    yield window
    assert window.errors == []
    known = r"^http://127\.0\.0\.1:\d+/.*|^data:(,|image/(png|jpeg);base64,.*)$|^about:blank$"
    assert {re.sub(known, "", one) for one in window.asked} <= {""}


def enter(page: Page, server: Running, *, fresh: bool = True) -> None:
    """Open a server's page, without what an earlier test left there."""
    if fresh:
        page.open(f"http://127.0.0.1:{server.port}/docs")
        page.evaluate("localStorage.clear(), sessionStorage.clear()")
    page.open(f"http://127.0.0.1:{server.port}/")
    page.wait("!document.querySelector('#ask').hidden")


def ask(page: Page, text: str, *, ended: bool = True) -> None:
    """Send a text by the keyboard, and wait for the end of its answer."""
    page.evaluate("document.querySelector('#text').focus()")
    page.type(text)
    page.press("Enter")
    if ended:
        page.wait("document.querySelector('#stop').hidden && document.querySelector('article:last-child footer *')")


def choose(page: Page, **settings: str) -> None:
    """Fill in fields of the settings."""
    for name, value in settings.items():
        page.evaluate(f"document.querySelector('#settings').elements.{name}.value = {json.dumps(value)}")
    page.evaluate("document.querySelector('#settings').dispatchEvent(new Event('input')), 0")


def drawn(page: Page) -> str:
    """The newest answer, once its Markdown is drawn."""
    page.wait("document.querySelector('article:last-child .text')?.children.length")
    return page.text("article:last-child .text")


def test_a_conversation_and_why_it_was_fast_survive_a_reload(page: Page, server: Running) -> None:
    enter(page, server)
    assert page.text("h1") == NAME == page.evaluate("document.title")
    ask(page, "hello")
    drawn(page)
    page.wait("document.querySelector('article:last-child td')")
    assert page.text(".assistant strong") == "Bold" and page.text(".assistant pre").strip() == "print(1)"
    took = page.text(".assistant .took")
    expected = r"[\d.]+ tokens/s · no drafts · scripted engine · 5 tokens · [\d.]+ s for the \d+ before them"
    assert re.fullmatch(expected, took)
    ask(page, "hello")
    assert page.evaluate("document.querySelectorAll('article').length") == 4
    assert re.search(r", of which \d+ were kept$", page.text("article:last-child .took"))
    page.evaluate("document.querySelector('#text').focus()")
    page.type("unsent")
    enter(page, server, fresh=False)
    drawn(page)
    assert page.evaluate("document.querySelectorAll('article').length") == 4
    assert page.evaluate("document.querySelector('#text').value") == "unsent"
    page.click("#new")
    page.wait("!document.querySelector('article')")
    enter(page, server, fresh=False)
    assert page.text("main").startswith("Enter sends")


@pytest.fixture(scope="module")
def seeing() -> Iterator[Running]:
    with running(seeing_model(), Settings(port=0, drafter="none")) as up:
        yield up


def drop(page: Page, *files: Path) -> None:
    """Drag files over the page and let them go, as a person does."""
    dragged = {"items": [], "files": [str(file) for file in files], "dragOperationsMask": 1}
    for step in ("dragEnter", "dragOver", "drop"):
        page.call("Input.dispatchDragEvent", type=step, x=300, y=300, data=dragged)


def paste(page: Page, content: bytes, kind: str) -> None:
    inside = json.dumps(base64.b64encode(content).decode())
    page.evaluate(
        f"""(() => {{
        const bytes = Uint8Array.from(atob({inside}), (one) => one.charCodeAt());
        const data = new DataTransfer();
        data.items.add(new File([bytes], 'pasted', {{type: {json.dumps(kind)}}}));
        const event = new ClipboardEvent('paste', {{clipboardData: data, bubbles: true, cancelable: true}});
        document.querySelector('#text').dispatchEvent(event);
        }})()"""
    )


def told(server: Running, messages: Any) -> str:
    """What a client gets to messages."""
    settings: Any = {"model": FAKE, "temperature": 0, "max_tokens": 12}
    return server.client().chat.completions.create(messages=messages, **settings).choices[0].message.content or ""


SHOWN = "document.querySelectorAll('#waiting img').length"
ALL_SHOWN = "[...document.images].every((one) => one.naturalWidth > 0)"


def test_images_are_dropped_and_pasted_and_the_answer_is_theirs(page: Page, seeing: Running, tmp_path: Path) -> None:
    """The answer is what a client of the same messages gets; a reload keeps them."""
    first, second = tmp_path / "first.png", saved(photo(32, 48), "JPEG")
    first.write_bytes(saved(photo(48, 32), "PNG"))
    enter(page, seeing)
    choose(page, temperature="0", max_tokens="12")
    drop(page, first)
    page.wait(f"{SHOWN} === 1")
    paste(page, second, "image/jpeg")
    page.wait(f"{SHOWN} === 2 && {ALL_SHOWN}")
    paste(page, second, "image/jpeg")
    page.wait(f"{SHOWN} === 3")
    page.click("#waiting button:last-child")
    page.wait(f"{SHOWN} === 2")
    ask(page, "what is this?")
    assert page.evaluate(SHOWN) == 0 and page.evaluate("document.querySelectorAll('.user img').length") == 2
    assert re.search(r" before them · 12 of images", page.text(".took"))
    contents = [("png", first.read_bytes()), ("jpeg", second)]
    urls = [f"data:image/{kind};base64,{base64.b64encode(content).decode()}" for kind, content in contents]
    parts: Any = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    asked: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is this?"}]}]
    wanted = told(seeing, asked)
    said = "JSON.parse(localStorage.getItem(Object.keys(localStorage)[0])).messages[1].content"
    assert page.evaluate(said) == wanted
    enter(page, seeing, fresh=False)
    page.wait(f"document.querySelectorAll('.user img').length === 2 && {ALL_SHOWN}")
    ask(page, "and now?")
    asked += [{"role": "assistant", "content": wanted}, {"role": "user", "content": "and now?"}]
    assert page.evaluate(said.replace("[1]", "[3]")) == told(seeing, asked)


def test_what_is_no_image_is_told(page: Page, seeing: Running, server: Running, tmp_path: Path) -> None:
    """And dropping it does not leave the page."""
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "a.png").write_bytes(saved(photo(48, 32), "PNG"))
    (tmp_path / "b.png").write_bytes(b"no image")
    enter(page, seeing)
    drop(page, tmp_path / "text.txt")
    page.wait("document.querySelector('#status').innerText === 'Only PNG, JPEG, WebP and GIF images can be sent.'")
    drop(page, *[tmp_path / "a.png"] * 4)
    page.wait("document.querySelector('#status').innerText.startsWith('A conversation may have 3 images')")
    drop(page, tmp_path / "b.png")
    page.wait(f"{SHOWN} === 1")
    ask(page, "what is this?")
    assert "the picture is in no known format" in page.text(".wrong")
    page.errors.clear()  # the browser names the image that it can't show, and the server's 400
    enter(page, server)
    assert page.evaluate("document.querySelector('#add').hidden")
    drop(page, tmp_path / "a.png")
    page.wait("document.querySelector('#status').innerText === 'This model takes no images.'")


def test_an_answer_is_stopped_and_had_anew(page: Page, server: Running, actor: Actor) -> None:
    enter(page, server)
    actor.delay = 0.01
    ask(page, "speak on", ended=False)
    page.wait("document.querySelector('article:last-child .text')?.innerText.length > 5")
    page.press("Escape")
    page.wait("document.querySelector('.wrong')")
    actor.delay = 0
    assert page.text(".wrong") == "Stopped." == page.text("#status") and not page.text(".took")
    wait_until(lambda: server.metric('shardmill_requests_total{endpoint="/v1/chat/completions",status="200"}') >= 1)
    page.click("#retry")
    page.wait("document.querySelector('article:last-child .took')")
    assert not page.text(".wrong") and page.evaluate("document.querySelectorAll('article').length") == 2
    assert "ended, as the context is full" in page.text(".took")


def test_settings_reach_the_model_and_survive_a_reload(page: Page, server: Running) -> None:
    enter(page, server)
    choose(page, system="Be brief.", temperature="0", max_tokens="7", drafter="ngram", thinking="false")
    enter(page, server, fresh=False)
    page.evaluate("window.sent = fetch, fetch = (path, what) => (window.body = what?.body, window.sent(path, what)), 0")
    page.evaluate("document.querySelector('#text').focus()")
    page.type("one")
    page.press("Enter", SHIFT)
    page.type("two")
    page.press("Enter")
    page.wait("window.body")
    sent = json.loads(page.evaluate("window.body"))
    assert sent["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}]
    assert (sent["temperature"], sent["max_tokens"], sent["model"]) == (0, 7, NAME)
    assert sent["shardmill"]["drafter"] == "ngram" and sent["chat_template_kwargs"] == {"enable_thinking": False}
    page.wait("document.querySelector('.wrong')")
    assert "the chat template refused the messages" in page.text(".wrong")  # the tests' has no such variable
    assert "400" in page.errors.pop()


@pytest.mark.thorough(but=["scripts", "ticks", "long"])
@pytest.mark.parametrize("question", [*BOMBS, "scripts", "long"])
def test_a_hostile_answer_is_only_shown(page: Page, server: Running, question: str) -> None:
    """Streamed, and once more from what a reload keeps; the page goes on answering."""
    enter(page, server)
    ask(page, question)
    for fresh in (True, False):
        shown = drawn(page)
        page.wait("document.querySelector('article:last-child .text').innerText.length > 0")
        assert page.evaluate("document.title") == NAME
        harmful = "script, style, svg, math, iframe, img, [onerror], [name], [src], main [style], article [id]"
        assert page.evaluate(f"document.querySelectorAll('article :is({harmful})').length") == 0
        links = page.evaluate("[...document.querySelectorAll('article a')].map((one) => [one.href, one.rel])")
        assert [one for one in links if one != ["https://fine.example/", "noopener noreferrer"]] == (
            [["", "noopener noreferrer"]] * 2 if question == "scripts" else []
        )
        given_up = page.evaluate("document.querySelector('article:last-child .text > .plain') !== null")
        assert given_up == (question in ("quotes", "cells"))  # nested too deeply, and too much HTML
        if question == "scripts":
            assert "<script>document.title" in shown and "![pixel](https://evil.example/pixel.png)" in shown
        if question == "long":
            page.wait("document.querySelector('article:last-child .text').innerText.includes('Line 3999 of')")
        if fresh:
            enter(page, server, fresh=False)
    ask(page, "hello")
    page.wait("document.querySelector('article:last-child td')")


def test_markdown_that_takes_for_ever_is_given_up(page: Page, server: Running) -> None:
    """The text is shown as it is, and the next answer is drawn by another worker."""
    enter(page, server)
    page.evaluate("window.Working = Worker, window.Worker = class { postMessage() {} terminate() {} }, 0")
    soon = f"(work, time) => wait(work, time === {GIVES_UP} ? 10 : time)"
    page.evaluate(f"window.wait = setTimeout, window.setTimeout = {soon}, 0")
    ask(page, "hello")
    page.wait("document.querySelector('article:last-child .text > .plain')?.innerText.includes('| 1 | 2 |')")
    assert page.text("article:last-child .text").startswith("**Bold** words")
    page.evaluate("window.Worker = Working, window.setTimeout = wait, 0")
    ask(page, "hello")
    page.wait("document.querySelector('article:last-child td')")


def test_a_thought_is_folded_and_calls_are_text(page: Page, server: Running) -> None:
    """The next text is the result of the call."""
    enter(page, server)
    ask(page, "think")
    assert drawn(page) == "An answer." and page.text("summary") == "Thought"
    assert not page.evaluate("document.querySelector('details').open")
    page.click("summary")
    assert "A quiet thought." in page.text("details")
    choose(page, tools=json.dumps(TOOLS))
    ask(page, "call")
    assert page.text("pre.call") == 'weather({"city": "Rome"})'
    assert page.text("#asked") == 'Result of weather({"city": "Rome"})' and page.evaluate(
        "document.querySelector('#retry').hidden"
    )
    page.evaluate("window.sent = fetch, fetch = (path, what) => (window.body = what?.body, window.sent(path, what)), 0")
    page.type("sunny")
    page.press("Enter")
    page.wait("window.body && document.querySelector('article:last-child footer *')")
    *_, question, called, result = json.loads(page.evaluate("window.body"))["messages"]
    assert question == {"role": "user", "content": "call"} and called["content"] is None
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": called["tool_calls"][0]["id"]}
    assert page.text("#asked") == "Message"


def test_a_server_that_ends_in_the_middle_is_told_and_asked_again(page: Page) -> None:
    with process(0.001, "--port", "0", passes=40) as (server, base):
        port = int(base.rpartition(":")[2].removesuffix("/v1"))
        up: Any = Running(port, None, None)  # type: ignore[arg-type]
        enter(page, up)
        choose(page, temperature="0")  # it would end some texts soon
        ask(page, "speak", ended=False)
        page.wait("document.querySelector('article:last-child .text')?.innerText.length > 5")
        os.kill(server.pid, signal.SIGKILL)
        page.wait("document.querySelector('.wrong')")
        assert page.text(".wrong") == "The server ended before its answer did." == page.text("#status")
        before = page.text("article:last-child .text")
        page.click("#retry")
        page.wait("document.querySelector('.wrong')?.innerText.includes('reached')")
        assert before and page.text(".wrong") == "The server can’t be reached. Start it again, then retry."
    with running(fake_model(), Settings(port=port)):
        page.click("#retry")
        page.wait("document.querySelector('.took')")
        assert page.evaluate("document.querySelectorAll('article').length") == 2 and not page.text(".wrong")
    assert all("Failed to load resource" in one for one in page.errors)
    page.errors.clear()


def test_a_key_is_asked_for_and_kept_for_the_tab(page: Page) -> None:
    with running(fake_model(), Settings(port=0, api_key="secret")) as up:
        page.open(f"http://127.0.0.1:{up.port}/")
        for given, right in (("wrong", False), ("secret", True)):
            page.wait("!document.querySelector('#lock').hidden")
            assert page.evaluate("document.querySelector('#ask').hidden")
            page.evaluate("document.querySelector('#key').value = '', document.querySelector('#key').focus(), 0")
            page.type(given)
            page.press("Enter")
            page.wait(f"document.querySelector('{'#ask' if right else '#lock'}').hidden === false")
        ask(page, "hello")
        enter(page, up, fresh=False)
        assert page.evaluate("document.querySelector('#lock').hidden")
        assert page.evaluate("localStorage.getItem('key')") is None
    assert page.errors and all("401" in one for one in page.errors)
    page.errors.clear()


def test_gates_that_have_not_passed_and_the_check_are_shown(page: Page) -> None:
    missed = "residency head_0: ineligible is <b>4</b>"
    with running(replace(fake_model(), checked="right"), Settings(port=0, ungated=(missed,))) as up:
        enter(page, up)
        assert page.text("#ungated") == missed
        assert page.text("#engine") == "scripted engine · 256 tokens of context · right"


def test_a_base_model_continues_a_text_on_a_pad(page: Page) -> None:
    with running(fake_model(chat=False)) as up:
        enter(page, up)
        assert not page.evaluate("document.querySelector('.pad #text').value")
        page.type("Once upon a time")
        page.press("Enter")  # begins a line
        page.press("Enter", CONTROL)
        page.wait("document.querySelector('.took')")
        expected = up.client().completions.create(
            model="fake", prompt="Once upon a time\n", max_tokens=128, temperature=0
        )
        shown = page.evaluate("document.querySelector('#text').value")
        assert shown == "Once upon a time\n" + expected.choices[0].text
        assert re.search(r" 128 tokens · .* 17 before them · ended at the most tokens$", page.text(".took"))
        page.click("#retry")
        page.wait("document.querySelector('#stop').hidden")
        assert page.evaluate("document.querySelector('#text').value") == shown  # greedy
        enter(page, up, fresh=False)
        assert page.evaluate("document.querySelector('#text').value") == shown and page.text(".took")


READ = "Anna 🎉 lives\n in Rome."
SPANS = (label.Span(0, 4, "name", 0.91), label.Span(5, 6, "sign", 0.5), label.Span(17, 21, "city", 0.875))


@pytest.mark.parametrize(
    ("task", "text", "shown"),
    [
        ("token-classification", READ, "Anna name 0.91 🎉 sign 0.50 lives\n in Rome city 0.88."),
        ("text-classification", READ, "0.750 good\n0.250 bad"),
        ("feature-extraction", "a\n\nb\nc", "0.600 b\n-1.000 c"),
        ("text-ranking", "a\nb\nc", "0.800 c\n0.300 b"),
    ],
)
def test_what_an_encoder_finds_is_drawn(
    page: Page, monkeypatch: pytest.MonkeyPatch, task: str, text: str, shown: str
) -> None:
    """Spans at their characters, of which some are two for JavaScript."""
    found = {
        "label_all": lambda _, texts: [label.Labelled(SPANS, 9, 1, True) for _ in texts],
        "classify": lambda _, texts: [SimpleNamespace(labels={"good": 0.75, "bad": 0.25}, tokens=9) for _ in texts],
        "embed": lambda _, texts, dimensions: [np.array(v) for v in ([1, 0], [0.6, 0.8], [-1, 0])][: len(texts)],
        "rank": lambda _, query, texts, instruction: [SimpleNamespace(score=s, tokens=3) for s in (0.3, 0.8)],
    }
    for name, function in found.items():
        monkeypatch.setattr(f"shardmill.serve.encoder.{name}", function)
    encoder: Any = SimpleNamespace(manifest={"model": "tiny", "task": task, "vocab": 257}, threads=None)
    with encoding(label.Reader(encoder, byte_tokenizer())) as up:
        enter(page, up)
        page.evaluate("document.querySelector('#text').focus()")
        page.type(text)
        page.press("Enter", CONTROL)
        for fresh in (True, False):
            page.wait("document.querySelector('#log .took')")
            assert page.text("#log").rpartition("\n")[0].strip() == shown
            assert re.fullmatch(r"\d+ tokens in [\d.]+ s · portable engine", page.text("#log .took"))
            if fresh:
                enter(page, up, fresh=False)


def test_all_of_it_is_reached_by_keys(page: Page, server: Running) -> None:
    """In the order in which it is seen, each with a mark of where the focus is."""
    enter(page, server)
    ask(page, "hello")
    drawn(page)
    page.wait("document.querySelector('article td')")
    reached = []
    for _ in range(12):
        page.press("Tab")
        reached.append(
            page.evaluate("document.activeElement.id || document.activeElement.name || document.activeElement.tagName")
        )
    assert reached[reached.index("unfold") :][:5] == ["unfold", "new", "PRE", "text", "retry"]
    page.evaluate("document.querySelector('#unfold').focus()")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("Enter")
    assert page.evaluate("document.querySelector('#unfold').getAttribute('aria-expanded')") == "true"
    page.press("Tab")
    page.press("Tab")
    assert page.evaluate("document.activeElement.tagName") == "TEXTAREA"


AXE = "SHARDMILL_AXE"  # folder with axe.min.js, which `python tools/vendor.py --axe FOLDER` fetches


@pytest.fixture(scope="module")
def axe() -> str:
    file = Path(os.environ.get(AXE, "/nowhere")) / "axe.min.js"
    if not file.is_file():
        skip_or_fail(f"{AXE} names no folder with axe.min.js (python tools/vendor.py --axe FOLDER)")
    return file.read_text()


def violations(page: Page, axe: str) -> list[str]:
    page.evaluate(f"{axe}; 0")
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]} {one['nodes'][0]['failureSummary']}" for one in found]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [(390, 844), (1280, 800)])
def test_axe_finds_nothing_wrong(page: Page, server: Running, axe: str, size: tuple[int, int], dark: bool) -> None:
    """On a phone and a desktop, light and dark: on a conversation with all that it may show, and on the addresses."""
    page.resize(*size, dark=dark)
    enter(page, server)
    choose(page, tools=json.dumps(TOOLS))
    for question in ("hello", "think", "call"):
        ask(page, question)
    choose(page, tools="no JSON")
    page.click("#unfold")
    page.evaluate("document.querySelector('#text').focus()")
    page.type("sunny")
    page.press("Enter")
    page.wait("document.querySelector('.wrong')")
    page.wait("document.querySelector('article td')")
    assert violations(page, axe) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.open(f"http://127.0.0.1:{server.port}/docs")
    assert violations(page, axe) == []


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing_wrong_with_a_report(window: Page, axe: str, tmp_path: Path, dark: bool) -> None:
    (tmp_path / "report.html").write_text(render(sample.build()), encoding="utf-8")
    window.resize(1280, 800, dark=dark)
    window.open((tmp_path / "report.html").as_uri())
    assert violations(window, axe) == []


def test_a_loading_server_has_the_page_already(page: Page) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    slow = Slow()
    up: Any = Served(slow, port)
    page.open(f"http://127.0.0.1:{port}/")
    for place, (name, gate) in enumerate(zip((*PROGRAMS, FIRST_PASSES), slow.gates, strict=True), 1):
        told = f"loading {name}, {min(place, 3)} of 3"
        page.wait(f"document.querySelector('#engine').innerText === {json.dumps(told)}")
        gate.set()
    page.wait("!document.querySelector('#ask').hidden")
    assert up.said and all("503" in one for one in page.errors)
    page.errors.clear()
