"""Chat templates, rendered in another process that can be ended."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

from shardmill import files
from shardmill.errors import ShardmillError
from shardmill.files import load_json, parse_json
from shardmill.printable import first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Message = Mapping[str, Any]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # schema of a function without arguments


class ChatTemplate(Protocol):
    """A function from a conversation to the text that the model continues.

    It also takes the tools that the model may call, and values of the template's own variables.
    """

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text. Raises any exception for a conversation that the template rejects."""


@dataclass(frozen=True)
class TemplateFacts:
    """What is known of a template without a conversation.

    Attributes:
        text: its text.
        tools: its text for conversations with tools, if it shows them to the model, otherwise "".
        variables: the variables that a request may set.
    """

    text: str = ""
    tools: str = ""
    variables: frozenset[str] = frozenset()


SECONDS = 5.0  # for one conversation; templates in use take milliseconds
MEMORY = 1 << 30  # bytes, beyond the memory of the process when it is ready
LONGEST = 1 << 24  # characters of a rendered conversation
START_SECONDS = 300.0  # for importing transformers and reading a tokenizer on a busy machine
LEAN = "shardmill.templates.lean"
IMPORTED = [
    LEAN,
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    __name__,
]  # imported once, by the fork server


class RenderError(ShardmillError):
    """A template that rejected a conversation, or needed too much time or memory for it."""


class Renderer:
    """The renderer of a chat template; one conversation at a time.

    Args:
        source: the checkpoint's folder.
        text: a template to use instead of the one that transformers finds.

    Raises:
        RenderError: the checkpoint's tokenizer can't be loaded.
    """

    def __init__(self, source: Path, text: str | None) -> None:
        self._source, self._text = source, text
        self._turn = threading.Lock()
        self._running: tuple[Any, Connection] | None = None
        self._start()

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation, up to where the answer begins. Raises RenderError."""
        listed = [dict(tool) for tool in tools or ()]
        return str(self._ask(([dict(message) for message in messages], listed, dict(variables or {}))))

    @property
    def pid(self) -> int | None:
        """Return the number of the process that renders; None while there is none."""
        running = self._running
        return running[0].pid if running else None

    def facts(self) -> TemplateFacts:
        """Return what is known of the template; nothing if that takes too much time or memory."""
        try:
            facts: TemplateFacts = self._ask(None)
        except RenderError:  # the first request will say so again
            return TemplateFacts()
        return facts

    def _ask(self, request: Any) -> Any:
        with self._turn:
            _, pipe = self._running or self._start()
            with suppress(OSError):  # the process has ended, which _answer reports
                pipe.send(request)
            return self._answer(pipe, SECONDS)

    def _start(self) -> tuple[Any, Connection]:
        """Start the process, and wait until it has read the tokenizer."""
        context: Any = multiprocessing.get_context(_way())  # the type stubs have no `Process` for either method
        context.set_forkserver_preload(IMPORTED)
        pipe, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, self._source, self._text), daemon=True)
        process.start()
        theirs.close()
        self._running = process, pipe
        self._answer(pipe, START_SECONDS)
        return self._running

    def _answer(self, pipe: Connection, seconds: float) -> Any:
        """Return the process' answer. If it does not answer, kill it; the next conversation starts another process."""
        try:
            if not pipe.poll(seconds):
                raise RenderError(f"it took more than {seconds:g} s")
            fine, answer = pipe.recv()
        except (EOFError, OSError) as error:
            self._end()
            raise RenderError("its process ended") from error
        except RenderError:
            self._end()
            raise
        if not fine:
            raise RenderError(answer)
        return answer

    def _end(self) -> None:
        if self._running is not None:
            process, pipe = self._running
            self._running = None
            process.kill()
            process.join()
            pipe.close()


def _way() -> str:
    """Return the start method: a fork would copy some of this process' threads, a fork server has none.

    On a Mac a process with numpy must not fork at all: numpy calls Accelerate during its import, which starts system
    threads. There each process is spawned, and imports transformers again.
    """
    return "spawn" if sys.platform == "darwin" else "forkserver"


