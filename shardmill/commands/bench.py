"""`shardmill bench`: the speed of a built model on this machine, with and without drafting."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.commands.arguments import (
    Build,
    Precision,
    Ungated,
    check_draft_build,
    check_output,
    located_build,
    opened,
)
from shardmill.commands.generate import marked
from shardmill.commands.serve import GuardMargin
from shardmill.files import how_to_build
from shardmill.runtime.manifest import ENCODER, RUNTIME, UNGATED, holds_encoder, read_manifest

if TYPE_CHECKING:
    from rich.table import Table

    from shardmill.config import Benchmark

FULL = "default: all"
TIMES = "default: 5"
SPEED = "benchmark/speed.json"


def bench(
    context: typer.Context,
    build: Build,
    draft: Annotated[
        Path | None, typer.Option(help="Build of a draft model, to measure drafting with it too.", parser=located_build)
    ] = None,
    drafter: Annotated[list[str] | None, typer.Option(help=f"Drafter to measure, repeatable; {FULL}.")] = None,
    prompt_tokens: Annotated[
        list[int] | None, typer.Option(help="Prompt length in tokens, repeatable; default: 100, 200, 372, 800.")
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help=f"Task to measure, repeatable; {FULL}.")] = None,
    prompts_per_task: Annotated[int | None, typer.Option(help="Prompts of each task; default: 3.")] = None,
    new_tokens: Annotated[int | None, typer.Option(help="Tokens to generate per request; default: 80.")] = None,
    repetitions: Annotated[int | None, typer.Option(help=f"Measurements, whose median counts; {TIMES}.")] = None,
    text: Annotated[
        str | None, typer.Option(help="Text to cut prompts from; default: resources/text/code.txt.")
    ] = None,
    task_prompts: Annotated[
        str | None, typer.Option(help="Folder of the tasks' prompts; default: resources/tasks.")
    ] = None,
    guard_margin: GuardMargin = 0.0,
    precision: Precision = "fp32",
    output: Annotated[
        Path | None, typer.Option(help=f"File to write; default: {SPEED} in the build, or beside a build without it.")
    ] = None,
    ungated: Ungated = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")] = False,
) -> None:
    """Measure a built model through its server, with every drafter and without any. Run it on a quiet machine."""
    wanted = {
        "drafters": drafter,
        "prompt_tokens": prompt_tokens,
        "tasks": task,
        "prompts_per_task": prompts_per_task,
        "new_tokens": new_tokens,
        "repetitions": repetitions,
        "text": text,
        "task_prompts": task_prompts,
    }
    home, build = build, opened(build, ungated, context)
    encodes = holds_encoder(build)
    manifest = read_manifest(build, ENCODER if encodes else RUNTIME)
    settings = _benchmark_settings({name: value for name, value in wanted.items() if value not in (None, [], ())})
    from shardmill.bench import sentences
    from shardmill.bench.speed import benchmark
    from shardmill.files import cache_folder, give_back, write_json

    file = output or _default_file(home, manifest)
    check_output(file)
    say = partial(typer.echo, err=True)
    if encodes:
        measured = sentences.benchmark_encoder(build, settings, precision, say)
    else:
        if draft is not None:
            check_draft_build(draft, manifest)
        measured = benchmark(build, settings, draft, precision, say=say, guard_margin=guard_margin)
    measured |= marked(manifest)
    write_json(file, measured)
    give_back(file)
    if sys.platform == "darwin":  # on a Mac, sudo does not change HOME
        give_back(cache_folder())
    if as_json:
        typer.echo(json.dumps(measured))
    else:
        (_show_sentences if encodes else _print_figures)(measured)
        drawn = f"; `{how_to_build(home)}` draws it into report.html" if file == home / SPEED else ""
        typer.echo(f"written to {file}{drawn}")


def _default_file(build: Path, manifest: Mapping[str, Any]) -> Path:
    """Return where the figures go: over the figures that the pipeline measured, or beside the build.

    Figures of an ungated build never take the place of the pipeline's.

    `verify` refuses a file that no record names, as of a config with `benchmark: false`, and other bytes in a build
    that is signed or published.
    """
    from shardmill.records.audit import BUNDLE
    from shardmill.records.names import RECEIPT

    measured = (build / SPEED).with_suffix(RECEIPT).is_file()
    redrawn = measured and not (build / BUNDLE).exists() and UNGATED not in manifest
    return build / SPEED if redrawn else build.resolve().parent / f"{build.resolve().name}.speed.json"


def _benchmark_settings(wanted: dict[str, Any]) -> Benchmark:
    """Return the settings; raises ConfigError for values that make no sense."""
    from pydantic import ValidationError

    from shardmill.config import Benchmark
    from shardmill.config.reading import describe_all
    from shardmill.errors import ConfigError

    try:
        return Benchmark(**wanted)
    except ValidationError as error:
        raise ConfigError(describe_all(error)) from error


def _show_sentences(measured: dict[str, Any]) -> None:
    """Print an encoder's figures."""
    row = measured["sentences"]
    typer.echo(
        f"{row['count']} sentences of {row['tokens']} tokens: {row['per_second']:.1f} a second, "
        f"{row['alone']['per_second']:.1f} one by one"
    )
    for one in measured["passes"]:
        typer.echo(f"a pass of {one['bucket']} tokens takes {one['ms']:.2f} ms")
    for gap in measured["not_run"]:
        typer.echo(f"not run: {gap['what']}: {gap['reason']}")


