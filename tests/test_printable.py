"""What a terminal would obey is not printed, wherever it comes from."""

from __future__ import annotations

import logging
import sys

import pytest

from shardmill.printable import PrintableFormatter, first_line, one_line


def test_a_traceback_shows_no_escapes() -> None:
    """A library's error may quote a stranger's file, and Snakemake shows the logs of failed jobs."""
    try:
        raise ValueError("\x1b]0;title\x07\x1b[31mred")
    except ValueError:
        record = logging.LogRecord("n", logging.DEBUG, "f", 1, "failed", (), sys.exc_info())
    text = PrintableFormatter("%(levelname)s %(message)s").format(record)
    assert "ValueError: ?]0;title??[31mred" in text and text.startswith("DEBUG failed\nTraceback")
    assert all(character.isprintable() or character == "\n" for character in text)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("one\ntwo", "one"),
        ("\n one \ntwo", "one"),
        ("one:\n\n two\nthree", "one: two"),
        ("\n", "ValueError"),
        ("", "ValueError"),
    ],
)
def test_an_error_is_told_in_its_first_line(said: str, line: str) -> None:
    assert first_line(ValueError(said)) == line


def test_an_error_of_core_ml_keeps_its_words() -> None:
    """Its text is a dictionary, whose first line is a brace; kit/tests/test_error_texts.py has more."""
    error = RuntimeError('{\n    NSLocalizedDescription = "refused \\"\x1b\\" with error code: -14.";\n}')
    assert one_line(first_line(error)) == one_line(error) == 'refused "?" with error code: -14.'
