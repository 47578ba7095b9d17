"""`shardmill synth-checkpoint`: a checkpoint of a model's real size with seeded random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.files import load_json


def synth_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    like: Annotated[Path, typer.Option(help="A config, whose model's config.json decides the shapes.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers, if other than the model's.")] = None,
) -> None:
    """Write a Hugging Face checkpoint with random weights, to work at full size without a download."""

    from shardmill.errors import ConfigError
    from shardmill.models.hf_config import content_fault
    from shardmill.models.synthetic import synth_checkpoint as write
    from shardmill.pipeline.origin import located, workflow_root
    from shardmill.yamlfile import read_yaml

    content = read_yaml(like)
    source = (content.get("source") or {}) if isinstance(content, dict) else None
    if not isinstance(source, dict) or not isinstance(content.get("model"), str):
        raise ConfigError(f"{like}: no config of a model, see configs/README.md")
    home = Path(located(source.get("path") or f"resources/{content['model']}"))
    try:
        shapes = load_json(home / "config.json")
    except OSError as error:
        raise ConfigError(f"{like}: the model's config.json is not at {home}; put it there") from error
    except ValueError as error:
        raise ConfigError(f"{home / 'config.json'}: not JSON: {error}") from error
    wrong = content_fault(shapes)
    if wrong:
        raise ConfigError(f"{home / 'config.json'}: {wrong}")
    if layers:
        shapes["num_hidden_layers"] = layers
    write(shapes, folder, seed, tokenizer=workflow_root() / "resources/demo")
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB")
