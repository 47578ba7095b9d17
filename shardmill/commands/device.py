"""`shardmill device ...`: builds out to a Mac, and what was measured there back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.commands.build import located_build

app = typer.Typer(
    help="Measure builds on a Mac that has no shardmill, and take in what was measured.", no_args_is_help=True
)

Builds = Annotated[
    list[Path],
    typer.Argument(help="Folders of finished builds, or published ones.", metavar="BUILD...", parser=located_build),
]


@app.command()
def kit(
    builds: Builds,
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")] = Path("kit.zip"),
) -> None:
    """Pack builds with what they should give and what measures them: one zip that needs coremltools only."""
    from shardmill.device.kit import write_kit

    content = write_kit(builds, output)
    names = ", ".join(variant["name"] for variant in content["variants"])
    typer.echo(f"{output}: {names}; {output.stat().st_size / 1e6:.1f} MB. On the Mac: unzip it, python3 measure.py")