def _print_figures(measured: dict[str, Any]) -> None:
    """Print the figures as tables."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    start, seconds = measured["start"], measured["pass_seconds"]
    console.print(
        f"ready after {start['ready_seconds']:.2f} s; first request {start['first_request_seconds']:.3f} s, "
        f"later ones {start['later_request_seconds']:.3f} s"
    )
    if seconds:
        passes = ", ".join(f"T={width} {1e3 * took:.2f} ms" for width, took in seconds.items())
        pays = measured["break_even"]
        console.print(f"a pass takes {passes}" + (f"; drafting pays above {pays:.2f} tokens per pass" if pays else ""))
    for row in measured["prefill"]:
        console.print(
            f"prefill of {row['prompt_tokens']} tokens at T={row['width']}: {row['tokens_per_second']:.1f} tok/s, "
            f"{row['over_decode']:.2f} x decoding at T=1"
        )
    for name, rows in (("tokens", measured["sweep"]), ("task", measured["tasks"])):
        if rows:
            console.print(_speed_table(name, rows))
        for row in rows:
            if row["verified_again"]:
                share, group = row["verified_again_share"], row.get("prompt_tokens", row.get("task"))
                console.print(f"{group}, {row['drafter']}: {share:.1%} of the tokens were run again alone")
    for gap in measured["not_run"]:
        console.print(f"not run: {gap['what']}: {gap['reason']}")


def _speed_table(name: str, rows: list[dict[str, Any]]) -> Table:
    """Return the sweep's or the tasks' rows."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for column in (name, "drafter", "ms/token", "speed-up", "of pairs", "tok/pass", "accepted", "same"):
        made.add_column(column, justify="left" if column in (name, "drafter") else "right", no_wrap=True)
    for row in rows:
        low, high = row["speedup_range"]
        figures = [f"{row[key]:.2f}" for key in ("ms_per_token", "speedup")]
        live = row["live"]
        rate = "-" if live["rate"] is None else f"{live['rate']:.0%}"
        group = str(row.get("prompt_tokens", row.get("task")))
        rest = [f"{low:.2f} to {high:.2f}", f"{live['tokens_per_pass']:.2f}", rate, f"{row['exact']:.0%}"]
        made.add_row(group, row["drafter"], *figures, *rest)
    return made
