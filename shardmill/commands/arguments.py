"""Functions that the commands share: to accept a build as an argument, and to print a size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

UNITS = ("B", "kB", "MB", "GB")


def size(count: float) -> str:
    """Return bytes as a person reads them, in powers of 1000."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def located_build(text: str) -> Path:
    """Return the folder of a build; a published one is fetched and verified first."""
    from shardmill.release.pull import local_build

    return local_build(text)


Build = Annotated[
    Path,
    typer.Argument(
        help="A build's folder, e.g. build/demo, or a published build: hf:OWNER/NAME@REVISION or hf:OWNER/NAME.",
        metavar="BUILD",
        parser=located_build,
    ),
]
