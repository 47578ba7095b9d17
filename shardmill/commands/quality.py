"""Commands that look into a build's numbers: why-quality, audit-range, witness."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.commands.arguments import Build, check_output, make_table
from shardmill.errors import ShardmillError
from shardmill.files import dumps, read_json, read_named
from shardmill.forms.recipe import WORST, costliest, read_recipe
from shardmill.pipeline.words import size
from shardmill.runtime.manifest import read_manifest

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardmill.gates.nonfinite import LayerRangeRow
    from shardmill.plan import Part

WIDE = 200  # columns if the output is no terminal, so that no name is broken


def why_quality(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
) -> None:
    """List the matrices that cost a build most quality: by its search, or else by how far they were rounded."""
    from rich.console import Console

    from shardmill.imports import quiet_coremltools

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
            f"{build}: holds files that this version can't read: another version made them, or they were changed, "
            f"which `shardmill verify {build}` tells"
        ) from error
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(table)


def _measured(build: Path) -> Iterator[str]:
    """Yield the measurements of the gate of the whole stack, passed or not."""
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
    """Return whether the build no longer has the forms that a search chose, because the config names a recipe now."""
    file = build / "precision.json"
    if not file.is_file():
        return False
    now = read_recipe(read_json(file), file.name)
    return any(now.form(path) != form for path, form in search["forms"].items())


def _searched(search: Mapping[str, Any]) -> Table:
    """Return each matrix's predicted cost in the chosen form, and the saving of a form with more bits."""
    columns = ("matrix", "form", "nat", "of all", "saves", "for")
    table = make_table(*columns, right=columns[2:], fold=columns)
    for one in costliest(search):
        more = (f"{one.saves:.2g}", size(one.takes)) if one.takes else ("", "")
        table.add_row(one.path, one.form, f"{one.nats:.2g}", f"{one.share:.1%}", *more)
    return table


def _rounded(build: Path) -> Table:
    """Return the matrices that are stored furthest from the checkpoint's.

    Raises ShardmillError if a file that this function needs is not built yet.
    """
    from shardmill.gates.rounding import kept_db
    from shardmill.gates.weights import PackageWeights
    from shardmill.pipeline.task import source_folder
    from shardmill.plan import HOST_TABLE, load_part

    content, source = read_json(build / "plan.json"), source_folder(build / "source.receipt.json")
    packages = {row["name"]: build / f"packages/{row['name']}.mlpackage" for row in content["parts"]}
    needed = [package for name, package in packages.items() if name != "embedding"]
    if gone := [path for path in (source / "config.json", *needed) if not path.exists()]:
        raise ShardmillError(f"{gone[0]}: is not there (yet); build it first, whether its gate passes or not")
    chosen = read_recipe(read_json(build / "precision.json"), "precision.json")
    losses: dict[str, tuple[float, str]] = {}  # for a matrix in several programs, the program that lost most
    for row in content["parts"]:
        part = load_part(build / f"parts/{row['name']}.json")
        if part.kind != HOST_TABLE:
            stored = PackageWeights(packages[part.name], part, content["prefix"])
            forms = part.forms(chosen)
            for path, db in kept_db(stored, source).items():
                name = part.in_model(path)
                losses[name] = min(losses.get(name, (math.inf, "")), (db, forms[path]))
    columns = ("matrix", "form", "dB")
    table = make_table(*columns, right=("dB",), fold=columns)
    for path, (db, form) in sorted(losses.items(), key=lambda item: item[1][0])[:WORST]:
        table.add_row(path, form, f"{db:.1f}")
    return table


COLUMNS = ("layer", "program", "operation", "output", "largest", "headroom", "overflows", "NaN")


def audit_range(
    build: Build,
    prompts: Annotated[Path, typer.Option(help="Text file; as many of its first tokens as fit the context are run.")],
    operations: Annotated[int, typer.Option(min=0, help="How many of the worst operations to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print every operation as one JSON list.")] = False,
) -> None:
    """Run a text in fp16 and show the largest value of each layer. Exit code 1 if one overflows or turns NaN.

    Headroom is 65504, the largest fp16 number, divided by the largest value seen. Slots that the attention mask hides
    don't count, since their values come from the mask.
    """
    from rich.console import Console

    from shardmill import machine
    from shardmill.imports import quiet_coremltools
    from shardmill.runtime import engine

    if not machine.is_portable():
        raise ShardmillError("audit-range looks inside the portable engine, which does not run on a Mac; use Linux")
    text = read_named(prompts)
    ids = read_tokenizer(build / read_manifest(build)["tokenizer"]["path"]).encode(text).ids
    if not ids:
        raise ShardmillError(f"{prompts} holds no text to run")
    with quiet_coremltools():
        loaded = engine.load(build, "fp16")
        from shardmill.gates import nonfinite
    tokens = ids[: loaded.slots]
    rows = nonfinite.audit_values(loaded, tokens)
    if as_json:
        typer.echo(json.dumps(nonfinite.as_json(rows)))
    else:
        console = Console(markup=False, highlight=False)
        _print_operations(console, "Each layer's largest value", nonfinite.ranges_by_layer(rows))
        _print_operations(console, "The operations nearest to the end of fp16", nonfinite.worst(rows)[:operations])
        console.print(range_summary(rows, len(tokens), nonfinite.first_to_leave(rows)))
    if any(row.leaves for row in rows):
        raise typer.Exit(1)


