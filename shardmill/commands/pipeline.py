"""Commands around the pipeline: init, plan, why, gc, families, synth-checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardmill.commands.arguments import make_table
from shardmill.errors import ConfigError, ShardmillError
from shardmill.files import load_json
from shardmill.forms.recipe import SEARCH
from shardmill.models.interface import DRAFT_PARTS, FIXED, RANGE, is_apart
from shardmill.models.part_kinds import PART_KINDS
from shardmill.pipeline.words import size

if TYPE_CHECKING:
    from rich.table import Table

    from shardmill.pipeline.preview import Preview


def plan(
    config: Annotated[Path, typer.Argument(help="A config, e.g. configs/demo.yaml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    locked: Annotated[bool, typer.Option("--locked", help="Refuse a commit that no lock says.")] = False,
) -> None:
    """Show what a config would build, without building. Exit code 1 if it can't be built."""
    from rich.console import Console

    from shardmill.pipeline.locks import announce, only_locked
    from shardmill.pipeline.resolve import load_resolved

    with only_locked(locked):
        chosen = load_resolved(config)
    announce([chosen])
    try:
        with Console(stderr=True).status(f"reading {config}"):
            from shardmill.pipeline.preview import preview

            planned = preview(chosen)
    except ShardmillError as error:
        raise ConfigError(f"{config}: {error}") from error
    if as_json:
        typer.echo(json.dumps(asdict(planned)))
    else:
        show_plan(planned)
    if planned.refused:
        raise ConfigError(f"{config}: {'; '.join(planned.refused)}")
    if planned.costs and planned.costs.refused:
        raise ConfigError("; ".join(planned.costs.refused))


def show_plan(plan: Preview) -> None:
    """Print a plan for a person."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for renderable in _render_plan(plan):
        console.print(renderable, soft_wrap=isinstance(renderable, str))


def _render_plan(plan: Preview) -> Iterator[str | Table]:
    """Yield the lines of the output, in order."""
    from shardmill.pipeline import costs

    yield f"{plan.model}: {plan.model_type}, {plan.source}, weights in {plan.weights}"
    if plan.long_factors:
        yield f"context {plan.context}: over the original length: LongRoPE's long factors for short texts too"
    if plan.buckets:
        yield f"task: {plan.task}"
        yield f"buckets: {list(plan.buckets)}"
    yield f"topology: {[list(part) for part in plan.topology]}"
    if not plan.buckets:
        if plan.passes:
            yield f"experts: {plan.expert_groups or 'dense'}"
        yield f"head.slices: {plan.head_slices}"
    yield f"systems: {plan.systems}"
    yield _programs(plan)
    yield from (f"warning: {line}" for line in plan.warnings)
    most = "at most " if plan.weights == SEARCH else ""  # the search may choose forms with fewer bits
    yield f"weights: {most}{plan.bits_per_weight:.2f} bits each, with scales, tables and padding; {_by_bytes(plan)}"
    yield f"host: embedding table of {size(plan.table_bytes)}"
    if plan.rows_bytes:
        read = f"mapped into memory; a token reads {size(plan.row_bytes)} of the table"
        yield f"host: table of {size(plan.rows_bytes)} with rows for each token and layer, {read}"
    if plan.buckets:
        through = f"the {count} programs of " if (count := len(plan.topology)) > 1 else ""
        bucket = f"{through}the smallest bucket that takes it"
        yield f"a pass: one text through {bucket}, reading {size(plan.bytes_per_token)}"
        if plan.windows:
            yield f"a longer text: {plan.windows} windows of {max(plan.buckets)} tokens"
        yield "weights: all buckets have the same weight files, which are stored once"
    else:
        yield _pass(plan)
        if plan.passes:
            yield _by_form(plan)
            yield UNIFORM
        if plan.lengths:
            yield _by_length(plan)
    yield f"tensors: {TENSORS[plan.tensors]}"
    if plan.costs:
        yield from costs.lines(plan.costs)
        yield from (f"warning: {line}" for line in plan.costs.warnings)


def _by_bytes(plan: Preview) -> str:
    """Return the bytes that a pass reads in each form, the largest first."""
    ordered = sorted(plan.bytes_by_form.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{size(count)} in {name}" for name, count in ordered)


UNIFORM = "where experts are routed, that is expected of tokens that take any set of experts as likely as any other"


def _by_form(plan: Preview) -> Table:
    """Return the costs of passes with all experts in the layers' programs, and with groups of experts."""
    figures = ("tokens of a pass", "dispatches", "reads")
    table = make_table("experts", *figures, right=figures)
    for p in plan.passes:
        form = f"routed, {p.groups} groups a layer" if p.groups else p.experts
        table.add_row(form, str(p.tokens), f"{p.dispatches:.4g}", size(p.bytes))
    return table


