"""`shardmill sign`: say with a key that a build is yours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.commands.build import Build


def sign(
    build: Build,
    key: Annotated[Path, typer.Option(help="Your private key: PEM, curve P-256, P-384 or P-521, no password.")],
) -> None:
    """Sign a build: its attestations in DSSE envelopes, and all that leaves the machine by an OpenSSF model signature.

    Works without a network. Verify with `shardmill verify BUILD --key PUBLIC`, or with other tools: docs/signing.md.
    """
    from shardmill.release.sign import sign as sign_build

    for name in sign_build(build, key):
        typer.echo(build / name)
