"""How commands take a build: a folder, or a published one by its address."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def located_build(text: str) -> Path:
    """The folder of a build; a published one is fetched and verified first."""
    from shardmill.release.pull import located

    return located(text)


Build = Annotated[
    Path,
    typer.Argument(
        help="A build's folder, e.g. build/demo, or a published build: hf:OWNER/NAME@REVISION or hf:OWNER/NAME.",
        metavar="BUILD",
        parser=located_build,
    ),
]