def _by_length(plan: Preview) -> Table:
    """Return the costs of a token in each context."""
    columns = ("context", "keys and values", "a token reads", "operations")
    table = make_table(*columns, right=columns)
    for one in plan.lengths:
        table.add_row(str(one.slots), size(one.kept), size(one.bytes), f"{one.operations:.3g}")
    return table


def _pass(plan: Preview) -> str:
    """Return the costs of a decoder's pass."""
    most = "at most " if plan.expert_groups else ""
    decoding = f" (decoding: to {plan.verify})" if plan.verify < plan.tokens_max else ""
    counts = f"1 to {plan.tokens_max}"
    if plan.shapes != RANGE:
        counts = " or ".join(map(str, plan.widths)) + (" (a function each)" if plan.shapes == FIXED else "")
    hint = f"; loaded with reshapeFrequency {plan.reshape_frequency}" if plan.reshape_frequency else ""
    chain = [p for p in plan.programs if not is_apart(p.name)]
    return (
        f"a pass: {counts} tokens{decoding}, {most}{len(chain)} dispatches; "
        f"a pass of one token reads {'at most ' if plan.weights == SEARCH else ''}{size(plan.bytes_per_token)}{hint}"
        f"{draft_costs(plan)}{_adapter(plan)}{_images(plan)}"
    )


def _images(plan: Preview) -> str:
    """Return what images or sounds take of the context; empty for a build of text alone."""
    if plan.audio:
        most, rows, frames = plan.audio
        seconds = f"{frames / 100:g} s"  # Whisper's frames, and those of all whom its extractor serves
        return f"\naudio: {most} sounds in a request, of {rows} tokens for {seconds}"
    if not plan.images:
        return ""
    most, rows, pixels, views = plan.images
    size = f"at most {pixels} pixels, {rows} tokens"
    if views == 1:
        return f"\nimages: {most} in a request, each made smaller to {size}"
    cut = f"{views} at most, so {views * rows} tokens" if views else "as many as its image processor's settings say"
    return f"\nimages: {most} in a request, each seen in views of {size}; {cut}"


def _adapter(plan: Preview) -> str:
    """Return the costs of inputs for adapters, and the placement rules' verdict; empty without adapters."""
    if not plan.adapters:
        return ""
    return (
        f"\nadapters to rank {plan.adapters}: inputs of {size(plan.adapter_bytes)}, which a pass reads besides, and "
        f"{plan.adapter_operations:.3g} operations a token, with an adapter or without;\n{plan.adapter_verdict}"
    )


def draft_costs(plan: Preview) -> str:
    """Return the costs of a draft by the build's own drafter, in a line; empty without one."""
    programs = [p for p in plan.programs if p.name in DRAFT_PARTS]
    if not programs:
        return ""
    each = programs if PART_KINDS[programs[0].kind].joins else programs[1:]
    read = size(sum(p.weight_bytes + p.state_bytes + p.lent_bytes for p in each))
    lent = ", the model's caches included" if any(p.lent_bytes for p in programs) else ""
    if each == programs:
        return f"\na draft: {len(programs)} dispatches for each token, which read {read}{lent}"
    return f"\na draft: a dispatch after each pass, and {len(each)} for each token, which read {read}"


