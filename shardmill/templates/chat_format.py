"""The format of a checkpoint's chat template, for `chat` and `conversation` of model.json.

A runtime without Jinja writes a conversation by this format. A template that does more has no format.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import interrupt
from shardmill.checkpoint.tokenizer import (
    TOKENIZER,
    difference,
    every_added_token,
    names_class,
    read_tokenizer,
    transformers_tokenizer,
)
from shardmill.errors import CheckpointError
from shardmill.files import parse_json
from shardmill.printable import first_line
from shardmill.templates.derive import Render, derive
from shardmill.templates.form import Clock, Talk
from shardmill.templates.render import RenderError, dated, limit_memory, own_template, rendered, turn_end
from shardmill.templates.thoughts import CHANNEL

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SECONDS = 5.0  # for one conversation; templates in use take milliseconds
PROBE_SECONDS = 300.0  # for importing transformers and all probes on a busy machine
LONGEST = 1 << 17  # characters of the formats as JSON
MAIN = "import sys; from shardmill.templates.chat_format import main; main(sys.argv[1])"


def chat_format(source: Path) -> tuple[dict[str, Any], str]:
    """Return what a checkpoint's chat template gives model.json, `chat` and `conversation`, or nothing and the reason.

    The template is a stranger's program. It runs in another process, which has a limit of time and of memory.

    Args:
        source: the checkpoint's folder, which has a chat template.

    Raises:
        CheckpointError: tokenizer.json gives a conversation's text other tokens than transformers does.
    """
    command = [sys.executable, "-c", MAIN, str(source)]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
    )
    interrupt.ends_with_this_process(child)
    try:
        written, _ = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return {}, "its template takes too long"
    finally:
        child.kill()
        child.wait()
    lines = written.decode(errors="replace").splitlines()
    if child.returncode or not lines or len(lines[-1]) > LONGEST:
        return {}, "its template needs too much time or memory"
    answer = parse_json(lines[-1])
    if answer["differs"]:
        raise CheckpointError(answer["differs"])
    return answer["formats"], answer["why"]


def main(source: str) -> None:
    """Print the formats of a checkpoint's chat template, or why it has none, as one line of JSON."""
    try:
        answer = _probed(Path(source))
    except Exception as error:  # a checkpoint may cause any exception
        answer = {"formats": {}, "why": first_line(error), "differs": ""}
    print(json.dumps(answer))


def _probed(source: Path) -> dict[str, Any]:
    """Return the formats of a checkpoint's chat template, or why it has none, and where its texts' tokens differ."""
    from transformers import AutoTokenizer

    theirs, template = AutoTokenizer.from_pretrained(source, trust_remote_code=False), own_template(source)
    ours = read_tokenizer(source / TOKENIZER)
    judge = theirs if names_class(source) else transformers_tokenizer(source)
    texts: list[str] = []
    limit_memory()

    def render(talk: Talk, answers: bool, clock: Clock) -> str:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # ends the process, whatever it does
        with dated(clock):
            fine, text = rendered(theirs, [dict(message) for message in talk], template, answers)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not fine:
            raise RenderError(text)
        texts.append(text)
        return text

    try:
        formats, why = _formats(str(theirs.get_chat_template(template)), ours, render), ""
    except Exception as error:  # a checkpoint may cause any exception
        formats, why = {}, first_line(error)
    texts = [*dict.fromkeys(texts), every_added_token(judge)] if texts else []
    differs = difference(source / TOKENIZER, ours, judge, texts, special=False)
    return {"formats": formats, "why": why, "differs": differs}


def _formats(template: str, ours: Tokenizer, render: Render) -> dict[str, Any]:
    """Return the formats of a template, each with the token that ends an answer."""
    forms = dict(zip(("chat", "conversation"), derive(render, template), strict=True))
    end = None
    if CHANNEL not in template:  # there a message ends with such a token, and an answer has several
        end = turn_end(lambda talk: render(talk, True, date.today().strftime), ours)
    return {name: form.as_json() | {"stop": [] if end is None else [end]} for name, form in forms.items() if form}
