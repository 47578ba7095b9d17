"""`shardmill serve` and `shardmill chat` over something that looks like a built model."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from drafted_decoding import DecodeError, GenerationResult, Sampling, Session, create_drafter
from manifests import manifest
from patience import PATIENCE
from typer.testing import CliRunner, Result

from shardmill import cli
from shardmill.commands import chat as chat_command
from shardmill.errors import ShardmillError
from shardmill.runtime import process
from shardmill.serve import server
from shardmill.serve.conversation import Conversation, Talk
from shardmill.serve.engine_worker import Worker
from shardmill.serve.metrics import Metrics
from shardmill.serve.model import Settings, load_model
from shardmill.serve.protocol import ApiError
from shardmill.serve.tool_reader import AnswerDelta
from shardmill.templates.render import load_template

from .fake import END, NAME, Answerer, Speaker, byte_tokenizer, fake_model

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """model.json, a tokenizer, and an engine that speaks."""
    source = tmp_path / "source"
    source.mkdir()
    byte_tokenizer().save(str(source / "tokenizer.json"))
    configure(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps(manifest(model=NAME, eos_token_ids=[END])))
    monkeypatch.setattr(process, "load_engine", lambda *_: Speaker(slots=512))
    return tmp_path


def configure(build: Path, **more: Any) -> None:
    """Writes tokenizer_config.json."""
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", **more}
    (build / "source/tokenizer_config.json").write_text(json.dumps(content))


def shardmill(*arguments: object, keys: str | None = None) -> Result:
    return CliRunner().invoke(cli.app, [str(a) for a in arguments], input=keys)


def test_a_build_becomes_a_model(build: Path) -> None:
    """Name, end tokens and the template of the checkpoint, rendered by transformers."""
    assert load_model(build, None, "fp32").template is None
    configure(build, chat_template=TEMPLATE)
    model = load_model(build, None, "fp32")
    assert (model.name, model.eos) == (NAME, (END,)) and len(model.fingerprint) == 64
    assert model.template is not None
    assert model.template([{"role": "user", "content": "hi"}]) == "[user]hi\n[a]"


def test_a_template_may_have_a_file_of_its_own(build: Path) -> None:
    """chat_template.jinja, as newer checkpoints have it."""
    (build / "source/chat_template.jinja").write_text("{{ messages[0].content }}!")
    render = load_template(build / "source")
    assert render is not None and render([{"role": "user", "content": "hi"}]) == "hi!"


def test_a_chosen_template_is_no_json(build: Path, tmp_path: Path) -> None:
    """Such as a checkpoint's chat_template.json, whose braces and quotes would be text of every prompt."""
    chosen = tmp_path / "chosen.json"
    chosen.write_text(json.dumps({"chat_template": "{{ messages[0].content }}?"}))
    with pytest.raises(ShardmillError, match=r"chosen\.json holds JSON; give a file with the template alone"):
        load_model(build, None, "fp32", chat_template=chosen)


def test_another_template_may_be_chosen(build: Path, tmp_path: Path) -> None:
    """For a checkpoint that has none, or not the wanted one."""
    configure(build, chat_template=TEMPLATE)
    chosen = tmp_path / "chosen.jinja"
    chosen.write_text("{{ messages[0].content }}?")
    model = load_model(build, None, "fp32", chat_template=chosen)
    assert model.template is not None and model.template([{"role": "user", "content": "hi"}]) == "hi?"


@pytest.mark.parametrize("text", [b"{% for x", b"{{ raise_exception('no') }}", b"\xff"])
def test_what_is_no_template_is_named(build: Path, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "chosen.jinja").write_bytes(text)
    with pytest.raises(ShardmillError, match=r"chosen\.jinja (is no chat template|can't be read): .+") as caught:
        load_model(build, None, "fp32", chat_template=tmp_path / "chosen.jinja")
    assert "\n" not in str(caught.value)


ENDS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ '<|end|>\n' if m.role == 'assistant' }}{% endfor %}"


CHANNELS = ENDS + "{# <|channel|> #}"  # a message ends with the token, and an answer has several


@pytest.mark.parametrize(("template", "eos"), [(ENDS, (0, END)), (TEMPLATE, (0,)), (CHANNELS, (0,))])
def test_an_answer_ends_where_the_template_ends_it(build: Path, template: str, eos: tuple[int, ...]) -> None:
    """Though the checkpoint names another token only."""
    (build / "model.json").write_text(json.dumps(manifest(model=NAME, eos_token_ids=[0])))
    configure(build, chat_template=template)
    assert load_model(build, None, "fp32").eos == eos