PLACED = "on the Neural Engine"  # the systems on which a program is expected there
TENSORS = {
    "match": "those that config.json describes",
    "differ": "not those that config.json describes",
    "unknown": "not known before the checkpoint is fetched",
}


def _programs(plan: Preview) -> Table:
    figures = ("weights", "of the limit", f"states at {plan.context}")
    table = make_table("program", "holds", *figures, PLACED, right=figures, fold=("holds", PLACED))
    table.columns[0].no_wrap = True  # a program's name is what other commands take
    for p in plan.programs:
        layers = ", ".join(f"{count} {name}" for name, count in p.layers.items())
        holds = layers or f"{p.end - p.start} {PART_KINDS[p.kind].holds}"
        share = f"{p.weight_bytes / plan.weight_file_limit:.1%}"
        table.add_row(p.name, holds, size(p.weight_bytes), share, _states(p.state_bytes), p.runs_on)
    table.add_section()
    table.add_row("all", "", size(plan.weight_bytes), "", _states(plan.state_bytes), "")
    return table


def _states(count: int) -> str:
    return size(count) if count else ""


def why(
    build: Annotated[Path, typer.Argument(help="A model's build folder, e.g. build/demo.")],
    configfile: Annotated[
        Path | None, typer.Option(help="The model's config; by default the one in configs/ that names the model.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Also list what is unchanged.")] = False,
) -> None:
    """Show which jobs the next `snakemake all` would run and why, without running them."""
    from rich.console import Console
    from rich.table import Table

    from shardmill import config
    from shardmill.pipeline import resolve, snakefile, why
    from shardmill.pipeline.cache import remote
    from shardmill.pipeline.cache.store import Store
    from shardmill.pipeline.resolve import resolve_config

    file = configfile or config.find_config(build.name)
    settings = resolve.load_resolved(file)
    if settings.model != build.name:
        raise ConfigError(f"{configfile}: is the config of {settings.model}, not of {build.name}; name that one's")
    for problem in snakefile.file_problems(settings):
        raise ConfigError(f"{settings.model}: {problem}")
    settings = resolve_config(settings, str(file), build.parent / ".store")
    verdicts = why.forecast(settings, build, Store(build.parent / ".store"))
    table = Table("step", "", "because of", box=None, pad_edge=False)
    for verdict in verdicts:
        if everything or verdict.status != "unchanged":
            table.add_row(verdict.step, verdict.status, verdict.reason)
    console = Console()
    if table.row_count:
        console.print(table)
    changed = sum(verdict.status != "unchanged" for verdict in verdicts)
    beyond = "; a remote store, which may have their results, was not asked" if changed and remote.configured() else ""
    console.print(f"{changed} of {len(verdicts)} cached steps would work or depend on one that would{beyond}")


def gc(
    builds: Annotated[Path, typer.Argument(help="The folder that holds the builds and their store.")] = Path("build"),
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be removed.")] = False,
) -> None:
    """Remove stored artifacts that no build refers to, and what killed runs left behind."""
    from shardmill.pipeline.cache import gc
    from shardmill.pipeline.cache.lock import hold_lock

    if not (builds / ".store").is_dir():
        raise ShardmillError(f"{builds}: there is no store here (.store); name the folder that holds the builds")
    hold_lock(str(builds))
    removed = gc.collect(builds, dry_run)
    verb = "would remove" if dry_run else "removed"
    typer.echo(f"{verb} {removed.entries} entries, {removed.bytes / 1e6:.1f} MB")


def init(
    folder: Annotated[Path, typer.Argument(help="Folder to make, or one that holds none of the workflow's files.")],
) -> None:
    """Write the workflow, its configs and the demo's checkpoint into a folder, ready for `snakemake --cores 4 all`."""
    from shardmill.pipeline.resolve import lay_out

    lay_out(folder)
    typer.echo(f"cd {folder} && snakemake --cores 4 all    # the demo; your own: configs/README.md")


