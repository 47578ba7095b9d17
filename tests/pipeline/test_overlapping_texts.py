"""Texts of a config: what was calibrated on does not judge the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.errors import ConfigError
from shardmill.pipeline.resolve import CALIBRATION, overlaps, read_corpus

LINES = [f"line {number} of a text that is told apart by its number" for number in range(100)]
TEXT = "\n".join(LINES)


@pytest.mark.parametrize(
    "seen",
    [TEXT, TEXT * 3, "before\n" + TEXT, "\n".join(LINES[:50]), "\n".join(LINES[20:32]), "  " + "\n\t".join(LINES)],
)
def test_a_calibration_on_what_is_reported_is_refused(seen: str) -> None:
    for key in ("parity.text", "benchmark.text"):
        (line,) = overlaps({key: TEXT, "other": "another text", CALIBRATION: seen})
        assert line.startswith(f"convert.calibration.text: shares text with {key}")


def test_a_short_text_of_one_line_counts_too() -> None:
    assert overlaps({"parity.text": "once upon", CALIBRATION: "once upon a time"})


@pytest.mark.parametrize("seen", ["a text of its own", "\n".join(LINES[:5]) + "\nand more", "", "short\n" * 90])
def test_another_text_may_have_a_few_lines_in_common(seen: str) -> None:
    assert overlaps({"parity.text": TEXT + "\nshort", CALIBRATION: seen}) == []
    assert overlaps({"parity.text": TEXT, "benchmark.text": TEXT}) == []


def test_a_text_is_utf8(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match="a: not UTF-8 text"):
        read_corpus(tmp_path / "a")
