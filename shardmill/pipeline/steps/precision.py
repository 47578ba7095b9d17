"""precision: the form of each matrix, as data that conversion follows and a person can edit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan
from shardmill.errors import ConfigError
from shardmill.files import digest, write_json
from shardmill.forms.recipe import misfits, recipe
from shardmill.pipeline.task import Action, Task, Tools


def task(parts: list[Path], source: list[Path], precision: str, tools: Tools) -> Task:
    """A recipe depends on what the config asks for, and on which matrices there are.

    Args:
        parts: every parts/P.json but that of the embedding.
        source: the file that the config's `convert.precision` names, if it names one.
        precision: the config's `convert.precision`.
        tools: what decides the result besides.
    """
    chosen = recipe(str(source[0]) if source else precision)
    constants = {path: shape for part in parts for path, shape in plan.load_part(part).named_shapes.items()}
    content = chosen.within(constants)

    def work(made: Mapping[str, Path]) -> None:
        for problem in misfits(chosen, constants):
            raise ConfigError(problem)
        write_json(made["recipe"], content)

    names = {"named": sorted(chosen.matrices)} if chosen.strict else {}
    return Task(work, Action("precision", {"content": digest(content)}, names, **tools))
