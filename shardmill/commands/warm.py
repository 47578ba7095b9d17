"""`shardmill warm`: the first load of a build, before anybody waits for it."""

from __future__ import annotations

from typing import Annotated

import typer

from shardmill.commands.build import Build
from shardmill.commands.drafting import Precision


def warm(
    build: Build,
    precision: Precision = "fp32",
    again: Annotated[bool, typer.Option("--again", help="Also load what an earlier run has loaded.")] = False,
) -> None:
    """Load a build's programs one after the other. If it is stopped, the next run loads the rest."""
    from shardmill.quiet import quiet_coremltools
    from shardmill.runtime.warm import warm as warmed

    with quiet_coremltools():
        for program in warmed(build, precision, again):
            took = "loaded before" if program.seconds is None else f"{program.seconds:.1f} s"
            left = f", about {program.left:.0f} s left" if program.left >= 1 else ""
            typer.echo(f"[{program.place}/{program.of}] {program.name}: {took}{left}")
