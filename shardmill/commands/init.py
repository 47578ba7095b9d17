"""`shardmill init`: a folder to build in, without a clone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make, or one that holds none of the workflow's files.")],
) -> None:
    """Write the workflow, its configs and the demo's checkpoint into a folder, ready for `snakemake --cores 4 all`."""
    from shardmill.pipeline.origin import lay_out

    lay_out(folder)
    typer.echo(f"cd {folder} && snakemake --cores 4 all    # the demo; your own: configs/README.md")