@dataclass(frozen=True)
class Family:
    """A model_type with its kind of build, the checkpoints that it covers, and the configs for these checkpoints."""

    model_type: str
    kind: str  # "decoder" or "encoder"
    covers: str
    configs: tuple[str, ...]


def families(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """List the model families that can be built, the checkpoints that they cover, and the configs for them."""
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    listed, unknown = list_families(Path("configs"))
    if as_json:
        typer.echo(json.dumps({"families": [asdict(family) for family in listed], "unknown": unknown}))
        return
    folded = [Column(name, overflow="fold") for name in ("covers", "configs")]
    table = Table(Column("model_type", no_wrap=True), "builds as", *folded, box=box.SIMPLE)
    for family in listed:
        table.add_row(family.model_type, family.kind, family.covers, "\n".join(family.configs))
    console = Console(markup=False, highlight=False)
    console.print(table)
    if unknown:
        console.print(f"not known before the checkpoint is fetched: {', '.join(unknown)}", soft_wrap=True)


def list_families(folder: Path) -> tuple[list[Family], list[str]]:
    """Return every supported family with the configs in a folder, and the configs whose model_type is not known."""
    from shardmill.models import FOLDERS, supported

    types = {str(file): _model_type(file) for file in sorted(folder.glob("*.yaml"))}
    families = [
        Family(name, kind, covers(name, kind), tuple(file for file, used in types.items() if used == name))
        for kind in FOLDERS
        for name in supported(kind)
    ]
    return families, [file for file, used in types.items() if not used]


def covers(name: str, kind: str) -> str:
    """Return the checkpoints that a family covers, in the words of its module."""
    from shardmill.models import family

    text = family(name, kind).__doc__ or ""
    return text.partition("\n")[0].removeprefix(f"model_type {name}: ")


def _model_type(file: Path) -> str:
    """Return the model_type of a config's model from the first config.json on this machine; "" if it is missing."""
    from shardmill.config.reading import read_yaml

    try:
        content = read_yaml(file)
        name, path = content["model"], content["source"].get("path")
        folders = [*([Path(path)] if path else []), Path("build") / name / "source", Path("resources") / name]
    except (ConfigError, LookupError, TypeError, AttributeError):  # not a config of a model
        return ""
    for folder in folders:
        try:
            return str(load_json(folder / "config.json")["model_type"])
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return ""


def synth_checkpoint(
    folder: Annotated[Path, typer.Argument(help="Folder to write; must not exist.")],
    like: Annotated[Path, typer.Option(help="A config, whose model's config.json decides the shapes.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers, if other than the model's.")] = None,
) -> None:
    """Write a Hugging Face checkpoint with random weights, to work at full size without a download."""
    from shardmill.config.reading import read_yaml
    from shardmill.imports import needing_lab, quiet_transformers
    from shardmill.models.hf_config import content_fault
    from shardmill.pipeline.resolve import located, workflow_root

    with needing_lab():
        from shardmill_lab.synthetic import write_synthetic_checkpoint as write

    content = read_yaml(like)
    source = (content.get("source") or {}) if isinstance(content, dict) else None
    if not isinstance(source, dict) or not isinstance(content.get("model"), str):
        raise ConfigError(f"{like}: no config of a model, see configs/README.md")
    home = Path(located(source.get("path") or f"resources/{content['model']}"))
    try:
        shapes = load_json(home / "config.json")
    except OSError as error:
        raise ConfigError(f"{like}: the model's config.json is not at {home}; put it there") from error
    except ValueError as error:
        raise ConfigError(f"{home / 'config.json'}: not JSON: {error}") from error
    wrong = content_fault(shapes)
    if wrong:
        raise ConfigError(f"{home / 'config.json'}: {wrong}")
    if layers:
        shapes["num_hidden_layers"] = layers
    with quiet_transformers():
        write(shapes, folder, seed, tokenizer=workflow_root() / "resources/demo")
    size = sum(file.stat().st_size for file in folder.iterdir())
    typer.echo(f"{folder}: {size / 1e9:.2f} GB")
