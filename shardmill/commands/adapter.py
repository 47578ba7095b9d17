"""`shardmill adapter`: LoRA adapters in PEFT's layout, for builds whose programs take them as inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.commands.arguments import Build, make_table

app = typer.Typer(help="Add LoRA adapters to a build, list and remove them.", no_args_is_help=True)


@app.command()
def add(
    build: Build,
    folder: Annotated[Path, typer.Argument(help="Folder with adapter_config.json and adapter_model.safetensors.")],
    name: Annotated[str | None, typer.Option(help="Name for requests; by default the folder's.")] = None,
) -> None:
    """Check an adapter and lay it into a build; one of the same name is replaced."""
    from shardmill.runtime.adapters import FOLDER
    from shardmill.runtime.adding import add_adapter

    called = folder.resolve().name if name is None else name
    before = (build / FOLDER / called).exists()
    added = add_adapter(build, folder, called)
    if before:
        typer.echo(f"{added.name}: takes the place of the adapter that had this name", err=True)
    typer.echo(f"{added.name}: rank {added.rank}, changes {added.modules} modules of {added.base or 'its base'}")


@app.command("list")
def list_all(build: Build) -> None:
    """List the adapters of a build."""
    from rich.console import Console

    from shardmill.runtime.adapters import adapters_of

    table = make_table("adapter", "rank", "modules", "base model", right=("rank", "modules"), fold=("base model",))
    for one in adapters_of(build):
        table.add_row(one.name, str(one.rank), str(one.modules), one.base)
    Console().print(table)


@app.command()
def remove(build: Build, name: Annotated[str, typer.Argument(help="The adapter's name.")]) -> None:
    """Remove an adapter from a build."""
    from shardmill.runtime.adapters import remove_adapter

    remove_adapter(build, name)
