"""`shardmill device ...`: packs builds for a Mac, and imports the measurements from the Mac."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.commands.arguments import Ungated, check_output, located_build, opened
from shardmill.models.interface import EACH, FREQUENT, TANH
from shardmill.printable import one_line
from shardmill.runtime.manifest import UNGATED

if TYPE_CHECKING:
    from rich.table import Table


app = typer.Typer(help="Measure builds on a Mac that has no shardmill, and import the results.", no_args_is_help=True)

Builds = Annotated[
    list[Path] | None,
    typer.Argument(help="Folders of finished builds, or published ones.", metavar="BUILD...", parser=located_build),
]


@app.command()
def kit(
    context: typer.Context,
    builds: Builds = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The zip to write.")] = Path("kit.zip"),
    questions: Annotated[
        bool, typer.Option("--questions", help="First ask what nobody knows of the system yet; 20 minutes at most.")
    ] = False,
    ungated: Ungated = False,
) -> None:
    """Pack builds, the outputs they should give and the program that measures them into one zip."""
    from rich.console import Console

    from shardmill.device.kit import STEPS, write_kit
    from shardmill.device.questions import questions as asked
    from shardmill.errors import ShardmillError

    if not builds and not questions:
        raise ShardmillError("device kit: name builds to measure, or --questions, or both")
    check_output(output)
    opened_builds = [opened(build, ungated, context) for build in builds or []]
    with Console(stderr=True).status("packing the kit: computing what each program should give"):
        content = write_kit(opened_builds, output, asked() if questions else ())
    names = ", ".join([*(one["text"] for one in content["questions"]), *map(_named, content["variants"])])
    typer.echo(one_line(f"{output}: {names}") + f"; {output.stat().st_size / 1e6:.1f} MB")
    typer.echo(f"On the Mac, with Python 3.10 to 3.13: unzip {output.name} && {STEPS}")


def _named(variant: Mapping[str, Any]) -> str:
    """Return the name of a kit's variant, with a mark if its gates have not passed."""
    return f"{variant['name']} (UNGATED)" if UNGATED in variant["described"] else str(variant["name"])


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="result.json, as measure.py wrote it, or a receipt of `shardmill check`.")
    ],
    builds: Annotated[
        list[Path] | None,
        typer.Argument(help="Builds that may have been measured; default: all in build/.", metavar="[BUILD]..."),
    ] = None,
) -> None:
    """Store a result beside the build that was measured. The next `snakemake all` shows it in the report."""
    from shardmill.device.check import result_of_check
    from shardmill.device.questions import told
    from shardmill.device.recording import import_result
    from shardmill.evidence.file import read_result
    from shardmill.evidence.folder import LIMITS
    from shardmill.evidence.limits import remember

    with result_of_check(file, builds or _builds()) as (result, measured):
        content = read_result(result)
        for line in told(content):
            typer.echo(one_line(line))
        for line in remember(content, Path(LIMITS)):
            typer.echo(one_line(line))
        if "questions" in content and not content["variants"]:
            return
        imported = import_result(result, measured)
    for target, evidence in imported:
        counts = Counter(line["status"] for line in evidence.lines.values())
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        typer.echo(one_line(f"{target}: {evidence.system}: {said}"))


@app.command()
def rank(
    builds: Annotated[
        list[Path] | None, typer.Argument(help="Builds to compare; default: all in build/.", metavar="[BUILD]...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rank the builds of a checkpoint by the speed that was measured on each chip."""
    from shardmill.device.rank import rank_builds as ranked

    rows = ranked(builds or _builds())
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        typer.echo("nothing was imported: make a kit with `shardmill device kit`, and import its result")
        return
    from rich.console import Console

    called = _called(rows)
    for system, group in groupby(rows, key=lambda row: (row["system"], row["source"])):
        typer.echo(one_line(f"{system[0]}: {system[1].partition('@')[0]}"))
        Console().print(_table(group, called))


def _builds() -> list[Path]:
    """Return the finished builds in this folder; a damaged build is left out, and a line reports it."""
    from shardmill.errors import ShardmillError
    from shardmill.runtime.manifest import COMPLETE, read_manifest

    builds = []
    for file in sorted(Path("build").glob("*/model.json")):
        try:
            read_manifest(file.parent, COMPLETE)
            builds.append(file.parent)
        except ShardmillError as error:
            typer.echo(one_line(f"left out: {error}"), err=True)
    return builds


def _called(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return a name for each row's build: its folder's name, or the whole path if two folders share a name."""
    paths = {row["build"] for row in rows}
    names = Counter(Path(path).name for path in paths)
    return {path: one_line(path if names[Path(path).name] > 1 else Path(path).name) for path in paths}


def _table(rows: Iterable[dict[str, Any]], called: Mapping[str, str]) -> Table:
    """Return the table of builds of one checkpoint on one system."""
    from rich.table import Table

    table = Table("place", "build", "form", "ms (tokens a second)", "first load", "trouble")
    for row in rows:
        form, rates = row["form"], row["tokens_per_second"]
        passes = [f"T={width}: {ms:.2f} ({rates[width]:.1f})" for width, ms in row["ms"].items()]
        for slots, times in row["shorter"].items():
            passes += [f"T={width} in {slots} slots: {ms:.2f}" for width, ms in times.items()]
        table.add_row(
            str(row["place"] or "none"),
            _cell(called[row["build"]]),
            _cell(", ".join([form["shapes"], *_apart(form), f"{form['programs']} programs", form["precision"]])),
            "\n".join(passes),
            "" if row["first_load_seconds"] is None else f"{row['first_load_seconds']:.1f} s",
            _cell(row["trouble"]),
        )
    return table


def _cell(text: str) -> str:
    """Return a text from a file for a table, without terminal escapes and markup."""
    from rich.markup import escape

    return escape(one_line(text))


def _apart(form: dict[str, Any]) -> list[str]:
    """Return the other properties of a form in words; older kits do not name them."""
    frequent = ["frequent reshapes"] if form.get("reshape_frequency") == FREQUENT else []
    spelled = ["SiLU by tanh"] if form.get("silu") == TANH else []
    return [*frequent, *spelled, *(["a bundle for each"] if form.get("bundles") == EACH else [])]
