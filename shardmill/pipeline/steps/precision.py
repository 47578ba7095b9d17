"""precision: the form of each matrix, as data that conversion follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardmill import plan
from shardmill.errors import ConfigError
from shardmill.files import digest, read_json, write_json
from shardmill.forms.recipe import recipe, recipe_misfits
from shardmill.pipeline.task import Action, Artifact, Task, Tools


def task(
    parts: list[Path], source: list[Path], chosen: list[Artifact], precision: str, towers: str, tools: Tools
) -> Task:
    """Describe a recipe, which depends on the config and on the matrices of the parts.

    `precision` is the config's `convert.precision`, `source` the file that it names, if it names one, and `towers` the
    config's `images.form`.
    """
    wanted = replace(recipe(str(source[0]) if source else precision), towers=towers)
    if chosen:
        wanted = replace(wanted, matrices=read_json(chosen[0].path)["forms"])
    constants = {path: shape for part in parts for path, shape in plan.load_part(part).named_shapes.items()}
    content = wanted.within(constants)

    def work(made: Mapping[str, Path]) -> None:
        for problem in recipe_misfits(wanted, constants):
            raise ConfigError(problem)
        write_json(made["recipe"], content)

    names = {"named": sorted(wanted.matrices)} if wanted.strict else {}
    return Task(work, Action("precision", {"content": digest(content)}, names, **tools))
