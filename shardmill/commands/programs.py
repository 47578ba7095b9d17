"""Commands that look at programs: inspect, lint, compare-compiled, diff-residency, warm."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.commands.arguments import Build, Precision, make_table
from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.pipeline.words import size
from shardmill.printable import one_line

if TYPE_CHECKING:
    from portable_coreml.files.compare import Contents, ShownFunction, Weights
    from rich.table import Table


def inspect(
    package: Annotated[Path, typer.Argument(help="An .mlpackage or .mlmodel that holds an ML Program.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show a program's inputs, outputs, states, operations and weights."""
    from rich.console import Console

    from shardmill.imports import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.files.compare import read_contents

        with Console(stderr=True).status(f"reading {package}"):
            contents = read_contents(package)  # coremltools is imported when the model is read
    if as_json:
        typer.echo(json.dumps(asdict(contents)))
        return
    console = Console(highlight=False, markup=False)
    for renderable in _render_inspection(contents):
        console.print(renderable, soft_wrap=isinstance(renderable, str))


def _render_inspection(contents: Contents) -> Iterable[str | Table]:
    """Yield the parts of the output, in order."""
    yield f"{contents.path}: ML Program, specification {contents.specification}, {size(contents.bytes)}"
    for function in contents.functions:
        yield ""
        yield one_line(f"function {function.name} ({function.opset})")
        yield _features(function)
        yield _operations(function)
    yield _weights(contents.weights) if contents.weights else "no weight files"


def _features(function: ShownFunction) -> Table:
    table = make_table("", "name", "dtype", "shape")
    groups = (("input", function.inputs), ("output", function.outputs), ("state", function.states))
    for kind, features in groups:
        for feature in features:
            table.add_row(kind, one_line(feature.name), feature.dtype, feature.shape)
    return table


def _operations(function: ShownFunction) -> Table:
    table = make_table("operation", "count", right=("count",))
    for name, count in function.operations:
        table.add_row(one_line(name), str(count))
    table.add_section()
    table.add_row("all", str(sum(count for _, count in function.operations)))
    return table


def _weights(rows: Iterable[Weights]) -> Table:
    figures = ("tensors", "elements", "size")
    table = make_table("weights", *figures, right=figures)
    for row in rows:
        table.add_row(row.dtype, str(row.tensors), f"{row.elements:,}", size(row.bytes))
    return table


STYLES = {"error": "red", "warn": "yellow", "info": "dim"}


