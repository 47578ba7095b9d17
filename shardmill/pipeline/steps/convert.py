"""convert: one part's canonical Core ML package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan
from shardmill.files import digest, read_json
from shardmill.forms import recipe as recipes
from shardmill.pipeline.steps.coded import has_codes
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder


def task(
    part: Path,
    recipe: Artifact,
    record: Path,
    codes: list[Artifact],
    tools: Tools,
    templates: Path,
    threads: int = 1,
) -> Task:
    """Describe a package, which depends on its part and the forms of its matrices."""
    piece, source = plan.load_part(part), source_folder(record)
    forms = piece.forms(recipes.read_recipe(read_json(recipe.path), recipe.path.name))
    file = codes[0].path if codes and has_codes(codes[0].path, forms) else None

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.convert.stamped import convert_stamped

        convert_stamped(piece, source, forms, made["package"], templates, threads, file)

    inputs = {"part": digest(piece.content)} | ({"codes": codes[0].sha256} if file else {})
    params = {"forms": forms if len({*forms.values()}) > 1 else "".join({*forms.values()})}
    return Task(work, Action("convert", inputs, params, **tools))
