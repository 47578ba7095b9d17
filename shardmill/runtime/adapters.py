"""Adapters of a build: what `shardmill adapter add` makes of a PEFT folder, and what an engine puts into its programs.

An adapter NAME lies in the build's folder `adapters/NAME`: adapter.safetensors holds the inputs of the programs as
models/adapters.py lays them out, each in fp16 and called PART.INPUT, and adapter.json is the receipt. The receipt names
the base by a digest of the packages, so an adapter is never used with other weights or with another form of programs.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.checkpoint.hashing import hash_file
from shardmill.checkpoint.peft import CONFIG, WEIGHTS, LoraHeader, LoraModule, Matrix, check_targets, read_lora
from shardmill.errors import AdapterError, CheckpointError, ShardmillError, UnreadableError
from shardmill.files import digest, read_sealed, replacing, sealed, write_json
from shardmill.models import family
from shardmill.models.adapters import DOWN, Factor, layer_stacks
from shardmill.models.architecture import Graph, ModelDescription, TensorSource, blocks, name_in_tower
from shardmill.models.hf_config import load_hf_config, model_description
from shardmill.models.layer_constants import Shape, mixer_constants
from shardmill.printable import printable
from shardmill.runtime.manifest import read_manifest

FOLDER, RECEIPT, TENSORS = "adapters", "adapter.json", "adapter.safetensors"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
TOWERS = ("model.language_model.", "language_model.model.")  # where a larger model has its decoder
HALF_MAX = 65504.0  # the largest fp16 number
Halves = NDArray[np.float16]


@dataclass(frozen=True)
class AdapterInfo:
    """A build's adapter, in short.

    Attributes:
        rank: the largest rank of its matrices.
        modules: how many modules it changes.
        base: the base model's repository, as the adapter has it; "" if it names a folder.
    """

    name: str
    rank: int
    modules: int
    base: str


def _rank(manifest: Mapping[str, Any]) -> int:
    """Return the largest rank of adapters that a build's programs take; 0 if they take none."""
    return int(manifest.get("adapters", 0))


