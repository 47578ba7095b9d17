"""Commands that begin with a checkpoint on the hub: new, lock."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardmill.errors import ConfigError, ShardmillError

if TYPE_CHECKING:
    from shardmill.pipeline.locks import Locked

CONTEXT = 2048  # slots where neither the command nor the model says less
CONFIGS = Path("configs")
INDEXES = ("model.safetensors.index.json", "modules.json")
OF_SENTENCES = "modules.json"  # sentence-transformers writes it beside models that embed texts


def new(
    source: Annotated[str, typer.Argument(help="hf:OWNER/NAME, hf:OWNER/NAME@REVISION, or a folder.")],
    context: Annotated[
        int | None, typer.Option(min=1, help="Key/value slots; by default 2048, or as many as the model takes.")
    ] = None,
) -> None:
    """Write a config for a checkpoint, and its lock, after a look that downloads nothing large; show the plan."""
    from rich.console import Console

    from shardmill.commands.pipeline import show_plan
    from shardmill.files import write_text
    from shardmill.pipeline.locks import say, write_lock
    from shardmill.pipeline.preview import preview
    from shardmill.pipeline.resolve import parsed

    with Console(stderr=True).status(f"looking at {source}"):
        origin, locked, folder, names = _looked_at(source)
        content = _content(source, origin, folder, names, context)
        file = (CONFIGS if CONFIGS.is_dir() else Path()) / f"{content['model']}.yaml"
        if file.exists():
            raise ConfigError(f"{file}: is there already; remove it, or build it")
        config = parsed(content, source)
        if locked:
            config = replace(config, source=locked.source(file.with_suffix(".lock")))
        try:
            plan = preview(config)
        except ShardmillError as error:
            raise ConfigError(f"{source}: {error}") from error
    if plan.refused:
        raise ConfigError(f"{source}: {'; '.join(plan.refused)}")
    if locked:
        say(write_lock(file.with_suffix(".lock"), [locked], keep_others=False))
    write_text(file, _text(source, content, plan.model_type, locked))
    say(f"wrote {file}")
    show_plan(plan)
    typer.echo(f"next: snakemake --cores 4 all --configfile {file}")


def _looked_at(source: str) -> tuple[dict[str, Any], Locked | None, Path, Collection[str]]:
    """Return a config's `source`, its lock if it needs one, a folder with config.json, and the checkpoint's files.

    Raises:
        CheckpointError: in one line, what is missing.
    """
    from shardmill.checkpoint.layout import weight_files
    from shardmill.checkpoint.paths import ADDRESS, ON_HUB, is_commit
    from shardmill.errors import CheckpointError
    from shardmill.pipeline.locks import MAIN, resolved

    address = ADDRESS.fullmatch(source) if source.startswith(ON_HUB) else None
    if address is None:
        if source.startswith(ON_HUB):
            raise ConfigError(f"{source}: not an address; write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
        folder, where, locked = Path(source), source, None
        if not folder.is_dir():
            raise ConfigError(f"{source}: no such folder; a repository on the hub is hf:OWNER/NAME")
        names: Collection[str] = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
        origin: dict[str, Any] = {"path": source}
    else:
        from shardmill.checkpoint.hub import download_config
        from shardmill.checkpoint.hub_listing import HubAccess

        repo, revision = address["repo"], address["revision"]
        entry = resolved(repo, revision or MAIN)
        folder = download_config(repo, entry.commit, HubAccess(), entry.files, INDEXES).parent
        names, where = {name for name, _, _ in entry.files}, f"{repo}@{entry.commit[:7]}"
        origin = {"repo": repo} | ({"revision": revision} if revision else {})
        locked = None if is_commit(revision) else entry
    weight_files(folder, names, where)
    if "tokenizer.json" not in names:
        raise CheckpointError(f"{where}: holds no tokenizer.json; save one there with transformers' save_pretrained")
    return origin, locked, folder, names


def _content(
    source: str, origin: dict[str, Any], folder: Path, names: Collection[str], context: int | None
) -> dict[str, Any]:
    """Return a config for a checkpoint. Raises ConfigError for a family that can't be built."""
    from shardmill.files import load_json
    from shardmill.models import DECODER, ENCODER, supported, type_fault
    from shardmill.models.hf_config import content_fault

    try:
        settings = load_json(folder / "config.json")
    except ValueError as error:
        raise ConfigError(f"{source}: config.json is not JSON: {error}") from error
    wrong = content_fault(settings) or type_fault(settings["model_type"])
    if wrong:
        raise ConfigError(f"{source}: {wrong}")
    kinds = [kind for kind in (DECODER, ENCODER) if settings["model_type"] in supported(kind)]
    base = {"model": _name(str(origin.get("repo") or folder.resolve().name)), "source": origin}
    if kinds == [ENCODER] or (ENCODER in kinds and OF_SENTENCES in names):
        if context:
            raise ConfigError(f"{source}: an encoder has no context; leave --context out, and edit `buckets` later")
        return base | {"buckets": "auto"}
    inner = settings.get("text_config")
    limits = [one.get("max_position_embeddings") for one in (settings, inner) if isinstance(one, dict)]
    slots = context or min([CONTEXT, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])
    return base | {"context": slots} | ({"parity": {"positions": slots}} if slots < 64 else {})


def _name(text: str) -> str:
    """Return a model's name made of a repository's or a folder's."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.rpartition("/")[2].lower()).strip("-.") or "model"


def _text(source: str, content: dict[str, Any], model_type: str, locked: Locked | None) -> str:
    """Return a config as a person would write it."""
    import yaml

    lines = [f"# {source}, a {model_type}. Every key: configs/README.md."]
    name = content["model"]
    upgrade = f"{name}.lock has the commit; `shardmill lock --upgrade {name}.yaml` takes a newer one."
    comments = COMMENTS | ({"source": upgrade} if locked else {})
    for key, value in content.items():
        lines += [f"# {comments[key]}"] if key in comments else []
        lines.append(yaml.safe_dump({key: value}, default_flow_style=False, sort_keys=False, width=1000).rstrip())
    return "\n".join([*lines, LATER, ""])


COMMENTS = {
    "context": "Key/value slots: the most tokens that the model sees at once.",
    "buckets": "The tokens that each program takes; auto: 128 and 512, or what the model takes.",
}
LATER = "# convert: {precision: int8}    # or fp16, int4, search: see docs/precision.md"


def lock(
    configs: Annotated[list[Path], typer.Argument(help="Configs, e.g. configs/phi-4-mini.yaml.")],
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Ask the hub anew, in place of keeping the commits that are locked.")
    ] = False,
) -> None:
    """Write the commits of configs' hub repositories into NAME.lock beside each config, from which builds take them."""
    from shardmill.config.reading import read_yaml
    from shardmill.pipeline.locks import relock
    from shardmill.pipeline.resolve import parsed

    for file in configs:
        try:
            typer.echo(relock(parsed(read_yaml(file), str(file)), file, upgrade))
        except ConfigError:
            raise
        except ShardmillError as error:
            raise ConfigError(f"{file}: {error}") from error
