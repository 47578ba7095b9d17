"""`shardmill publish`: make a hub repository of a build."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shardmill.commands.build import Build


class Programs(StrEnum):
    """Which programs a repository holds."""

    packages = "packages"
    compiled = "compiled"
    both = "both"


def publish(
    build: Build,
    repo: Annotated[str, typer.Argument(metavar="REPO_ID", help="owner/name on the hub.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private.")] = False,
    include: Annotated[
        Programs | None, typer.Option(help="Programs to upload; default: those that were signed, or both.")
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="License identifier; default: that of the checkpoint's repository.")
    ] = None,
    may: Annotated[
        bool, typer.Option("--i-may", help="Confirm that you may publish, where the license does not plainly say so.")
    ] = False,
    key: Annotated[Path | None, typer.Option(help="Private key (PEM) to sign with, the card included.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Prepare and say what would be uploaded; send nothing.")
    ] = False,
) -> None:
    """Upload a build with a card, its attestations and its signatures. Run it again to continue after an interruption.

    Refuses a build whose files or verdicts are wrong, whose license does not allow it, or that names your machine.
    """
    from shardmill.release.publish import Wish, prepare, upload

    wish = Wish(repo, private, include.value if include else None, license, may, key)
    files = prepare(build, wish)
    size = sum((build / name).stat().st_size for name in files)
    if dry_run:
        for name in files:
            typer.echo(name)
        typer.echo(
            f"{len(files)} files, {size / 1e6:.1f} MB would be uploaded to {repo}; the card is {build / 'README.md'}"
        )
        return
    commit = upload(build, files, wish)
    typer.echo(f"{len(files)} files, {size / 1e6:.1f} MB: hf:{repo}@{commit}")
