"""The config of a build: the workflow's files, settings that were left open, and texts that must not overlap."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardmill
from shardmill import files
from shardmill.checkpoint.tokenizer import single_tokens
from shardmill.config import Benchmark, Config, Parity, Source, parse
from shardmill.config.model import BUCKETS
from shardmill.config.reading import read_yaml
from shardmill.errors import ConfigError, ShardmillError
from shardmill.files import digest, load_json, write_json
from shardmill.models import ENCODER, FOLDERS, family_modules, supported
from shardmill.models.interface import HOST, MTP
from shardmill.models.recurrences import RECURRENCES
from shardmill.models.towers import supported_towers, with_tower
from shardmill.pipeline.code_digest import code_digest, model_type_in
from shardmill.pipeline.locks import with_locks
from shardmill.pipeline.options import is_locked, locked, settings
from shardmill.records.attest import PATHS

if TYPE_CHECKING:
    from shardmill.models.architecture import Architecture, ModelDescription
    from shardmill.models.eagle3 import DrafterDescription

SNAKEFILE = "Snakefile"
PARTS = (SNAKEFILE, "rules", "scripts", "envs", "report", "configs", "profiles", "resources", "constraints.txt")
DEFAULTS: Mapping[tuple[str, ...], str] = {  # values of keys of PATHS that are not given
    ("parity", "text"): Parity().text,
    ("benchmark", "text"): Benchmark().text,
    ("benchmark", "task_prompts"): Benchmark().task_prompts,
}
LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", ".DS_Store", "._*")


def workflow_root() -> Path:
    """Return the folder with the Snakefile. Raises ShardmillError where this installation has none."""
    package = Path(shardmill.__file__).resolve().parent
    for folder in (package.parent, package / "workflow"):
        if (folder / SNAKEFILE).is_file():
            return folder
    raise ShardmillError(
        f"{package}: holds no workflow; install shardmill anew: pip install --force-reinstall shardmill"
    )


def default_config() -> str:
    """Return the demo's config: the working folder's or, where that has none, the workflow's own."""
    local = Path("configs/demo.yaml")
    return str(local if local.is_file() else workflow_root() / local)


def load_resolved(path: Path) -> Config:
    """Return the config in a file, as a build takes it; its lock is read, and not written. Raises ConfigError."""
    return with_locks(parsed(read_yaml(path), str(path)), path, str(path))


def parsed(content: Any, name: str) -> Config:
    """Return the config of a mapping, with its files where they are. Raises ConfigError with `name` in front."""
    return parse(grounded(content) if isinstance(content, Mapping) else content, name)


