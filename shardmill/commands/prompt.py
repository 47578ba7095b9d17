"""The text that a command runs: given on the command line, in a file or on standard input."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from shardmill import regular
from shardmill.errors import ShardmillError


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """Reads the text to continue.

    Args:
        prompt: the text itself.
        prompt_file: a file's name; "-" is standard input.

    Raises:
        typer.BadParameter: both or neither are given.
        ShardmillError: the text cannot be read or is not UTF-8.
    """
    if (prompt is None) == (prompt_file is None):
        raise typer.BadParameter("give the text to continue with either --prompt or --prompt-file")
    if prompt is not None:
        return checked_text(prompt, "the prompt")
    return read_stdin() if prompt_file == "-" else read_text(Path(str(prompt_file)))


def read_text(file: Path) -> str:
    """Reads a file's text.

    Raises:
        ShardmillError: it cannot be read or is not UTF-8.
    """
    try:
        return regular.read_text(file)
    except OSError as error:
        raise ShardmillError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ShardmillError(f"{file}: not UTF-8 text") from error


def checked_text(text: str, what: str) -> str:
    """Returns `text` from the command line if its bytes were UTF-8.

    Raises:
        ShardmillError: they were not; Python then hides them as halves of surrogate pairs.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ShardmillError(f"{what} is not UTF-8 text: check its bytes or the terminal's encoding") from error
    return text


def read_stdin() -> str:
    """Reads standard input. Raises ShardmillError where it is not UTF-8."""
    try:
        return checked_text(sys.stdin.read(), "standard input")
    except UnicodeDecodeError as error:
        raise ShardmillError("standard input is not UTF-8 text") from error
