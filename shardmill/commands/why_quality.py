"""`shardmill why-quality`: which matrices cost a build its quality, and what more bits of them would buy."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.commands.size import size
from shardmill.forms.costly import WORST, costliest

if TYPE_CHECKING:
    from rich.table import Table

WIDE = 200  # columns where nobody looks at a terminal, so that no name is broken
RIGHT = {"nat", "of all", "saves", "for", "dB"}


def why_quality(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
) -> None:
    """List the matrices that cost a build most quality: by its search, or else by how far they were rounded."""
    from rich.console import Console

    from shardmill.errors import ShardmillError
    from shardmill.files import read_json
    from shardmill.quiet import quiet_coremltools

    if not (build / "plan.json").is_file():
        raise ShardmillError(f"{build}: holds no plan.json; name a model's build folder")
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    file = build / "search.json"
    try:
        lines = list(_measured(build))
        search = read_json(file) if file.is_file() else None
        with quiet_coremltools():
            table = _rounded(build) if search is None or _is_past(search, build) else _searched(search)
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ShardmillError(
            f"{build}: holds files that were changed; `shardmill verify {build}` names them"
        ) from error
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(table)


def _measured(build: Path) -> Iterator[str]:
    """What the gate of the whole stack measured, passed or not."""
    from shardmill.files import read_json
    from shardmill.gates.thresholds import COST
    from shardmill.pipeline.verdict import failed

    verdict = build / "parity/stack.json"
    file = next((file for file in (verdict, failed(verdict)) if file.is_file()), None)
    if file is None:
        yield "the whole has not been measured yet"
        return
    for row in read_json(file)["gate"]:
        if row["question"] == COST:
            yield f"{row['name']} {float(row['value']):.4g}, must be {row['threshold']}: {row['meaning']}"


def _is_past(search: Mapping[str, Any], build: Path) -> bool:
    """Whether a search chose other forms than the build has by now: the config names a recipe since."""
    from shardmill.files import read_json
    from shardmill.forms import recipe

    file = build / "precision.json"
    if not file.is_file():
        return False
    now = recipe.read(read_json(file), file.name)
    return any(now.form(path) != form for path, form in search["forms"].items())


def _searched(search: Mapping[str, Any]) -> Table:
    """What each matrix was foreseen to cost in the form that was chosen, and in the next with more bits."""
    table = _table("matrix", "form", "nat", "of all", "saves", "for")
    for one in costliest(search):
        more = (f"{one.saves:.2g}", size(one.takes)) if one.takes else ("", "")
        table.add_row(one.path, one.form, f"{one.nats:.2g}", f"{one.share:.1%}", *more)
    return table


def _rounded(build: Path) -> Table:
    """The matrices that are stored furthest from the checkpoint's. Raises ShardmillError for what is not built yet."""
    from shardmill.errors import ShardmillError
    from shardmill.files import read_json
    from shardmill.forms import recipe
    from shardmill.gates.rounding import kept_db
    from shardmill.gates.weights import PackageWeights
    from shardmill.pipeline.task import source_folder
    from shardmill.plan import load_part

    content, source = read_json(build / "plan.json"), source_folder(build / "source.receipt.json")
    packages = {row["name"]: build / f"packages/{row['name']}.mlpackage" for row in content["parts"]}
    needed = [package for name, package in packages.items() if name != "embedding"]
    if gone := [path for path in (source / "config.json", *needed) if not path.exists()]:
        raise ShardmillError(f"{gone[0]}: is not there (yet); build it first, whether its gate passes or not")
    chosen = recipe.read(read_json(build / "precision.json"), "precision.json")
    kept: dict[str, tuple[float, str]] = {}  # of a matrix in several programs, the one that lost most
    for row in content["parts"]:
        part = load_part(build / f"parts/{row['name']}.json")
        if part.kind != "embedding":
            stored = PackageWeights(packages[part.name], part, content["prefix"])
            forms = part.forms(chosen)
            for path, db in kept_db(stored, source).items():
                name = part.in_model(path)
                kept[name] = min(kept.get(name, (math.inf, "")), (db, forms[path]))
    table = _table("matrix", "form", "dB")
    for path, (db, form) in sorted(kept.items(), key=lambda item: item[1][0])[:WORST]:
        table.add_row(path, form, f"{db:.1f}")
    return table


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="right" if column in RIGHT else "left", overflow="fold")
    return table
