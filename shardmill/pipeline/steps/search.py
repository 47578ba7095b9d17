"""search: the best forms within a budget, and within other budgets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import plan
from shardmill.files import digest, read_json, write_json
from shardmill.pipeline.task import Action, Artifact, Task, Tools


def task(parts: list[Path], costs: list[Artifact], settings: Mapping[str, Any] | None, tools: Tools) -> Task:
    """Describe the chosen form of each matrix, with estimates of the front and of sets that will be measured.

    The settings: the config's `convert.budget`, and `forms` and `measured` of its `convert.search`.
    """
    assert settings is not None, "only a build with a search has this step"
    limits = {name: value for name, value in settings["budget"].items() if value is not None}
    forms, points = settings["forms"], settings["measured"]

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.search import searched

        pieces = [plan.load_part(part) for part in parts]
        rows = [read_json(cost.path)["matrices"] for cost in costs]
        write_json(made["chosen"], searched(pieces, rows, limits, forms, points))

    inputs = {
        "parts": digest([plan.load_part(part).content for part in parts]),
        "costs": digest([c.sha256 for c in costs]),
    }
    return Task(work, Action("search", inputs, {"budget": limits, "forms": forms, "points": points}, **tools))
