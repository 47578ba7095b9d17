"""Adds an adapter in PEFT's layout to a build: what `shardmill adapter add` checks, and what it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.peft import CONFIG, WEIGHTS, LoraHeader, LoraModule, check_targets, read_lora
from shardmill.errors import CheckpointError, ShardmillError
from shardmill.files import replacing, sealed, write_json
from shardmill.models import family
from shardmill.models.architecture import ModelDescription, name_in_tower
from shardmill.models.hf_config import load_hf_config, model_description
from shardmill.printable import printable
from shardmill.runtime.adapter_inputs import Halves, laid_out, projection_sources
from shardmill.runtime.adapters import FOLDER, NAME, RECEIPT, TENSORS, AdapterInfo, adapter_rank, base_digest
from shardmill.runtime.manifest import read_manifest

TOWERS = ("model.language_model.", "language_model.model.")  # where a larger model has its decoder


def add_adapter(build: Path, folder: Path, name: str) -> AdapterInfo:
    """Lay the adapter of a PEFT folder into a build; one of the same name is replaced.

    Args:
        build: the build's folder.
        folder: the folder with the adapter.
        name: the name under which requests ask for it.

    Raises:
        ShardmillError: if the build takes no adapters, or not this one.
    """
    manifest = read_manifest(build)
    _check_name(name)
    if not adapter_rank(manifest):
        raise ShardmillError(
            f"{build}: its programs take no adapters; set `program.adapters` in its config and build again"
        )
    lora = read_lora(folder)
    _check_base(lora, manifest)
    if lora.rank > adapter_rank(manifest):
        larger = f"set `program.adapters: {lora.rank}` and build again"
        raise ShardmillError(
            f"{folder}: its rank is {lora.rank}, {build} takes {adapter_rank(manifest)} at most; {larger}"
        )
    texts = build / manifest["texts"]["path"]
    hf = load_hf_config(texts)
    model = model_description(family(hf.model_type), hf, manifest["context"])
    inputs = _arrays(lora, model, manifest)
    content = {
        "name": name,
        "rank": lora.rank,
        "modules": len(lora.tensors),
        "base": _repository(lora.base),  # a folder's path would tell where it was trained
        "base_digest": base_digest(manifest),
        "peft": {file: hash_file(folder / file) for file in (CONFIG, WEIGHTS)},
    }
    place = build / FOLDER / name
    with replacing(place) as new:
        new.mkdir(parents=True)
        _save(inputs, new / TENSORS)
        write_json(new / RECEIPT, sealed(content | {"sha256": hash_file(new / TENSORS)}))
    return AdapterInfo(name, lora.rank, len(lora.tensors), _repository(lora.base))


def _check_name(name: str) -> None:
    """Raise ShardmillError for a name that no adapter can have."""
    if not NAME.fullmatch(name):
        rule = "letters, digits, '.', '_' and '-', at most 64, a letter or digit first"
        raise ShardmillError(f"{printable(name)!r} can't be an adapter's name: {rule}; give another with --name")


def _save(inputs: Mapping[str, Halves], file: Path) -> None:
    from safetensors.numpy import save_file

    save_file(dict(inputs), file)


def _check_base(lora: LoraHeader, manifest: Mapping[str, Any]) -> None:
    """Raise ShardmillError if the adapter and the build name different repositories; a folder's name tells nothing."""
    repo, base = manifest["source"].get("repo"), _repository(lora.base)
    if repo and base and base.lower() != repo.lower():
        same = f"if both are the same weights, write {repo} into {CONFIG}"
        raise ShardmillError(f"{lora.folder}: is an adapter of {base}, the build is of {repo}; {same}")


def _repository(base: str) -> str:
    """Return a base model's name if it is a repository on the hub, or ""."""
    return base if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists() else ""


def _arrays(lora: LoraHeader, model: ModelDescription, manifest: Mapping[str, Any]) -> dict[str, Halves]:
    """Return an adapter as inputs of programs: arrays [1, n, rows, width] by PART.INPUT.

    Args:
        lora: the adapter.
        model: the description of the base model.
        manifest: model.json's content, or plan.json's.

    Raises:
        CheckpointError: if the adapter changes a module that programs have no inputs for, or does not fit.
    """
    a = model.architecture
    described = a.graph, dict(enumerate(a.kinds)), model.sources
    named, places = {_in_decoder(module): module for module in lora.tensors}, dict(projection_sources(*described))
    strange = sorted(named.keys() - {source.module for source in places.values()})
    if strange:
        what = printable(named[strange[0]])
        raise CheckpointError(f"{lora.folder}: changes {what}, for which the programs have no inputs")
    check_targets(lora, [named.get(source.module, source.module) for source in places.values()])
    parts = [part for part in manifest["parts"] if "adapters" in part]

    def read(module: str) -> LoraModule | None:
        return lora.read(named[module]) if module in named else None

    return laid_out(read, *described, parts, adapter_rank(manifest), lora.folder)


def _in_decoder(module: str) -> str:
    """Return a module's name in a model that is only a decoder, as transformers names it."""
    return next((name_in_tower(tower, module) for tower in TOWERS if module.startswith(tower)), module)
