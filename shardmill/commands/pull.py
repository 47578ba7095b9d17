"""`shardmill pull`: fetch a published build and verify it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pull(
    repo: Annotated[str, typer.Argument(metavar="REPO_ID[@REVISION]", help="A published build: owner/name.")],
    out: Annotated[Path | None, typer.Option(help="Folder to make; default: one in shardmill's cache.")] = None,
    key: Annotated[
        list[Path] | None, typer.Option(help="Public key (PEM), repeatable; one of them must have signed the build.")
    ] = None,
) -> None:
    """Fetch a published build, check all that `verify` checks, and print its folder.

    Every command that takes a build folder takes hf:OWNER/NAME[@REVISION] as well.
    """
    from shardmill.release.keys import read_public
    from shardmill.release.pull import address
    from shardmill.release.pull import pull as pull_build

    typer.echo(pull_build(address(repo), out, [read_public(file) for file in key or ()]))
