"""search: the forms that a budget buys, and what other budgets would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import plan
from shardmill.errors import ConfigError
from shardmill.files import digest, read_json, write_json
from shardmill.pipeline.task import Action, Artifact, Task, Tools


def task(parts: list[Path], costs: list[Artifact], budget: Mapping[str, Any] | None, tools: Tools) -> Task:
    """The chosen form of each matrix, with estimates of it and of the front.

    Args:
        parts: every parts/P.json but that of the embedding.
        costs: what the step sensitivity made of each.
        budget: the config's `convert.budget`.
        tools: what decides the result besides.
    """
    assert budget is not None, "a build without a search has no such step"
    limits = {name: value for name, value in budget.items() if value is not None}

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.budget import searched

        pieces = [plan.load_part(part) for part in parts]
        found = searched(pieces, [read_json(cost.path)["matrices"] for cost in costs], limits)
        if found is None:
            raise ConfigError(f"convert.budget: no forms keep to {limits}; INT8 and INT4 can't")
        write_json(made["chosen"], found)

    inputs = {
        "parts": digest([plan.load_part(part).content for part in parts]),
        "costs": digest([c.sha256 for c in costs]),
    }
    return Task(work, Action("search", inputs, {"budget": limits}, **tools))
