"""`shardmill gc`: frees what no build refers to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def gc(
    builds: Annotated[Path, typer.Argument(help="The folder that holds the builds and their store.")] = Path("build"),
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be removed.")] = False,
) -> None:
    """Remove stored artifacts that no build refers to, and what killed runs left behind."""
    from shardmill.errors import ShardmillError
    from shardmill.pipeline import gc
    from shardmill.pipeline.lock import hold_lock, hold_store

    if not (builds / ".store").is_dir():
        raise ShardmillError(f"{builds}: there is no store here (.store); name the folder that holds the builds")
    hold_lock(str(builds))
    hold_store(builds / ".store")
    found = gc.collect(builds, dry_run)
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"{verb} {found.entries} entries, {found.bytes / 1e6:.1f} MB")