def grounded(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config whose files are found in the working folder or, failing that, beside the workflow.

    So a workflow in another folder that uses this one as a module finds the demo's checkpoint and the texts.
    """
    content = dict(config)
    for keys in PATHS:
        path = _value(content, keys, DEFAULTS.get(keys))
        if isinstance(path, str) and located(path) != path:
            content = _with(content, keys, located(path))
    return content


def located(path: str) -> str:
    """Return where a file or a folder is: in the working folder or, where it is not there, beside the workflow."""
    beside = workflow_root() / path
    return os.path.relpath(beside) if not Path(path).exists() and beside.exists() else path


def _value(content: Any, keys: Sequence[str], default: Any) -> Any:
    """Return what a config has at a key of its sections; None where something else than a section is in the way."""
    for section in keys[:-1]:
        content = content.get(section, {}) if isinstance(content, Mapping) else None
    return content.get(keys[-1], default) if isinstance(content, Mapping) else None


def _with(content: Mapping[str, Any], keys: Sequence[str], value: str) -> dict[str, Any]:
    """Return a config with another value at a key of its sections."""
    first, *others = keys
    return {**content, first: _with(content.get(first, {}), others, value) if others else value}


def lay_out(folder: Path) -> None:
    """Make a folder to run Snakemake in: a copy of the workflow, its configs, texts and the demo's checkpoint.

    Raises:
        ShardmillError: something of that name is there.
    """
    root = workflow_root()
    if folder.exists() and not folder.is_dir():
        raise ShardmillError(f"{folder}: is there already, and no folder; choose another name")
    existing = [name for name in PARTS if (folder / name).exists()]
    if existing:
        raise ShardmillError(f"{folder / existing[0]}: is there already; choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=LEFT)
        else:
            shutil.copyfile(root / name, folder / name)
    (folder / "config").symlink_to("configs")


WIDER = (min(BUCKETS), 520)  # past the lengths that rule S11 warns of; a multiple of 8
STORE = Path("build/.store")
TOPOLOGIES, SIZES = "topologies", "sizes"  # folders of the store
CODE = (
    "shardmill.topology",
    "shardmill.checkpoint.tokenizer",
    *(m for kind in FOLDERS for name in supported(kind) for m in family_modules(name)),
    *(f"shardmill.models.towers.{name}" for name in supported_towers()),
)


def resolve_config(config: Config, name: str, store: Path = STORE, begins: Callable[[], None] = lambda: None) -> Config:
    """Return the config with topology, expert groups, head slices and buckets checked against the model.

    A config that leaves nothing open and whose checkpoint lies on the hub is returned unchanged: the split step checks
    it against the model, right after the download. Otherwise config.json alone is fetched.

    Args:
        config: the config.
        name: the start of an error message.
        store: the folder that keeps the result.
        begins: called before work that takes seconds: the result is not kept yet.

    Raises:
        ConfigError: in one line, if the model can't be had, or not be built so.
    """
    if config.source.path is None and config.is_resolved:
        return config
    file = _kept(config, store, TOPOLOGIES)
    try:
        cached = load_json(file)
        if config.kind == ENCODER:
            return replace(config, buckets=cached["buckets"], topology=cached["topology"])
        head = replace(config.head, slices=cached["slices"])
        return replace(config, topology=cached["topology"], experts=cached["experts"], head=head)
    except (OSError, ValueError, LookupError, TypeError):  # not kept yet, or damaged
        begins()
        resolved, architecture, model_type = _resolved(config, name)
    chosen: dict[str, Any] = {"topology": resolved.ranges}
    if config.kind == ENCODER:
        chosen |= {"buckets": resolved.sizes}
    else:
        chosen |= {"experts": resolved.experts, "slices": resolved.slices}
    with contextlib.suppress(OSError):  # a store that may only be read: worked out again the next time
        write_json(file, chosen)
        write_json(_kept(resolved, store, SIZES), {"model_type": model_type} | plan_sizes(resolved, architecture))
    return resolved


def expected(config: Config, store: Path = STORE) -> dict[str, Any]:
    """Return as much of plan.json as memory follows from, for a config that was resolved by config.json.

    With it comes `model_type`, as config.json has it.
    The weights count as two bytes each, for only their files tell whether they are more.
    """
    sizes: dict[str, Any] = load_json(_kept(config, store, SIZES))
    return sizes


def plan_sizes(resolved: Config, a: Architecture) -> dict[str, Any]:
    """Return as much of plan.json as memory follows from; weights count as two bytes each."""
    from shardmill.models.part_kinds import table_constants
    from shardmill.plan import empty_parts, part_sizes

    *programs, table = empty_parts(resolved, a, describe_drafter(resolved, a))
    sizes = {part.name: part_sizes(part, part.parameters) for part in programs}
    sizes[table.name] = part_sizes(table, list(map(prod, table_constants(a).values())))
    return {
        "architecture": {
            "layers": a.layers,
            "vocab": a.vocab,
            "graph": {
                "experts": a.graph.experts is not None,
                "per_layer": a.graph.per_layer,
                "per_layer_table": a.graph.per_layer_table,
                **{name: getattr(a.graph, name) is not None for name in RECURRENCES},
            },
        },
        "item_bytes": 2,
        "buckets": resolved.sizes,
        "parts": [
            {"name": part.name, "kind": part.kind, **sizes[part.name], **({"drafter": True} if part.drafter else {})}
            for part in (*programs, table)
        ],
    }


def described_to_fit(config: Config, folder: Path | None = None) -> tuple[Config, ModelDescription]:
    """Return the config with its experts as they fit into programs, and the model's description with these.

    Args:
        config: the config.
        folder: where config.json lies; by default it is found, or fetched.

    Raises:
        CheckpointError: if config.json can't be read, or its model can't be built.
    """
    from shardmill.topology import as_configured, with_fitting_experts

    model = _described(config, folder or _config_folder(config.source))
    fitting = with_fitting_experts(config, model.architecture)
    return fitting, model if fitting == config else as_configured(fitting, model)


def _described(config: Config, folder: Path) -> ModelDescription:
    from shardmill.imports import quiet_transformers
    from shardmill.models import family
    from shardmill.models.hf_config import load_hf_config, model_description
    from shardmill.topology import as_configured

    with quiet_transformers():
        hf = load_hf_config(folder)
        model = model_description(family(hf.model_type, config.kind), hf, config.length)
        model = with_tower(model, folder, "images" if config.images else "audio") if config.tower else model
    return as_configured(config, model)


def describe_drafter(config: Config, target: Architecture) -> DrafterDescription | None:
    """Return the description of a config's drafter for a model; None without one. Raises CheckpointError."""
    from shardmill.checkpoint.headers import read_tensors
    from shardmill.models import mtp
    from shardmill.models.drafters import describe_checkpoint
    from shardmill.models.hf_config import load_hf_config

    if config.drafter is None:
        return None
    source = config.sources[-1]
    folder = _config_folder(source)
    names = None if source.path is None else read_tensors(folder)
    if config.drafter == MTP:
        return mtp.describe(load_hf_config(folder), names, target, config.length, vocab=config.head.draft_vocab_size)
    return describe_checkpoint(folder, names, target, config.length, hosted=config.program.state == HOST)


def _config_folder(source: Source) -> Path:
    """Return the folder of a checkpoint's config.json, which may be the hub's cache. Raises CheckpointError."""
    if source.path is not None:
        return Path(source.path)
    from shardmill.checkpoint.hub import download_config
    from shardmill.checkpoint.hub_listing import HubAccess

    assert source.repo is not None
    rows = source.files if is_locked(source) else None
    return download_config(source.repo, source.revision, HubAccess(), rows).parent


def _resolved(config: Config, name: str) -> tuple[Config, Architecture, str]:
    """Return the resolved config, the model's architecture, and the model_type as config.json has it."""
    from shardmill.topology import overweight_drafter, resolve_topology

    try:
        config = fitted(config)
        folder = _config_folder(config.source)
        config, model = described_to_fit(config, folder)
        architecture = model.architecture
        check_labels(config)
        resolved, drafter = resolve_topology(config, architecture), describe_drafter(config, architecture)
        for problem in overweight_drafter(resolved, architecture, drafter) if drafter else ():
            raise ConfigError(problem)
        return resolved, architecture, model_type_in(folder)
    except ShardmillError as error:
        raise ConfigError(f"{name}: {error}") from error


def fitted(config: Config) -> Config:
    """Return the config with the buckets that `auto` stands for: none is longer than the texts that the model takes.

    A model with a sliding window on both sides has WIDER ones where it takes so many tokens.

    Raises CheckpointError if the checkpoint's files can't be read.
    """
    from shardmill.checkpoint.modules import longest_text
    from shardmill.models.hf_config import load_hf_config

    if config.buckets != "auto":
        return config
    folder = _config_folder(config.source)
    limits = (longest_text(folder), getattr(load_hf_config(folder), "max_position_embeddings", None))
    most = min((limit for limit in limits if limit), default=max(WIDER))
    usual, wider = (replace(config, buckets=tuple(sorted({min(n, most) for n in each}))) for each in (BUCKETS, WIDER))
    if most <= max(BUCKETS):
        return usual
    a = _described(wider, folder).architecture
    return wider if a.band is not None and not a.causal else usual


def check_labels(config: Config) -> None:
    """Check that each of `program.labels` is a token of a checkpoint in a folder; of one on the hub, split does it.

    Raises:
        CheckpointError: the tokenizer can't be read.
        ConfigError: a label is no token.
    """
    if config.program.labels and config.source.path is not None:
        single_tokens(Path(config.source.path) / "tokenizer.json", config.program.labels)


def _kept(config: Config, store: Path, folder: str) -> Path:
    return store / folder / f"{_key(config)}.json"


def _key(config: Config) -> str:
    """Return a digest of all that decides the resolved settings: any setting may, so a key is rather too wide."""
    return digest(
        {
            "config": settings(config),
            "locked": locked(config),
            "recipe": asdict(config.convert.recipe),
            "files": [_identity(source) for source in config.sources],
            "code": _code(),
            "transformers": version("transformers"),
        }
    )


def _identity(source: Source) -> dict[str, Any]:
    """Return a digest of what is read of a checkpoint in a folder: JSON files, and the headers of weights."""
    folder = Path(source.path) if source.path is not None else None
    files = sorted(folder.iterdir()) if folder and folder.is_dir() else []
    hashes: dict[str, Any] = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.suffix == ".json"
    }
    return hashes | {file.name: _header_digest(file) for file in files if file.suffix == ".safetensors"}