def _base_digest(manifest: Mapping[str, Any]) -> str:
    """Return a digest of the packages of the programs that take an adapter."""
    taking = [part["name"] for part in manifest["parts"] if "adapters" in part]
    return digest({name: manifest["packages"][name]["files"] for name in taking})


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
    if not _rank(manifest):
        raise ShardmillError(
            f"{build}: its programs take no adapters; set `program.adapters` in its config and build again"
        )
    lora = read_lora(folder)
    _check_base(lora, manifest)
    if lora.rank > _rank(manifest):
        larger = f"set `program.adapters: {lora.rank}` and build again"
        raise ShardmillError(f"{folder}: its rank is {lora.rank}, {build} takes {_rank(manifest)} at most; {larger}")
    texts = build / manifest["texts"]["path"]
    hf = load_hf_config(texts)
    model = model_description(family(hf.model_type), hf, manifest["context"])
    inputs = _arrays(lora, model, manifest)
    content = {
        "name": name,
        "rank": lora.rank,
        "modules": len(lora.tensors),
        "base": _repository(lora.base),  # a folder's path would tell where it was trained
        "base_digest": _base_digest(manifest),
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


def adapter_names(build: Path) -> list[str]:
    """Return the names of a build's adapters, sorted."""
    found = (file.parent.name for file in (build / FOLDER).glob(f"*/{RECEIPT}"))
    return sorted(name for name in found if NAME.fullmatch(name))


def adapters_of(build: Path) -> list[AdapterInfo]:
    """Return the adapters of a build by name. Raises ShardmillError for a damaged receipt."""
    receipts = (_receipt(build, name) for name in adapter_names(build))
    return [AdapterInfo(**{key: one[key] for key in ("name", "rank", "modules", "base")}) for one in receipts]


def recorded_files(build: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each file of an adapter, its sha256 and the receipt that names it; of a damaged receipt, nothing."""
    for name in adapter_names(build):
        receipt = f"{FOLDER}/{name}/{RECEIPT}"
        with suppress(AdapterError):
            content = _receipt(build, name)
            yield receipt, hash_file(build / receipt), receipt
            yield f"{FOLDER}/{name}/{TENSORS}", content["sha256"], receipt


def remove_adapter(build: Path, name: str) -> None:
    """Remove an adapter of a build. Raises AdapterError if the build has no adapter of that name."""
    _receipt(build, name)
    shutil.rmtree(build / FOLDER / name)


def adapter_digest(build: Path, name: str) -> str:
    """Return the sha256 of an adapter's inputs, as its receipt has it. Raises AdapterError, see `load_adapter`."""
    return str(_receipt(build, name).get("sha256"))


def load_adapter(build: Path, manifest: Mapping[str, Any], name: str) -> dict[str, dict[str, Halves]]:
    """Return the inputs of an adapter by part and by name, each [1, n, rows, width].

    Raises:
        AdapterError: if the build has no adapter of that name, or it is damaged, or was made for another base.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    receipt, file, again = _receipt(build, name), build / FOLDER / name / TENSORS, "add it again"
    if receipt.get("base_digest") != _base_digest(manifest):
        raise AdapterError(f"{file.parent}: was made for other programs than {build} has now; {again}")
    try:
        if hash_file(file) != receipt.get("sha256"):
            raise AdapterError(f"{file}: is not the file that was added; {again}")
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{file} can't be read: {error}; {again}") from error
    found: dict[str, dict[str, Halves]] = {}
    for part in manifest["parts"]:
        for one in part.get("adapters", {}):
            found.setdefault(part["name"], {})[one] = tensors[f"{part['name']}.{one}"]
    return found


def check_adapter(build: Path, manifest: Mapping[str, Any], name: str) -> None:
    """Raise AdapterError if a build has no adapter of that name, before any program is loaded."""
    if not _rank(manifest):
        raise AdapterError(
            f"{build}: its programs take no adapters; set `program.adapters` in its config and build again"
        )
    _receipt(build, name)


def _receipt(build: Path, name: str) -> dict[str, Any]:
    """Return an adapter's receipt. Raises AdapterError if it is missing or damaged."""
    file = build / FOLDER / name / RECEIPT
    if not NAME.fullmatch(name) or not file.is_file():
        has = f"it has {', '.join(adapter_names(build)) or 'none'}"
        raise AdapterError(f"{build}: no adapter is called {printable(name)!r}; {has} (`shardmill adapter add`)")
    try:
        return read_sealed(file)
    except UnreadableError as error:
        raise AdapterError(f"{error}; add the adapter again") from error


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
    named, places = {_in_decoder(module): module for module in lora.tensors}, dict(_places(model))
    strange = sorted(named.keys() - {source.module for source in places.values()})
    if strange:
        what = printable(named[strange[0]])
        raise CheckpointError(f"{lora.folder}: changes {what}, for which the programs have no inputs")
    check_targets(lora, [named.get(source.module, source.module) for source in places.values()])
    parts = [part for part in manifest["parts"] if "adapters" in part]
    return laid_out(
        lambda module: lora.read(named[module]) if module in named else None, model, parts, _rank(manifest), lora.folder
    )


def laid_out(
    read: Callable[[str], LoraModule | None],
    model: ModelDescription,
    parts: Sequence[Mapping[str, Any]],
    rank: int,
    where: Path,
) -> dict[str, Halves]:
    """Return matrices as inputs of programs: arrays [1, n, rows, width] by PART.INPUT.

    Args:
        read: returns the matrices of a module, by its name in transformers' decoder; None if it stays as it is.
        model: the description of the base model.
        parts: the entries of parts that take adapters, in plan.json or model.json.
        rank: the rows of a matrix in the inputs.
        where: what the matrices come from, for errors.

    Raises:
        CheckpointError: if matrices do not fit their module, or fp16 can't hold them.
    """
    a = model.architecture
    taken = [(part, name) for part in parts for name in part["adapters"]]
    arrays = {f"{part['name']}.{name}": np.zeros(part["inputs"][name], np.float16) for part, name in taken}
    for (index, projection), source in _places(model):
        slices = [(p, name, p["adapters"][name].index(index)) for p, name in taken if index in p["adapters"][name]]
        lora = read(source.module) if slices else None
        if lora is None:
            continue
        stacks = layer_stacks(a.graph, a.kinds[index])
        columns = next(stack.width for stack in stacks.values() if Factor(projection, DOWN) in stack.factors)
        down, up = _pair(lora, source, columns, f"{where}: {printable(source.module)}")
        for part, name, place in slices:
            for i, factor in enumerate(stacks[name].factors):
                if factor.projection == projection:
                    values = down if factor.side == DOWN else up.T
                    arrays[f"{part['name']}.{name}"][0, place, i * rank : i * rank + len(values)] = values
    return arrays


@dataclass(frozen=True)
class RowSource:
    """The rows of a module's weight that make up a projection, in order, and the factor that they have there.

    Attributes:
        held: how many rows the weight has.
    """

    module: str
    rows: NDArray[np.int64]
    held: int
    times: float


def _places(model: ModelDescription) -> Iterator[tuple[tuple[int, str], RowSource]]:
    """Yield the source of each projection that programs have inputs for, by its layer and its path there."""
    a = model.architecture
    for index, kind in enumerate(a.kinds):
        shapes = mixer_constants(a.graph, kind)
        paths = {factor.projection for stack in layer_stacks(a.graph, kind).values() for factor in stack.factors}
        for path in sorted(paths):
            constant, rows = _constant(a.graph.of(kind), path)
            found = blocks(model.sources[f"layers.{index}.{constant}.weight"])
            yield (index, path), _row_source(found, shapes[f"{constant}.weight"], rows)


def _constant(g: Graph, path: str) -> tuple[str, slice]:
    """Return the constant that holds a projection, and the projection's rows there."""
    q, kv = g.heads * g.head_dim, g.kv_heads * g.head_dim
    if not g.fused or path.endswith(("o_proj", "down_proj")):
        return path, slice(None)
    qkv, both = "self_attn.qkv_proj", "mlp.gate_up_proj"
    return {
        "self_attn.q_proj": (qkv, slice(q)),
        "self_attn.k_proj": (qkv, slice(q, q + kv)),
        "self_attn.v_proj": (qkv, slice(q + kv, None)),
        "mlp.gate_proj": (both, slice(g.ffn)),
        "mlp.up_proj": (both, slice(g.ffn, None)),
    }[path]


def _row_source(found: Sequence[TensorSource], shape: Shape, rows: slice) -> RowSource:
    """Return the source of some rows of a constant.

    Args:
        found: the blocks of the constant.
        shape: its shape.
        rows: the rows.

    Raises:
        CheckpointError: if the blocks are more than rows of one matrix with a factor.
    """
    first = found[0]
    if any(
        one != replace(TensorSource(first.tensor, times=first.times), rows=one.rows, shape=one.shape) for one in found
    ):
        raise CheckpointError(
            f"{first.tensor}: no adapter of this tensor can be an input, since programs hold another matrix"
        )
    held = (first.shape or shape)[0]
    every = np.concatenate([np.arange(*(one.rows or (0, held, 1))) for one in found])
    return RowSource(first.tensor.removesuffix(".weight"), every[rows], held, first.times)


def _in_decoder(module: str) -> str:
    """Return a module's name in a model that is only a decoder, as transformers names it."""
    return next((name_in_tower(tower, module) for tower in TOWERS if module.startswith(tower)), module)


def _pair(lora: LoraModule, source: RowSource, columns: int, where: str) -> tuple[Matrix, Matrix]:
    """Return A [r, in] and B [out, r] of a projection, the factor included.

    Both are multiplied by powers of two until they are about equally large: B may be so small that fp16 would hold few
    of its digits, and the product stays the same.

    Args:
        lora: the module's matrices.
        source: the projection's rows of the module.
        columns: columns of the module's weight.
        where: names the module in errors.

    Raises:
        CheckpointError: if the matrices do not have the widths, or fp16 can't hold them.
    """
    found = (lora.b.shape[0], lora.a.shape[1])
    if found != (source.held, columns):
        base = f"the base model's weight is {source.held} x {columns}"
        raise CheckpointError(f"{where}: its matrices are for a weight of {found[0]} x {found[1]}; {base}")
    a, b = lora.a, lora.b[source.rows] * np.float32(lora.scaling * source.times)
    largest = [float(np.abs(one).max(initial=0.0)) for one in (a, b)]
    shift = round(math.log2(largest[0] / largest[1]) / 2) if all(largest) else 0
    a, b = np.ldexp(a, -shift), np.ldexp(b, shift)
    if max(float(np.abs(one).max(initial=0.0)) for one in (a, b)) > HALF_MAX:
        raise CheckpointError(f"{where}: has a number that fp16 can't hold; train it again with a smaller alpha")
    return a, b
