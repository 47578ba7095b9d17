"""`shardmill synth-checkpoint`: a checkpoint of a model's real size with seeded random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def synth_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Where to write; must not exist.")],
    like: Annotated[Path, typer.Option(help="A config: its model's config.json decides the shapes.")],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="Another number of layers.")] = None,
) -> None:
    """Write a Hugging Face checkpoint with random weights, to work at full size without a download."""
    import json

    import yaml

    from shardmill.checkpoint.synthetic import synth_checkpoint as write
    from shardmill.errors import ConfigError

    content = yaml.safe_load(like.read_text())
    source = content.get("source") or {}
    home = Path(source["path"]) if source.get("path") else Path("resources") / content["model"]
    if not (home / "config.json").is_file():
        raise ConfigError(f"{like}: the model's config.json is not at {home}; put it there")
    shapes = json.loads((home / "config.json").read_text())
    if layers:
        shapes["num_hidden_layers"] = layers
    write(shapes, folder, seed, tokenizer=Path("resources/demo"))
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB")
