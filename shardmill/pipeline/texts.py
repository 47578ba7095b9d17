"""The texts that a config names: what is wrong with them, said before any work."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import regular
from shardmill.errors import ConfigError

CALIBRATION = "convert.calibration.text"
LONG = 40  # characters of a line that two texts hardly share by chance
SHARED = 0.1  # of a text's long lines


def read_text(path: Path) -> str:
    """A text without white space around it. Raises ConfigError where it is not UTF-8."""
    try:
        return regular.read_text(path).strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def overlaps(texts: Mapping[str, str]) -> list[str]:
    """Names the texts that quality is reported on and that the calibration's has parts of.

    Args:
        texts: each by its key in the config.
    """
    seen = texts.get(CALIBRATION)
    if not seen:
        return []
    known = _long_lines(seen)
    return [
        f"{CALIBRATION}: shares text with {key}, and what was calibrated on can't be judged by it; choose another"
        for key, text in texts.items()
        if key != CALIBRATION and text and _shares(text, seen, known)
    ]


def _shares(text: str, seen: str, known: set[str]) -> bool:
    lines = _long_lines(text)
    return text in seen or seen in text or len(lines & known) > SHARED * len(lines)


def _long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= LONG}
