"""`shardmill why`: what the next `all` would work on, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def why(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
    configfile: Annotated[
        Path | None, typer.Option(help="The model's config; by default the one in configs/ that names the model.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also list what is unchanged.")] = False,
) -> None:
    """Say what the next `snakemake all` would work on and why, without doing any of it."""
    from rich.console import Console
    from rich.table import Table

    from shardmill import config
    from shardmill.errors import ConfigError
    from shardmill.pipeline import origin, remote, snakefile, why
    from shardmill.pipeline.settle import settle
    from shardmill.pipeline.store import Store

    file = configfile or config.find(build.name)
    settings = origin.load(file)
    if settings.model != build.name:
        raise ConfigError(f"{configfile}: is the config of {settings.model}, not of {build.name}; name that one's")
    for problem in snakefile.file_problems(settings):
        raise ConfigError(f"{settings.model}: {problem}")
    settings = settle(settings, str(file), build.parent / ".store")
    verdicts = why.forecast(settings, build, Store(build.parent / ".store", shared=remote.configured()))
    table = Table(box=None, pad_edge=False)
    for column in ("step", "", "because of"):
        table.add_column(column)
    for verdict in verdicts:
        if everything or verdict.status != "unchanged":
            table.add_row(verdict.step, verdict.status, verdict.reason)
    console = Console()
    if table.row_count:
        console.print(table)
    changed, taken = (sum(v.status in which for v in verdicts) for which in (("works", "depends"), ("taken",)))
    brought = f"; {taken} would be taken from the remote store" if taken else ""
    console.print(f"{changed} of {len(verdicts)} cached steps would work or depend on one that would{brought}")
