"""`shardmill rotate`: a checkpoint that few bits hold better."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rotate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; must not exist.")],
) -> None:
    """Rotate a checkpoint's weights: the same model, to fp32's rounding, and one that INT4 changes less."""

    from shardmill.quiet import quiet_coremltools, quiet_transformers

    with quiet_coremltools(), quiet_transformers():
        from shardmill.precision.rotate import rotate as write

        difference = write(checkpoint, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB; its logits differ from the original's by {difference:.1e}")
