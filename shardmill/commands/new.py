"""Commands that begin with a checkpoint on the hub: lock."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardmill.errors import ConfigError, ShardmillError


def lock(
    configs: Annotated[list[Path], typer.Argument(help="Configs, e.g. configs/phi-4-mini.yaml.")],
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Ask the hub anew, in place of keeping the commits that are locked.")
    ] = False,
) -> None:
    """Write the commits of configs' hub repositories into NAME.lock beside each config, from which builds take them."""
    from shardmill.config.problems import read_yaml
    from shardmill.pipeline.locks import relock
    from shardmill.pipeline.resolve import parsed

    for file in configs:
        try:
            typer.echo(relock(parsed(read_yaml(file), str(file)), file, upgrade))
        except ConfigError:
            raise
        except ShardmillError as error:
            raise ConfigError(f"{file}: {error}") from error
