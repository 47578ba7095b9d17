"""`shardmill rotate`: a checkpoint that loses less in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rotate(
    checkpoint: Annotated[Path, typer.Argument(help="The folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
) -> None:
    """Rotate a checkpoint's weights: it stays the same model, to within fp32's rounding, but loses less in INT4."""

    from shardmill.quiet import quiet_coremltools, quiet_transformers

    with quiet_coremltools(), quiet_transformers():
        from shardmill.precision.rotate import rotate as write

        difference = write(checkpoint, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB; its logits differ from the original's by {difference:.1e}")
