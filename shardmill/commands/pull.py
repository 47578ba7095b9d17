"""`shardmill pull`: fetch a published build and verify it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO_ID[@REVISION]", help="A published build: owner/name.")],
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in shardmill's cache.")] = None,
) -> None:
    """Fetch a published build; every byte is compared with its records. Prints the folder.

    Every command that takes a build folder takes hf:OWNER/NAME[@REVISION] as well.
    """
    from shardmill.release.pull import address
    from shardmill.release.pull import pull as pull_build

    typer.echo(pull_build(address(repo), out))
