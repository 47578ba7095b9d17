"""`shardmill plan`: what a config would build."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.size import size
from shardmill.forms.recipe import SEARCH
from shardmill.models.calls import FIXED, RANGE

if TYPE_CHECKING:
    from rich.table import Table

    from shardmill.pipeline.preview import Preview


def plan(
    config: Annotated[Path, typer.Argument(help="A config, e.g. configs/demo.yaml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a config would build, without building. Exit code 1 if it can't be built."""
    from rich.console import Console

    from shardmill.errors import ConfigError, ShardmillError
    from shardmill.pipeline.origin import load

    chosen = load(config)
    try:
        with Console(stderr=True).status(f"reading {config}"):
            from shardmill.pipeline.preview import preview

            found = preview(chosen)
    except ShardmillError as error:
        raise ConfigError(f"{config}: {error}") from error
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        console = Console(highlight=False, markup=False)
        for renderable in render(found):
            console.print(renderable, soft_wrap=isinstance(renderable, str))
    if found.refused:
        raise ConfigError(f"{config}: {'; '.join(found.refused)}")


def render(found: Preview) -> Iterator[str | Table]:
    """What a person reads, in order."""
    yield f"{found.model}: {found.model_type}, {found.source}, weights in {found.weights}"
    if found.buckets:
        yield f"task: {found.task}"
        yield f"buckets: {list(found.buckets)}"
    else:
        yield f"topology: {[list(part) for part in found.topology]}"
        if found.passes:
            yield f"experts: {found.expert_groups or 'dense'}"
        yield f"head.slices: {found.head_slices}"
    yield _programs(found)
    most = "at most " if found.weights == SEARCH else ""  # it takes what the search leaves of it
    yield f"weights: {most}{found.bits_per_weight:.2f} bits each, with scales, tables and padding; {_by_bytes(found)}"
    yield f"host: embedding table of {size(found.table_bytes)}"
    if found.buckets:
        yield f"a pass: one text through the smallest bucket that takes it, reading {size(found.bytes_per_token)}"
        if found.windows:
            yield f"a longer text: {found.windows} windows of {max(found.buckets)} tokens"
        yield "weights: the programs' weight files are the same, and are stored once"
    else:
        yield _pass(found)
        if found.passes:
            yield _by_form(found)
            yield UNIFORM
        if found.lengths:
            yield _by_length(found)
    yield f"tensors: {TENSORS[found.tensors]}"


def _by_bytes(found: Preview) -> str:
    """What a pass reads of each form, the most first."""
    ordered = sorted(found.bytes_by_form.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{size(count)} in {name}" for name, count in ordered)


UNIFORM = "where experts are routed, that is expected of tokens that take any set of experts as likely as any other"


def _by_form(found: Preview) -> Table:
    """What passes of a model with experts take, with all of them in the layers' programs and with groups of them."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("experts", "tokens of a pass", "dispatches", "reads"):
        table.add_column(column, justify="left" if column == "experts" else "right")
    for p in found.passes:
        form = f"routed, {p.groups} groups a layer" if p.groups else p.experts
        table.add_row(form, str(p.tokens), f"{p.dispatches:.4g}", size(p.bytes))
    return table


def _by_length(found: Preview) -> Table:
    """What a token takes in each context."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in ("context", "keys and values", "a token reads", "operations"):
        table.add_column(column, justify="right")
    for one in found.lengths:
        table.add_row(str(one.slots), size(one.kept), size(one.bytes), f"{one.operations:.3g}")
    return table


def _pass(found: Preview) -> str:
    """What a decoder's pass takes."""
    most = "at most " if found.expert_groups else ""
    decoding = f" (decoding: to {found.verify})" if found.verify < found.tokens_max else ""
    counts = f"1 to {found.tokens_max}"
    if found.shapes != RANGE:
        counts = " or ".join(map(str, found.widths)) + (" (a function each)" if found.shapes == FIXED else "")
    hint = f"; loaded with reshapeFrequency {found.reshape_frequency}" if found.reshape_frequency else ""
    return (
        f"a pass: {counts} tokens{decoding}, {most}{len(found.programs)} dispatches; "
        f"a pass of one token reads {'at most ' if found.weights == SEARCH else ''}{size(found.bytes_per_token)}{hint}"
    )


TENSORS = {
    "match": "those that config.json describes",
    "differ": "not those that config.json describes",
    "unknown": "not known before the checkpoint is fetched",
}


def _programs(found: Preview) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("program")
    table.add_column("holds", overflow="fold")
    for column in ("weights", "of the limit", f"states at {found.context}"):
        table.add_column(column, justify="right")
    for p in found.programs:
        share = f"{p.weight_bytes / found.weight_file_limit:.1%}"
        table.add_row(
            p.name,
            _holds(p.layers) or f"{p.end - p.start} {'experts' if p.kind == 'experts' else 'rows'}",
            size(p.weight_bytes),
            share,
            _states(p.state_bytes),
        )
    table.add_section()
    table.add_row("all", "", size(found.weight_bytes), "", _states(found.state_bytes))
    return table


def _holds(layers: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in layers.items())


def _states(count: int) -> str:
    return size(count) if count else ""