def test_a_damaged_tokenizer_config_is_named(build: Path) -> None:
    """One line, not a traceback."""
    (build / "source/tokenizer_config.json").write_text("{")
    with pytest.raises(ShardmillError, match=r"tokenizer_config\.json is damaged"):
        load_template(build / "source")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--drafter", "magic"), "no drafter is called 'magic'"),
        (("--drafter", "draft_model"), "--draft-build"),
        (
            ("--draft-table", "/no/such/folder/table"),
            "--draft-table /no/such/folder/table: /no/such/folder is no folder",
        ),
        (("--draft-table", "/dev/null/table"), "/dev/null is no folder"),
        (("--system-prompt", "/no/such/file"), "--system-prompt /no/such/file: can't be read: "),
        (("--system-prompt", "/dev/null"), "--system-prompt /dev/null: "),
        (("--system-prompt", __file__, "--prefix-cache-bytes", "0"), "--system-prompt needs --prefix-cache-bytes"),
        (("--host", "no.such.host.invalid"), "can't listen at no.such.host.invalid:8000"),
        (("--allowed-host", "a.example", "--allowed-host", "https://b.example"), "--allowed-host https://b.example: "),
        (("--allowed-host", "a.example:443"), "give the name alone, without scheme, port and path"),
        (("--allowed-host", ""), "--allowed-host : give the name alone"),
        (("--allowed-origin", "localhost:3000"), "--allowed-origin localhost:3000: give scheme, name and port alone"),
        (("--allowed-origin", "https://a.example/page"), "give scheme, name and port alone"),
        (("--allowed-origin", "*"), "give scheme, name and port alone"),
        (("--allowed-host", "a.example", "--host", "0.0.0.0"), "a server at 0.0.0.0 answers to every name"),
    ],
)
def test_serve_fails_in_one_line(build: Path, options: tuple[str, ...], says: str) -> None:
    """Exit code 1 before a model is loaded."""
    result = shardmill("serve", build, *options)
    assert result.exit_code == 1 and says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--drafter", "ngram"),
        ("--draft-build", "/no/such/build"),
        ("--policy", "always"),
        ("--draft-table", "/no/such/folder/table"),
        ("--context-policy", "slide"),
        ("--chat-template", __file__),
        ("--prefix-cache-bytes", "1"),
        ("--system-prompt", __file__),
        ("--max-prompt-tokens", "9"),
        ("--max-tokens", "9"),
        ("--guard-margin", "0.1"),
    ],
)
def test_an_option_without_effect_on_an_encoder_is_refused(
    build: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str
) -> None:
    """In one line, instead of what a user would wait for in vain; the value of the default is refused too."""
    started: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda load, settings, *_: started.append(settings))
    (build / "model.json").write_text(json.dumps({"buckets": {}}))
    result = shardmill("serve", build, option, value)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and not started
    assert f"{option}: {build} is an encoder's, which generates no text" in result.stderr
    served = ("--host", "127.0.0.1", "--port", 0, "--api-key", "k", "--allowed-host", "a", "--queue", 3)
    result = shardmill("serve", build, *served, "--max-body-bytes", 9, "--grace-seconds", 1, "--precision", "fp16")
    assert result.exit_code == 0 and started[0].limits.body_bytes == 9


def test_a_grace_that_is_no_number_of_seconds_is_refused(build: Path) -> None:
    for seconds in ("inf", "nan", "1e9"):
        result = shardmill("serve", build, "--grace-seconds", seconds)
        assert result.exit_code == 2 and "--grace-seconds" in result.stderr


def test_a_draft_table_in_a_folder_that_may_not_be_written_is_told_at_the_start(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end it would be lost. As root everything may be written."""
    monkeypatch.setattr("shardmill.commands.serve.os.access", lambda *_: False)
    result = shardmill("serve", build, "--draft-table", tmp_path / "table")
    assert result.exit_code == 1 and f"{tmp_path} may not be written to" in result.stderr


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("k\n", None),
        (" k ", None),
        ("\n", "is empty"),
        ("a b", "white space"),
        ("a\nb", "white space"),
        ("ключ", "ASCII"),
    ],
)
def test_an_api_key_that_no_client_can_send_is_told(
    build: Path, monkeypatch: pytest.MonkeyPatch, key: str, says: str | None
) -> None:
    """A file's line break is no part of it."""
    started: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda load, settings, *_: started.append(settings))
    monkeypatch.setenv("SHARDMILL_API_KEY", key)
    result = shardmill("serve", build)
    if says is None:
        assert result.exit_code == 0 and started[0].api_key == "k"
    else:
        assert result.exit_code == 1 and says in result.stderr and result.stderr.count("\n") == 1 and not started


