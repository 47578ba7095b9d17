"""`shardmill warm`: the first load of a build, before anybody waits for it."""

from __future__ import annotations

import typer

from shardmill.commands.build import Build
from shardmill.commands.drafting import Precision


def warm(build: Build, precision: Precision = "fp32") -> None:
    """Load a build's programs one after the other, and say how long each took, beside its first time on this system."""
    from shardmill.quiet import quiet_coremltools
    from shardmill.runtime.load import warm as warmed

    with quiet_coremltools():
        for program in warmed(build, precision):
            before = "" if program.first is None else f" ({program.first:.1f} s the first time)"
            left = f", about {program.left:.0f} s left" if program.left >= 1 else ""
            typer.echo(f"[{program.place}/{program.of}] {program.name}: {program.seconds:.1f} s{before}{left}")