def _work(pipe: Connection, source: Path, text: str | None) -> None:
    """Run the process: report that it is ready, then answer each conversation with success and a text.

    A conversation is messages, tools and variables; None asks for `facts`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server, which closes the pipe
    import shardmill.templates.lean  # noqa: F401 (a process that was spawned has not imported it)

    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a checkpoint may cause any exception
        pipe.send((False, first_line(error)))
        return
    limit_memory()
    pipe.send((True, ""))
    with suppress(EOFError):
        while True:
            asked = pipe.recv()
            if asked is None:
                pipe.send((True, _facts(tokenizer, text)))
            else:
                messages, tools, variables = asked
                pipe.send(rendered(tokenizer, messages, text, tools=tools, variables=variables))


def _facts(tokenizer: Any, text: str | None) -> TemplateFacts:
    """Return what is known of a template. Some templates ignore tools, or expect them under other names."""
    tool = {"type": "function", "function": {"name": _TOOL, "description": "", "parameters": NO_PARAMETERS}}
    fine, shown = rendered(tokenizer, [{"role": "user", "content": "a question"}], text, tools=[tool])
    try:
        plain, called = (str(tokenizer.get_chat_template(text, tools=tools)) for tools in (None, [tool]))
        provided = {*_GIVEN, *tokenizer.special_tokens_map}
        variables = frozenset(_variables(plain) | _variables(called)) - provided
    except Exception:  # a checkpoint may cause any exception
        return TemplateFacts()
    return TemplateFacts(plain, called if fine and _TOOL in shown else "", variables)


def _variables(template: str) -> set[str]:
    """Return the variables that a template reads and does not set before."""
    from jinja2 import Environment, meta

    plain = GENERATION.sub("", template)  # a tag of transformers' own
    return set(meta.find_undeclared_variables(Environment(extensions=["jinja2.ext.loopcontrols"]).parse(plain)))


def rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    text: str | None,
    answers: bool = True,
    tools: list[dict[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> tuple[bool, str]:
    """Render a conversation in this process.

    Args:
        tokenizer: transformers' tokenizer.
        messages: the conversation.
        text: a template to use instead of the tokenizer's.
        answers: whether an answer begins at the end of the text.
        tools: the functions that the model may call.
        variables: values of the template's own variables, and of transformers' `add_generation_prompt`, which counts in
            place of `answers`, and `continue_final_message`.

    Returns:
        Whether the template accepted the conversation, and the text or the reason.
    """
    try:
        written = str(
            tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=text,
                tokenize=False,
                **({"add_generation_prompt": answers} | dict(variables or {})),
            )
        )
    except MemoryError:
        return False, "it needs too much memory"
    except Exception as error:  # templates may raise any exception
        return False, first_line(error)
    if len(written) > LONGEST:
        return False, f"it wrote {len(written)} characters, more than {LONGEST}"
    return True, written


@contextmanager
def dated(clock: Callable[[str], str]) -> Iterator[None]:
    """Let templates write another date than today's.

    Args:
        clock: the date by strftime's directives.
    """
    utils: Any = importlib.import_module("transformers.utils.chat_template_utils")
    real, fixed = utils.datetime, SimpleNamespace(now=lambda: SimpleNamespace(strftime=clock))
    utils.datetime = fixed  # strftime_now reads it in each call; transformers passes no function on to a template
    try:
        yield
    finally:
        utils.datetime = real


def limit_memory() -> None:
    """Limit the memory that the process may allocate from now on, where the system can: macOS does not enforce it."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


TEMPLATE = "chat_template"  # the key of a template in JSON files
_ANSWER = "an answer"
_TOOL = "look_up_this"
_GIVEN = ("messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now")  # by transformers
GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def load_template(source: Path, chosen: Path | None = None) -> Renderer | None:
    """Return a checkpoint's chat template; None if it has none.

    Args:
        source: the checkpoint's folder.
        chosen: a file with a template to use instead.

    Raises:
        ShardmillError: the chosen file can't be used, or the checkpoint's tokenizer can't be loaded.
    """
    if chosen is None and not has_template(source):
        return None
    text = own_template(source) if chosen is None else _read(chosen)
    try:
        render = Renderer(source, text)
    except RenderError as error:
        raise ShardmillError(f"{source}: its tokenizer, and so its chat template, can't be loaded: {error}") from error
    if chosen is not None:
        try:
            render([{"role": "user", "content": "a question"}])
        except RenderError as error:
            raise ShardmillError(f"{chosen} is no chat template: {error}") from error
    return render


def turn_end(template: Callable[[Sequence[Message]], str], tokenizer: Tokenizer) -> int | None:
    """Return the added token that a template puts after an answer; None if it puts no such token there.

    A model that was trained with the template ends its turn with this token. Some checkpoints do not name it in
    generation_config.json; without it their models would continue with the user's next turn. Some do not flag it as
    special, either.
    """
    try:
        _, _, after = template(
            [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
        ).rpartition(_ANSWER)
    except Exception:  # templates may raise any exception; a request that can't be rendered reports it
        return None
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    ends = [content for content in added if content.strip() and after.lstrip().startswith(content)]
    return added[max(ends, key=len)] if ends else None


def has_template(source: Path) -> bool:
    """Return whether a checkpoint folder contains a chat template.

    Raises:
        ShardmillError: the folder's tokenizer_config.json or chat_template.json is damaged.
    """
    return _transformers_finds_one(source) or own_template(source) is not None


def _transformers_finds_one(source: Path) -> bool:
    """Return whether transformers' tokenizer has a template."""
    return (source / "chat_template.jinja").is_file() or bool(_held(source / "tokenizer_config.json", TEMPLATE))


def own_template(source: Path) -> str | None:
    """Return the template in chat_template.json, which transformers reads for processors only; None if not needed.

    Some checkpoints with a vision part keep their template there alone.

    Raises:
        ShardmillError: the file, or tokenizer_config.json, is damaged.
    """
    if _transformers_finds_one(source):
        return None
    template = _held(source / "chat_template.json", TEMPLATE)
    return template if isinstance(template, str) and template else None


def _held(file: Path, key: str) -> Any:
    """Return what a JSON file has under a key; None if there is no such file, or nothing under the key."""
    try:
        return load_json(file).get(key) if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ShardmillError(f"{file} is damaged: {error}; fetch the checkpoint again") from error


def _read(file: Path) -> str:
    """Return the template in a file that a person chose. JSON's braces and quotes would be taken for its text."""
    try:
        text = files.read_text(file)
    except OSError as error:
        raise ShardmillError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ShardmillError(f"{file} can't be read: {error}") from error
    try:
        parse_json(text)
    except ValueError:  # as it must be
        return text
    raise ShardmillError(f"{file} holds JSON; give a file with the template alone, the text of its {TEMPLATE}")