def test_allowed_hosts_reach_the_server_and_ask_for_a_key(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches the proxy reaches the server."""
    started: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda load, settings, *_: started.append(settings))
    result = shardmill("serve", build, "--allowed-host", "a.example", "--allowed-host", "b.example")
    assert result.exit_code == 0 and started[0].allowed_hosts == ("a.example", "b.example")
    assert "anyone who reaches a.example, b.example may use this server" in result.stderr
    monkeypatch.setenv("SHARDMILL_API_KEY", "k")
    assert shardmill("serve", build, "--allowed-host", "a.example").stderr == ""


def test_a_draft_model_of_another_vocabulary_is_told_at_the_start() -> None:
    """Not to every client that asks for it."""
    other = Speaker()
    other.vocab = 300
    with pytest.raises(DecodeError, match="the draft model has 300 tokens, the model 257"):
        Worker(replace(fake_model(), draft_session=Session(other)), Metrics(), queue=1)


def test_chat_without_a_template_continues_the_text(build: Path) -> None:
    """It says so, goes on where it stopped, and starts over on request."""
    result = shardmill("chat", build, "--max-new-tokens", 12, keys="Once\nmore\n/new\nOnce\n/exit\nnever read\n")
    assert result.exit_code == 0
    assert "no chat template" in result.stdout
    turns = result.stdout.split("> ")[1:]
    assert turns[0] != turns[1] and turns[0].split("[12")[0] == turns[3].split("[12")[0]
    assert len(turns) == 5 and turns[0].count("[12 tokens") == 1


@pytest.mark.parametrize("display", [True, False])
def test_chat_on_the_page_serves_this_machine_alone(
    build: Path, monkeypatch: pytest.MonkeyPatch, display: bool
) -> None:
    """And opens the page, if there is anything to open it on: a browser in a terminal would hold up the server."""
    served: list[Any] = []
    shown: SimpleQueue[str] = SimpleQueue()

    def serve(load: Any, settings: Settings, _: Any, announce: Any, warming: int, opened: Any) -> None:
        served.append((load().name, settings, warming))
        opened("http://127.0.0.1:1/")

    monkeypatch.setattr(server, "serve", serve)
    monkeypatch.setattr(chat_command.webbrowser, "open", shown.put)
    monkeypatch.setattr(chat_command.sys, "platform", "linux")
    for name in ("BROWSER", "WAYLAND_DISPLAY", "DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv("DISPLAY", ":0")
    done = shardmill("chat", build, "--web", "--drafter", "suffix")
    assert done.exit_code == 0 and done.stdout == f"{build.name} at http://127.0.0.1:1/; Ctrl-C ends it\n"
    parts = len(json.loads((build / "model.json").read_text())["parts"])
    assert served == [(NAME, Settings(port=0, drafter="suffix"), parts)]
    if display:
        assert shown.get(timeout=PATIENCE) == "http://127.0.0.1:1/"
    assert shown.empty()


@pytest.mark.parametrize(
    "option", ["--system", "--temperature", "--seed", "--max-new-tokens", "--adapter", "--accept-top-p"]
)
def test_what_the_page_has_a_field_for_is_no_option_beside_it(
    build: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(server, "serve", lambda *_: pytest.fail("it was served"))
    done = shardmill("chat", build, "--web", option, "1")
    assert (done.exit_code, done.stderr) == (
        1, f"shardmill: {option}: with --web, choose it on the page; leave the option out\n"
    )  # fmt: skip


def test_chat_with_a_template_renders_all_turns(build: Path) -> None:
    """Ctrl-D leaves; --system comes first, and without a template it has no place."""
    assert shardmill("chat", build, "--system", "Be brief.").exit_code == 2
    configure(build, chat_template=TEMPLATE)
    result = shardmill("chat", build, "--system", "Be brief.", "--max-tokens", 5, keys="hi\nho\n")
    assert result.exit_code == 0 and "no chat template" not in result.stdout
    assert result.stdout.count("[5 tokens") == 2


def test_an_error_ends_the_turn_not_the_talk(build: Path) -> None:
    """A text that fills the context is refused; after /new it goes on."""
    result = shardmill("chat", build, "--max-new-tokens", 5, keys=f"{'x' * 600}\n/new\nOnce\n")
    assert result.exit_code == 0
    assert "the prompt has 600 tokens" in result.stdout and "[5 tokens" in result.stdout


def test_a_mistyped_command_is_no_text(build: Path) -> None:
    result = shardmill("chat", build, "--max-new-tokens", 5, keys="/help\n/exit\n")
    assert result.exit_code == 0
    assert result.stdout.count("no such command: /help; there are /new, /image FILE and /exit") == 1


@pytest.mark.parametrize("line", ["/image", "/image x.png", "/image\tx.png"])
def test_an_image_for_a_build_without_a_tower_is_refused_and_the_talk_goes_on(build: Path, line: str) -> None:
    result = shardmill("chat", build, "--max-new-tokens", 5, keys=f"{line}\n/imagex y\n/exit\n")
    assert result.exit_code == 0
    assert result.stdout.count("the model takes no images; build it with `images` in the config") == 1
    assert result.stdout.count("[5 tokens") == 1 and "adds an image" not in result.stdout


def test_a_line_that_is_no_text_ends_the_turn_only(build: Path) -> None:
    """A terminal may send bytes that are no UTF-8."""
    model = load_model(build, None, "fp32")
    with pytest.raises(ApiError, match="not valid Unicode"):
        Conversation(model).prompt("\udcff")


def answer_of(pieces: Iterable[AnswerDelta | GenerationResult], kind: str = "content") -> str:
    """The text of one kind in a turn's pieces."""
    return "".join(piece.text for piece in pieces if isinstance(piece, AnswerDelta) and piece.kind == kind)


def test_a_conversation_reuses_what_was_said() -> None:
    """Each turn's prompt begins with the one before and its answer, so only the new line is run."""
    model = fake_model(chat=True)
    conversation, talk = Conversation(model, "Be brief."), Talk(model, create_drafter("ngram"), Sampling(), 10)
    first = list(talk.turn(conversation, "hi", []))
    second = list(talk.turn(conversation, "ho", []))
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]
    assert conversation.messages[2]["content"] == answer_of(first)
    result = second[-1]
    assert isinstance(result, GenerationResult) and result.reused_tokens > len(
        "system: Be brief.\nuser: hi\nassistant: "
    )


