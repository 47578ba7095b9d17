"""What the commands share: a build as an argument, sizes, and tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

UNITS = ("B", "kB", "MB", "GB")


def size(count: float) -> str:
    """Return bytes as a person reads them, in powers of 1000."""
    unit = 0
    while count >= 1000 and unit < len(UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.0f} B" if unit == 0 else f"{count:.1f} {UNITS[unit]}"


def make_table(*columns: str, right: Collection[str] = (), fold: Collection[str] = ()) -> Table:
    """Return an empty table; columns of numbers are aligned to the `right`, and long texts are wrapped in `fold`."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold" if column in fold else "ellipsis",
        )
    return made


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