def _header_digest(file: Path) -> str:
    """Return a digest of the header of a safetensors file: its length in eight bytes, and so many bytes of JSON."""
    with file.open("rb") as stream:
        size = stream.read(8)
        return hashlib.sha256(size + stream.read(min(int.from_bytes(size, "little"), file.stat().st_size))).hexdigest()


@cache
def _code() -> str:
    """Return the digest of what resolves a config, the same for every model of a batch."""
    return code_digest(CODE)


CALIBRATION = "convert.calibration.text"
LONG = 40  # characters of a line that two texts hardly share by chance
SHARED = 0.1  # of a text's long lines


def read_corpus(path: Path) -> str:
    """Return a text without white space around it. Raises ConfigError where it is not UTF-8."""
    try:
        return files.read_text(path).strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text") from error


def overlaps(texts: Mapping[str, str]) -> list[str]:
    """Name the texts for quality measurements that share parts with the calibration text.

    Args:
        texts: each by its key in the config.
    """
    seen = texts.get(CALIBRATION)
    if not seen:
        return []
    known = _long_lines(seen)
    return [
        f"{CALIBRATION}: shares text with {key}, and what was calibrated on can't be judged by it; choose another"
        for key, text in texts.items()
        if key != CALIBRATION and text and _shares(text, seen, known)
    ]


def _shares(text: str, seen: str, known: set[str]) -> bool:
    lines = _long_lines(text)
    return text in seen or seen in text or len(lines & known) > SHARED * len(lines)


def _long_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.splitlines()) if len(line) >= LONG}