def _print_operations(console: Console, title: str, rows: Sequence[LayerRangeRow]) -> None:
    """Print one table of operations."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold", justify="left" if column in COLUMNS[1:4] else "right")
    for row in rows:
        figures = f"{row.largest:.4g}", f"{row.headroom:.3g} x", str(row.overflows or ""), str(row.nans or "")
        table.add_row("" if row.layer is None else str(row.layer), row.program, row.kind, row.output, *figures)
    console.print(table)


def range_summary(rows: Sequence[LayerRangeRow], tokens: int, first: LayerRangeRow | None) -> str:
    """Return the closing line: the number of operations that were run, and the first that left fp16."""
    text = f"{len(rows)} operations, {tokens} tokens: "
    if first is None:
        return text + "all stay in fp16"
    where = first.program if first.layer is None else f"layer {first.layer} of {first.program}"
    left = sum(row.leaves for row in rows)
    return text + f"{left} leave fp16, first {first.kind} {first.output} in {where}, from token {first.first} on"


def witness(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
    parts: Annotated[list[str] | None, typer.Argument(help="Names of parts; all of them if left out.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the verdicts are written; by default beside the build.")
    ] = None,
) -> None:
    """Compute each part on Apple's Core AI runtime, with the weights that its package stores, and compare.

    Every part is run at every width of a pass, in mixtures of widths and with rejected drafts. Exit code 1 if a
    number misses its limit.
    """
    from shardmill.gates.measurement import demand
    from shardmill.imports import quiet_coremltools, quiet_transformers
    from shardmill.machine import engine
    from shardmill.plan import load_part
    from shardmill.witness import installed

    runtime = installed.runtime()
    if not (build / "plan.json").is_file():
        raise ShardmillError(f"{build}: contains no plan.json; name a model's build folder")
    plan = read_json(build / "plan.json")
    names = [row["name"] for row in plan["parts"] if row["name"] != "embedding"]
    if unknown := sorted(set(parts or ()) - set(names)):
        raise ShardmillError(f"{build} has no part {unknown[0]}; its parts are {', '.join(names)}")
    file = output or build.resolve().parent / f"{build.resolve().name}.witness.json"
    check_output(file)
    verdicts: dict[str, Any] = {}
    with quiet_coremltools(), quiet_transformers():
        for name in parts or names:
            verdicts[name] = _verdict(build, load_part(build / f"parts/{name}.json"), plan, engine(), runtime)
            print(_line(verdicts[name]), flush=True)
            file.write_text(dumps(verdicts), encoding="utf-8")
    rows = [row for one in verdicts.values() for row in one["gate"]]
    worst = max((one for one in verdicts.values() if one["gate"]), key=_error)
    print(f"furthest from transformers: {worst['part']}, {_error(worst):.1e}; {file}")
    demand("witness", rows)


def _verdict(
    build: Path, part: Part, plan: Mapping[str, Any], engine: Mapping[str, str], runtime: Mapping[str, str]
) -> dict[str, Any]:
    """Return a part's verdict, with its seconds and this process's peak memory so far."""
    from safetensors.torch import load_file

    from shardmill.gates.weights import PackageWeights
    from shardmill.pipeline.job import peak_mb
    from shardmill.pipeline.task import source_folder
    from shardmill.witness.part import witness_measurements, witness_verdict

    package, bundle = build / f"packages/{part.name}.mlpackage", build / f"compiled/{part.name}.mlmodelc"
    source, states = source_folder(build / "source.receipt.json"), build / "reference.safetensors"
    if gone := [path for path in (package, bundle, states, source / "config.json") if not path.exists()]:
        raise ShardmillError(f"{gone[0]}: is not there; the witness needs a build folder as the pipeline made it")
    start = time.monotonic()
    stored = PackageWeights(package, part, plan["prefix"])
    measured = witness_measurements(part, bundle, plan, load_file(states), source, stored)
    verdict = witness_verdict(part.name, engine, runtime, measured)
    return verdict | {"cost": {"seconds": round(time.monotonic() - start, 1), "peak_mb": round(peak_mb())}}


def _line(one: Mapping[str, Any]) -> str:
    """Return one line about a part: the worst number of each measurement, the seconds and the memory."""
    worst: dict[str, float] = {}
    for row in one["gate"]:
        worst[row["name"]] = max(worst.get(row["name"], 0.0), row["value"])
    numbers = ", ".join(f"{name.removeprefix('witness_')} {value:.1e}" for name, value in worst.items())
    return f"{one['part']}: {numbers}; {one['cost']['seconds']:g} s, at most {one['cost']['peak_mb']} MB"


def _error(one: Mapping[str, Any]) -> float:
    """Return how far a part is from transformers."""
    return max(float(row["value"]) for row in one["gate"] if row["name"] == "witness_error")
