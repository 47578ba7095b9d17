"""Processes that tests start: where one fails, the first line says which, how it ended and why."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHY = re.compile(r"^(shardmill|measure\.py|usage|\w*(Error|Exception|Interrupt))\b.*")


def failure(command: Sequence[object] | str, code: int, *outputs: str | bytes | None) -> str:
    """What a failing test says: the command, its exit code and the last line that gives a reason; then all lines."""
    texts = [text.decode(errors="replace") if isinstance(text, bytes) else text or "" for text in outputs]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    why = next((line for line in reversed(lines) if WHY.match(line.strip())), lines[-1] if lines else "it said nothing")
    words = [command] if isinstance(command, str) else [str(word) for word in command]
    shown = shlex.join([Path(words[0]).name, *words[1:]]).replace("\n", " ")
    return "\n".join([f"{shown[:200]} ended with {code}: {why.strip()}", *lines])


def succeeded(done: subprocess.CompletedProcess[Any]) -> None:
    """Demand that a process ended well."""
    assert done.returncode == 0, failure(done.args, done.returncode, done.stdout, done.stderr)


@contextmanager
def told() -> Iterator[None]:
    """Tell what a process said that subprocess itself checks; its own error keeps it to itself."""
    try:
        yield
    except subprocess.CalledProcessError as error:
        raise AssertionError(failure(error.cmd, error.returncode, error.stdout, error.stderr)) from error
