"""Settles what a config leaves open by the model's own config.json, and refuses there what can't be built.

The file is read by transformers, which takes seconds to import. So what was settled is kept in the store, by all that
decides it, and a Snakefile that is parsed again imports nothing for it. With it is kept how large the parts will be, so
that jobs declare their memory before there is a plan.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.config import Config
from shardmill.errors import ConfigError, ShardmillError
from shardmill.files import digest, load_json, write_json
from shardmill.models import ENCODER, FOLDERS, family_modules, supported
from shardmill.pipeline.fingerprint import code_digest, model_type_in

if TYPE_CHECKING:
    from shardmill.models.architecture import Architecture, Model

STORE = Path("build/.store")
TOPOLOGIES, SIZES = "topologies", "sizes"  # folders of the store
CODE = ("shardmill.topology", *(m for kind in FOLDERS for name in supported(kind) for m in family_modules(name)))


def settle(config: Config, name: str, store: Path = STORE) -> Config:
    """The config with its topology, expert groups and head slices as numbers, or its buckets, held against the model.

    A config that names all and whose checkpoint lies on the hub is left as it is: the split step holds it against the
    model, right after the download. Otherwise config.json alone is fetched.

    Args:
        config: the config.
        name: what an error begins with.
        store: where it is kept.

    Raises:
        ConfigError: in one line, if the model can't be had, or not be built so.
    """
    if config.source.path is None and config.is_settled:
        return config
    kept = _kept(config, store, TOPOLOGIES)
    try:
        found = load_json(kept)
        if config.kind == ENCODER:
            return replace(config, buckets=found["buckets"])
        head = replace(config.head, slices=found["slices"])
        return replace(config, topology=found["topology"], experts=found["experts"], head=head)
    except (OSError, ValueError, LookupError, TypeError):  # not kept yet, or damaged
        settled, architecture, model_type = _settled(config, name)
    chosen: dict[str, Any] = {"buckets": settled.sizes}
    if config.kind != ENCODER:
        chosen = {"topology": settled.ranges, "experts": settled.experts, "slices": settled.slices}
    with contextlib.suppress(OSError):  # a store that may only be read: worked out again the next time
        write_json(kept, chosen)
        write_json(_kept(settled, store, SIZES), {"model_type": model_type} | _sizes(settled, architecture))
    return settled


def expected(config: Config, store: Path = STORE) -> dict[str, Any]:
    """As much of plan.json as memory follows from, of a config that was settled by config.json; OSError of any other.

    With it comes `model_type`, as config.json has it.
    The weights count as two bytes each, for only their files tell whether they are more.
    """
    found: dict[str, Any] = load_json(_kept(config, store, SIZES))
    return found


def _sizes(settled: Config, a: Architecture) -> dict[str, Any]:
    from shardmill.models.contract import table_constants
    from shardmill.plan import empty_parts, part_sizes

    *programs, table = empty_parts(settled, a)
    sizes = {part.name: part_sizes(part, part.parameters) for part in programs}
    sizes[table.name] = part_sizes(table, list(map(prod, table_constants(a).values())))
    return {
        "architecture": {"layers": a.layers, "vocab": a.vocab, "graph": {"experts": a.graph.experts is not None}},
        "item_bytes": 2,
        "buckets": settled.sizes,
        "parts": [{"name": part.name, "kind": part.kind, **sizes[part.name]} for part in (*programs, table)],
    }


def describe(config: Config) -> Model:
    """What the config's model is, by config.json alone; that of a repository is fetched.

    Raises:
        CheckpointError: if it can't be had, or holds what can't be built.
    """
    return _described(config, _config_folder(config))


def _described(config: Config, folder: Path) -> Model:
    from shardmill.models import family
    from shardmill.models.hf_config import described, load_hf_config
    from shardmill.quiet import quiet_transformers
    from shardmill.topology import as_configured

    with quiet_transformers():
        found = load_hf_config(folder)
        model = described(family(found.model_type, config.kind), found, config.length)
    return as_configured(config, model)


def _config_folder(config: Config) -> Path:
    """The folder that the model's config.json lies in, which may be the hub's cache. Raises CheckpointError."""
    if config.source.path is not None:
        return Path(config.source.path)
    from shardmill.checkpoint.hub import HubAccess, download_config

    assert config.source.repo is not None
    return download_config(config.source.repo, config.source.revision, HubAccess()).parent


def _settled(config: Config, name: str) -> tuple[Config, Architecture, str]:
    """Return the settled config, the model's architecture, and the model_type as config.json has it."""
    from shardmill.topology import settled

    try:
        folder = _config_folder(config)
        architecture = _described(config, folder).architecture
        return settled(config, architecture), architecture, model_type_in(folder)
    except ShardmillError as error:
        raise ConfigError(f"{name}: {error}") from error


def _kept(config: Config, store: Path, folder: str) -> Path:
    return store / folder / f"{_key(config)}.json"


def _key(config: Config) -> str:
    """All that decides what is settled."""
    source: dict[str, Any] = asdict(config.source)
    if config.source.path is not None:
        source = {"sha256": hashlib.sha256((Path(config.source.path) / "config.json").read_bytes()).hexdigest()}
    return digest(
        {
            "source": source,
            "length": config.length,
            "buckets": config.sizes,
            "topology": config.topology,
            "experts": config.experts,
            "tokens": config.tokens.max,  # which a ring may not hold
            "slices": config.head.slices,
            "precision": asdict(config.convert.recipe),
            "search": [config.convert.budget and asdict(config.convert.budget), config.convert.search.forms],
            "calls": asdict(config.calls),  # each function holds numbers of its own
            "code": _code(),
            "transformers": version("transformers"),
        }
    )


@cache
def _code() -> str:
    """The digest of what settles a config, the same for every model of a batch."""
    return code_digest(CODE)
