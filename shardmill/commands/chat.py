"""`shardmill chat`: talk to a built model in a terminal.

Ctrl-C stops an answer, Ctrl-D or /exit leaves, /new starts over, /image FILE adds an image to the next message. A
checkpoint with a chat template answers; a thought before the answer is dim. A checkpoint without one continues the
text, and the greeting says so.

With --web a browser shows the server's page instead, which has settings of its own.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill import interrupt
from shardmill.commands.arguments import (
    AdapterName,
    Build,
    ContextOption,
    DraftBuild,
    DrafterName,
    Lossy,
    Precision,
    TemplateFile,
    Ungated,
    check_drafter,
    checked_text,
    make_drafter,
    opened,
    read_checked,
)
from shardmill.commands.check import NoCheck, check_once
from shardmill.commands.generate import closing_line
from shardmill.errors import ShardmillError
from shardmill.runtime.manifest import UNGATED, holds_encoder, open_gates

if TYPE_CHECKING:
    from drafted_decoding import ContextPolicy, GenerationResult
    from rich.console import Console

    from shardmill.serve.conversation import Conversation, Talk
    from shardmill.serve.model import Model

Cost = Callable[["GenerationResult"], str]  # the line that tells the cost of an answer
_KEYS = "Ctrl-C stops an answer, /new starts over, /exit or Ctrl-D leaves."


ON_THE_PAGE = ("system", "max_new_tokens", "temperature", "seed", "adapter", "accept_top_p")


def chat(
    context: typer.Context,
    build: Build,
    system: Annotated[str | None, typer.Option(help="System prompt; needs a chat template.")] = None,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "--max-tokens", min=1, help="Most tokens of an answer.")
    ] = 512,
    drafter: DrafterName = "ngram",
    draft_build: DraftBuild = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the most likely token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
    context_policy: ContextOption = "stop",
    chat_template: TemplateFile = None,
    adapter: AdapterName = None,
    accept_top_p: Lossy = None,
    precision: Precision = "fp32",
    no_check: NoCheck = False,
    ungated: Ungated = False,
    web: Annotated[
        bool, typer.Option("--web", help="In a browser: open the page of a server, which ends with Ctrl-C.")
    ] = False,
) -> None:
    """Chat with a built model in the terminal, or in a browser."""
    from drafted_decoding import Sampling
    from rich.console import Console

    from shardmill.serve import model as serving
    from shardmill.serve.conversation import Conversation, Talk

    check_drafter(drafter, draft_build)
    build = opened(build, ungated, context)
    if web:
        _serve_page(context, build, drafter, draft_build, context_policy, chat_template, precision, no_check)
        return
    sampling = Sampling(temperature=temperature, seed=seed, accept_top_p=accept_top_p)
    manifest = read_checked(build, drafter, draft_build, context_policy, adapter)
    if system is not None:
        _check_system(system, build, manifest, chat_template)
    model = serving.load_model(build, None, precision, chat_template=chat_template)
    check_once(build, model.engine, precision, no_check)
    talk = Talk(
        model,
        make_drafter(drafter, draft_build, model.engine.vocab, precision, context_policy, model.head),
        sampling,
        max_new_tokens,
        context_policy,
        adapter,
    )
    console = Console(markup=False, highlight=False)
    says = "" if model.template else " It has no chat template (see --chat-template): it continues your text."
    name = f"{model.name}, UNGATED," if UNGATED in manifest else model.name
    images = " /image FILE adds an image." if model.pictures and model.template else ""
    console.print(f"{name} on the {model.engine_name} engine.{says} {_KEYS}{images}", style="dim", soft_wrap=True)
    cost = partial(closing_line, engine=model.engine_name, accept_top_p=accept_top_p, manifest=manifest)
    seen = partial(_see, model, slides=context_policy == "slide")
    _talk_until_left(console, talk, Conversation(model, system), cost, seen)


def _serve_page(
    context: typer.Context,
    build: Path,
    drafter: str,
    draft_build: Path | None,
    context_policy: ContextPolicy,
    chat_template: Path | None,
    precision: str,
    no_check: bool,
) -> None:
    """Serve a build to this machine alone, at a free port, and open its page; it shows how far the programs are loaded.

    Raises:
        ShardmillError: an option is given that the page has a field for.
    """
    from shardmill.commands.serve import check_encoder, loading, programs
    from shardmill.serve.listening import listening
    from shardmill.serve.model import Settings
    from shardmill.serve.server import serve

    for name in ON_THE_PAGE:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ShardmillError(f"--{name.replace('_', '-')}: with --web, choose it on the page; leave the option out")
    if holds_encoder(build):
        check_encoder(build, context)
    else:
        read_checked(build, drafter, draft_build, context_policy, None)
    settings = Settings(port=0, drafter=drafter, context_policy=context_policy, ungated=open_gates(build))
    load = loading(build, draft_build, precision, context_policy, chat_template, no_check)
    with listening(settings.host, settings.port, None) as listener:
        opens = partial(_open_page, name=build.name)
        serve(load, settings, listener, lambda _: None, programs(build, draft_build), opens)


def _open_page(page: str, name: str) -> None:
    """Open a page in a browser, if this session has a display: a browser in the terminal would hold up the server."""
    typer.echo(f"{name} at {page}; Ctrl-C ends it")
    if "BROWSER" in os.environ or sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        threading.Thread(target=webbrowser.open, args=(page,), daemon=True).start()  # some wait for the browser's end


def _check_system(system: str, build: Path, manifest: dict[str, Any], chosen: Path | None) -> None:
    """Refuse a system prompt that the model can't be given.

    Raises:
        ShardmillError: the system prompt is not UTF-8 text.
        typer.BadParameter: the checkpoint has no chat template.
    """
    from shardmill.templates.render import has_template

    checked_text(system, "--system")
    if chosen is None and not has_template((build / manifest["tokenizer"]["path"]).parent):
        raise typer.BadParameter(
            f"{build} has no chat template, so --system has no place to go; give one with --chat-template"
        )


def _see(model: Model, conversation: Conversation, named: str, *, slides: bool) -> str:
    """Add the image in a file to the next message; return what is said of it.

    Args:
        model: the model that answers.
        conversation: the conversation.
        named: the file, as a shell takes it: terminals quote the path of a file that is dropped on them.
        slides: whether the context slides.

    Raises:
        ShardmillError: the build takes no images, or this one can't be used.
    """
    from shardmill.serve.pictures import take_file

    if model.pictures is None:
        raise ShardmillError("/image: the model takes no images; build it with `images` in the config")
    if model.template is None or slides:
        why = "a context that slides can't hold images" if slides else "images need a chat template"
        raise ShardmillError(
            f"/image: {why}; start again with {'--context-policy stop' if slides else '--chat-template'}"
        )
    try:
        names = shlex.split(named)
    except ValueError:
        names = [named.strip()]
    if len(names) != 1:
        raise ShardmillError("/image FILE: give one file, in quotes if its path has spaces")
    if len(conversation.pictures) == model.pictures.most:
        raise ShardmillError(f"/image: a conversation may have {model.pictures.most} images; /new starts over")
    file = Path(names[0]).expanduser()
    picture = take_file(model.pictures.see, file)
    conversation.show(picture)
    width, height = picture.size
    return f"{file.name}: {width} x {height} pixels, {len(picture.numbers)} tokens of the next message"


def _talk_until_left(
    console: Console,
    talk: Talk,
    conversation: Conversation,
    cost: Cost,
    seen: Callable[[Conversation, str], str],
) -> None:
    """Answer line after line, until /exit or Ctrl-D; `seen` adds an image, and returns what is said of it."""
    while True:
        try:
            with interrupt.caught():
                line = console.input("> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n/exit or Ctrl-D leaves", style="dim")
            continue
        if line == "/exit":
            return
        if line == "/new":
            conversation.clear()
        elif re.match(r"/image(\s|$)", line):
            try:
                console.print(seen(conversation, line.removeprefix("/image")), style="dim", soft_wrap=True)
            except ShardmillError as error:
                console.print(str(error), style="red", soft_wrap=True)
        elif re.fullmatch(r"/[a-z]+", line):  # a path or a comment has more
            console.print(f"no such command: {line}; there are /new, /image FILE and /exit", style="dim")
        elif line:
            _say(console, talk, conversation, line, cost)


def _say(console: Console, talk: Talk, conversation: Conversation, line: str, cost: Cost) -> None:
    """Stream the answer of one turn, then print its cost; an error ends the turn, not the conversation."""
    from drafted_decoding import DecodeError

    from shardmill.serve.tool_reader import AnswerDelta

    try:
        with interruptible() as stopped:
            result: GenerationResult | None = None
            thinking = False
            for piece in talk.turn(conversation, line, stopped):
                if not isinstance(piece, AnswerDelta):
                    result = piece
                    continue
                thought, thinking = thinking, piece.kind == "thought"
                if thought and not thinking:
                    console.print("\n")
                console.print(piece.text, end="", soft_wrap=True, style="dim italic" if thinking else "")
        console.print()
        console.print(cost(result) if result else "[stopped]", style="dim", soft_wrap=True)
    except (DecodeError, ShardmillError) as error:
        console.print(f"{error}; /new starts over", style="red")


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """In this context, the first Ctrl-C only fills the list, so that the pass can finish; the second interrupts."""
    stopped: list[int] = []

    def note(number: int, frame: object) -> None:
        if stopped:
            raise KeyboardInterrupt
        stopped.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)
