"""`shardmill chat`: talk to a built model in a terminal.

Ctrl-C stops an answer, Ctrl-D or /exit leaves, /new starts over. A checkpoint with a chat template answers; a thought
before the answer is dim. A checkpoint without one continues the text, and the greeting says so.
"""

from __future__ import annotations

import signal
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
from shardmill.runtime.manifest import UNGATED

if TYPE_CHECKING:
    from drafted_decoding import GenerationResult
    from rich.console import Console

    from shardmill.serve.conversation import Conversation, Talk

Cost = Callable[["GenerationResult"], str]  # the line that tells the cost of an answer
_KEYS = "Ctrl-C stops an answer, /new starts over, /exit or Ctrl-D leaves."


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
) -> None:
    """Chat with a built model in the terminal."""
    from drafted_decoding import Sampling
    from rich.console import Console

    from shardmill.serve import model as serving
    from shardmill.serve.conversation import Conversation, Talk

    check_drafter(drafter, draft_build)
    sampling = Sampling(temperature=temperature, seed=seed, accept_top_p=accept_top_p)
    build = opened(build, ungated, context)
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
    console.print(f"{name} on the {model.engine_name} engine.{says} {_KEYS}", style="dim", soft_wrap=True)
    cost = partial(closing_line, engine=model.engine_name, accept_top_p=accept_top_p, manifest=manifest)
    _talk_until_left(console, talk, Conversation(model, system), cost)


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


def _talk_until_left(console: Console, talk: Talk, conversation: Conversation, cost: Cost) -> None:
    """Answer line after line, until /exit or Ctrl-D."""
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