@pytest.mark.parametrize("opened", [True, False])
def test_a_thought_is_dim_and_set_apart_from_the_answer(opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template gets it as a field of the message, as the server gives it, and decides whether the model sees it."""
    opening = "<|im_start|>assistant\n" + "<think>\n" * opened
    model = fake_model(Answerer(f"{'<think>' * (not opened)}It may.\n</think>\n\nYes.", opening), thoughts="<think>")
    asked: list[Any] = []

    def render(messages: Any, tools: Any = None, variables: Any = None) -> str:
        asked.append(list(messages))
        return f"{messages[-1]['content']}{opening}"

    model = replace(model, template=render)
    monkeypatch.setattr("shardmill.serve.model.load_model", lambda *_, **__: model)
    monkeypatch.setattr("shardmill.commands.arguments.read_manifest", lambda _: manifest(model=NAME))
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm"}
    result = CliRunner().invoke(cli.app, ["chat", "b", "--max-new-tokens", "60"], input="Rain?\nSun?\n", env=terminal)
    assert result.exit_code == 0 and "think>" not in result.output
    assert "".join(re.findall(r"\x1b\[2;3m(.*?)\x1b\[0m", result.output)) == 2 * "It may."
    assert result.output.count("\x1b[0m\n\nYes.\n") == 2
    _, (*_, answer, later) = asked
    assert answer == {"role": "assistant", "content": "Yes.", "reasoning_content": "It may.", "thinking": "It may."}
    assert later["content"] == "Sun?"
    plain = shardmill("chat", "b", "--max-new-tokens", 60, keys="Rain?\n")
    assert "It may.\n\nYes.\n" in plain.output


def test_a_stop_in_a_thought_keeps_what_was_thought() -> None:
    model = fake_model(Answerer("It may.\n</think>\n\nYes.", "<think>\n"), thoughts="<think>")
    model = replace(model, template=lambda messages, *_: f"{messages[-1]['content']}<think>\n")
    conversation, talk = Conversation(model), Talk(model, create_drafter("none"), Sampling(), 60)
    stopped: list[int] = []
    said = []
    for piece in talk.turn(conversation, "hi", stopped):
        said.append(piece)
        stopped.append(1)
    assert answer_of(said) == "" and answer_of(said, "thought") and "It may.".startswith(answer_of(said, "thought"))
    assert conversation.messages[-1]["thinking"] == answer_of(said, "thought")


def test_a_text_that_goes_on_begins_with_all_that_was_there() -> None:
    """Without a template the next prompt is the text so far, tokens and all, and the new line."""
    model = fake_model(chat=False)
    conversation, talk = Conversation(model), Talk(model, create_drafter("none"), Sampling(), 10)
    answer = answer_of(talk.turn(conversation, "hi", []))
    assert model.tokenizer.decode(list(conversation.prompt("ho")[0])) == f"hi{answer}\nho"
    conversation.clear()
    assert model.tokenizer.decode(list(conversation.prompt("ho")[0])) == "ho"


def test_a_talk_may_outgrow_the_context(build: Path) -> None:
    """With a sliding context; without, the turn that does not fit is refused."""
    lines = "\n".join("x" * 100 for _ in range(8)) + "\n"
    refused = shardmill("chat", build, "--max-new-tokens", 5, keys=lines)
    assert "the context 512" in refused.stdout
    slid = shardmill("chat", build, "--max-new-tokens", 5, "--context-policy", "slide", keys=lines)
    assert slid.stdout.count("[5 tokens") == 8 and "the context" not in slid.stdout.replace("--context", "")


def test_ctrl_c_stops_the_answer_between_passes() -> None:
    """What was said until then is kept; a second Ctrl-C interrupts at once."""
    model = fake_model()
    conversation, talk = Conversation(model), Talk(model, create_drafter("none"), Sampling(), 100)
    with chat_command.interruptible() as stopped:
        said = []
        for piece in talk.turn(conversation, "hi", stopped):
            said.append(piece)
            if len(said) == 3:
                signal.raise_signal(signal.SIGINT)
        assert len(said) == 3 and all(isinstance(piece, AnswerDelta) for piece in said)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert conversation.messages[-1]["content"] == answer_of(said)
    assert list(talk.turn(conversation, "go on", []))


def test_ctrl_c_during_a_long_prompt_stops_after_a_pass() -> None:
    """Nothing is said, and the next turn is answered."""
    engine = Speaker(slots=4096)
    model = fake_model(engine)
    conversation, talk = Conversation(model), Talk(model, create_drafter("none"), Sampling(), 20)
    assert list(talk.turn(conversation, "x" * 3000, [1])) == []
    assert engine.passes == 1
    conversation.clear()
    assert list(talk.turn(conversation, "hi", []))


@pytest.mark.parametrize("options", [(), ("--precision", "fp16"), ("--precision", "ane:tables")])
def test_the_precision_asked_for_reaches_the_engine(
    build: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    """fp32 unless told otherwise: there wide passes agree with single ones."""
    asked = []

    def load_engine(folder: Path, precision: str) -> Speaker:
        asked.append(precision)
        return Speaker(slots=512)

    monkeypatch.setattr(process, "load_engine", load_engine)
    for command in (("chat", build), ("generate", build, "--prompt", "a", "--max-new-tokens", 2)):
        assert shardmill(*command, *options, keys="/exit\n").exit_code == 0
    assert asked == [options[1] if options else "fp32"] * 2


def test_a_precision_that_there_is_not_is_refused(build: Path) -> None:
    done = shardmill("generate", build, "--prompt", "a", "--precision", "ane:table")
    assert done.exit_code == 2 and "subnormals" in done.output  # one of the options that it names


def test_what_model_json_says_of_chats_is_taken(build: Path, tmp_path: Path) -> None:
    """Its stop tokens in place of the template's, unless another template is chosen; and its sampling."""
    configure(build, chat_template=TEMPLATE)
    around = {"before": "", "after": ""}
    chat = {"begin": "", "user": around, "assistant": around, "generate": "", "stop": [7, 0]}
    content = manifest(model=NAME, eos_token_ids=[0], chat=chat, sampling={"temperature": 0.7, "top_k": 20})
    (build / "model.json").write_text(json.dumps(content))
    model = load_model(build, None, "fp32")
    assert (model.eos, model.sampling) == ((0, 7), {"temperature": 0.7, "top_k": 20})
    (tmp_path / "chosen.jinja").write_text(ENDS)
    assert load_model(build, None, "fp32", chat_template=tmp_path / "chosen.jinja").eos == (0, END)