def lint(
    path: Annotated[Path, typer.Argument(help="An .mlpackage or .mlmodelc that holds an ML Program.")],
    chip: Annotated[int, typer.Option(min=1, help="Generation of the M-series chip to judge for.")] = 4,
    ios: Annotated[bool, typer.Option("--ios", help="Judge for every iOS that is known.")] = False,
    system: Annotated[
        list[str] | None, typer.Option(help="Judge for this system, such as 'macOS 27'; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Predict by the placement rules what leaves the Neural Engine. Exit code 1 if there is an error."""
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from shardmill.imports import quiet_coremltools

    if (path / "model.json").is_file():
        one = next(iter(sorted(path.glob("packages/*.mlpackage"))), path / "packages/PART.mlpackage")
        raise ShardmillError(f"{path}: is a build; name one of its programs, such as {one}")
    with quiet_coremltools():
        from portable_coreml.judge.limits import asked_for
        from portable_coreml.judge.lint import lint as judge
        from portable_coreml.judge.rule import Target

        rows = judge(path, Target(chip, asked_for(system or (), ios)))  # coremltools is imported when the model is read
    errors = sum(row.severity == "error" for row in rows)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
    else:
        columns = ("", "rule", "operation", "why", "what to do instead")
        table = Table(*(Column(name, overflow="fold") for name in columns), box=None, pad_edge=False)
        several = len({row.function for row in rows}) > 1
        for row in rows:
            mark = Text(row.severity, style=STYLES[row.severity])
            where = f"{row.function}: {row.operation}" if several else row.operation
            table.add_row(mark, *map(one_line, (row.rule, where, row.why, row.remedy)))
        console = Console(markup=False, highlight=False)
        if rows:
            console.print(table)
        console.print(f"{path}: {errors} errors, {len(rows) - errors} remarks, all predicted", soft_wrap=True)
    if errors:
        raise typer.Exit(1)


def _moved(command: str) -> None:
    """Say under which name a command goes on."""
    typer.echo(f"`portable-coreml {command}` is the command's name now", err=True)


def compare_compiled(
    first: Annotated[Path, typer.Argument(help="A compiled bundle, .mlmodelc.")],
    second: Annotated[Path, typer.Argument(help="Another bundle of the same package.")],
) -> None:
    """Show how two compiled bundles differ, apart from build information. Exit code 1 if they do."""
    from shardmill.imports import quiet_coremltools

    _moved("compare-compiled")
    with quiet_coremltools():
        from portable_coreml.files.compare import compare_compiled as compare

        differences = compare(first, second)  # coremltools is imported when a description is read
    for difference in differences:
        typer.echo(one_line(f"{difference.file}: {difference.what}"))
    typer.echo(f"{len(differences)} files differ")
    if differences:
        raise typer.Exit(1)


def diff_residency(
    predicted: Annotated[Path, typer.Argument(help="residency/PART.json of a build made on Linux.")],
    measured: Annotated[
        Path, typer.Argument(help="The same file of a build made on a Mac, or a result.json of `shardmill device`.")
    ],
) -> None:
    """List operations on which a prediction and a measurement disagree. Exit code 1 if there are any."""
    from shardmill.imports import quiet_coremltools

    with quiet_coremltools():
        from portable_coreml.judge.lint import diff_residency as compare
        from portable_coreml.judge.lint import read_report

    from shardmill.evidence.file import is_result

    of_a_device = is_result(measured)
    rules = read_report(predicted, "predicted")
    rows = _of_a_device(predicted, measured) if of_a_device else read_report(measured, "measured")
    differences = compare(rules, rows)
    if not of_a_device:  # portable-coreml knows no builds, to which a result of a device belongs
        _moved("diff-residency")
    for difference in differences:
        typer.echo(one_line(str(difference)))
    left = sum(row.get("status") == "not_chosen" for row in rows)
    aside = f"; {left} could run on the Neural Engine, but were given to another device" if left else ""
    typer.echo(f"{len(differences)} operations differ{aside}")
    if differences:
        raise typer.Exit(1)


def _of_a_device(predicted: Path, result: Path) -> list[dict[str, Any]]:
    """Return the measured rows of the part that a prediction describes.

    Raises:
        ShardmillError: the result contains no measured rows for this part of the prediction's build.
    """
    from shardmill.evidence.build import read_evidence
    from shardmill.runtime.manifest import COMPLETE, read_manifest

    part = str(load_json(predicted).get("part", predicted.stem))
    all_evidence, _ = read_evidence([result], read_manifest(predicted.parent.parent, COMPLETE))
    rows = [row for evidence in all_evidence if evidence.is_measured for row in evidence.residency(part)]
    if not rows:
        raise ShardmillError(f"{result} holds no measured residency of {part} of {predicted.parent.parent}")
    return rows


def warm(build: Build, precision: Precision = "fp32") -> None:
    """Load a build's programs one after the other, and say how long each took, beside its first time on this system."""
    from shardmill.imports import quiet_coremltools
    from shardmill.runtime.warm import warm_programs as warmed

    with quiet_coremltools():
        for program in warmed(build, precision):
            before = "" if program.first is None else f" ({program.first:.1f} s the first time)"
            left = f", about {program.left:.0f} s left" if program.left >= 1 else ""
            typer.echo(f"[{program.place}/{program.of}] {program.name}: {program.seconds:.1f} s{before}{left}")
