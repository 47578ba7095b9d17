"""Reads a LoRA adapter in PEFT's layout: adapter_config.json and adapter_model.safetensors.

A module's weight W becomes W + scaling * B A, where `lora_A` is [r, in] and `lora_B` is [out, r]. scaling is alpha / r,
or alpha / sqrt(r) with rslora (PEFT 0.21, tuners/lora/layer.py). Whatever else a config may ask for is refused by name:
an adapter that is read in part would be another adapter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.checkpoint.headers import TensorInfo, read_header
from shardmill.checkpoint.paths import PICKLE_SUFFIXES, checked_file, describe_missing_weights, opened
from shardmill.errors import CheckpointError
from shardmill.files import load_json
from shardmill.printable import printable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # begins the name of every tensor, before the module's name in transformers
TENSOR = re.compile(rf"{re.escape(PREFIX)}(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
ALL_LINEAR = "all-linear"  # in place of target_modules: every linear module but the LM head
# Keys that are read here, and keys that decide about training only.
READ = {
    "alpha_pattern",
    "base_model_name_or_path",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
}
IDLE = {
    "auto_mapping",
    "corda_config",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
    "velora_config",
}
NEUTRAL: tuple[Any, ...] = (None, False, "none", [], {}, "")
# Initial values that leave the base model's weights alone; others, such as pissa, change them too.
INITIAL = (True, False, "gaussian", "orthogonal", "eva")
NUMBERS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
Matrix = NDArray[np.float32]


@dataclass(frozen=True)
class LoraModule:
    """What an adapter adds to one module: scaling * B A.

    Attributes:
        a: [r, in].
        b: [out, r].
    """

    a: Matrix
    b: Matrix
    scaling: float


@dataclass(frozen=True)
class LoraHeader:
    """An adapter without its numbers.

    Attributes:
        base: the name of the base model, as whoever trained the adapter wrote it; "" if it has none.
        tensors: the places of A and B in the file, by the module's name in transformers.
        scalings: the factor of B A, by the same names.
    """

    folder: Path
    base: str
    tensors: Mapping[str, Mapping[str, TensorInfo]]
    scalings: Mapping[str, float]

    @property
    def rank(self) -> int:
        """Return the largest rank of a module."""
        return max(tensors["A"].shape[0] for tensors in self.tensors.values())

    def read(self, module: str) -> LoraModule:
        """Return the matrices of a module. Raises CheckpointError if a number is not finite."""
        a, b = (self._matrix(self.tensors[module][side]) for side in "AB")
        return LoraModule(a, b, self.scalings[module])

    def _matrix(self, info: TensorInfo) -> Matrix:
        with opened(self.folder / info.file) as stream:
            stream.seek(info.start)
            values = np.frombuffer(stream.read(info.end - info.start), NUMBERS[info.dtype])
        if info.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        matrix: Matrix = values.astype(np.float32).reshape(info.shape)
        if not np.isfinite(matrix).all():
            raise CheckpointError(f"{self.folder / info.file}: {printable(info.name)} has a number that is not finite")
        return matrix


def read_lora(folder: Path) -> LoraHeader:
    """Return the adapter in a folder, without its numbers.

    Raises:
        CheckpointError: if a file is missing or damaged, or the adapter is of a kind that programs can't take.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a folder with {CONFIG} and {WEIGHTS}")
    config = _read_config(checked_file(folder, CONFIG))
    pickles = [file.name for file in folder.iterdir() if file.name.endswith(PICKLE_SUFFIXES)]
    if pickles and not (folder / WEIGHTS).exists():
        raise CheckpointError(describe_missing_weights(str(folder), pickles))
    where, pairs = folder / WEIGHTS, dict[str, dict[str, TensorInfo]]()
    for info in read_header(folder, WEIGHTS):
        match = TENSOR.fullmatch(info.name)
        if match is None:
            raise CheckpointError(f"{where}: {printable(info.name)} is no LoRA matrix of a linear module")
        if info.dtype not in NUMBERS or len(info.shape) != 2:
            raise CheckpointError(f"{where}: {printable(info.name)} is {info.dtype} {list(info.shape)}, not a matrix")
        pairs.setdefault(match["module"], {})[match["side"]] = info
    if not pairs:
        raise CheckpointError(f"{where}: holds no LoRA matrix")
    for module, sides in pairs.items():
        _check_pair(module, sides, config, where)
    scalings = {module: _scaling(config, module) for module in pairs}
    return LoraHeader(folder, config.get("base_model_name_or_path") or "", pairs, scalings)


def check_targets(lora: LoraHeader, modules: Iterable[str]) -> None:
    """Raise CheckpointError if an adapter lacks matrices of a module that its config targets.

    Args:
        lora: the adapter.
        modules: names of the base model's modules that an adapter may change.
    """
    config = load_json(lora.folder / CONFIG)
    for module in modules:
        if _is_target(config, module) and module not in lora.tensors:
            what = f"target_modules has {printable(module)}, and the file has no such matrices"
            raise CheckpointError(f"{lora.folder / WEIGHTS}: {what}; copy the adapter again")


def _read_config(file: Path) -> dict[str, Any]:
    """Return adapter_config.json's content. Raises CheckpointError for what programs can't honour."""
    try:
        config = load_json(file)
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{file}: peft_type is {printable(repr(kind))}; programs take LORA only")
    for key, value in sorted(config.items()):
        if key not in READ | IDLE and not _is_neutral(value):
            raise CheckpointError(
                f"{file}: {printable(key)} is {printable(repr(value))}: programs have no place for it"
            )
    if not any(
        config.get("init_lora_weights", True) is one or config.get("init_lora_weights") == one for one in INITIAL
    ):
        how = printable(repr(config["init_lora_weights"]))
        raise CheckpointError(
            f"{file}: init_lora_weights {how} changes the base model's weights; convert it to plain LoRA"
        )
    _check_numbers(file, config)
    names = config.get("target_modules")
    if not (isinstance(names, str) or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise CheckpointError(f"{file}: target_modules is neither a list of names nor a pattern")
    for key in ("target_modules", "exclude_modules"):
        _check_patterns(file, key, [config[key]] if isinstance(config.get(key), str) else [])
    if not isinstance(config.get("base_model_name_or_path") or "", str):
        raise CheckpointError(f"{file}: base_model_name_or_path is no name")
    return config


def _check_numbers(file: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a rank or an alpha that is no positive number."""
    if type(config.get("r")) is not int or not all(_positive(config.get(key)) for key in ("r", "lora_alpha")):
        numbers = f"r is {config.get('r')!r} and lora_alpha {config.get('lora_alpha')!r}"
        raise CheckpointError(f"{file}: {printable(numbers)}, which are not positive numbers")
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(map(_positive, pattern.values())):
            raise CheckpointError(f"{file}: {key} is no map of positive numbers")
        _check_patterns(file, key, pattern)


def _check_patterns(file: Path, key: str, patterns: Collection[str]) -> None:
    """Raise CheckpointError for a pattern that is no regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{file}: {key}: {printable(pattern)} is no pattern: {error}") from error


def _is_neutral(value: Any) -> bool:
    return value is not True and any(value == one and type(value) is type(one) for one in NEUTRAL)


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_pair(module: str, sides: Mapping[str, TensorInfo], config: Mapping[str, Any], where: Path) -> None:
    """Raise CheckpointError unless a module is a target and has an A and a B of its rank."""
    name = printable(module)
    if len(sides) < 2:
        raise CheckpointError(f"{where}: {name} has lora_{next(iter(sides))} alone; copy the adapter again")
    rank = (config.get("rank_pattern") or {}).get(_pattern_of(config, "rank_pattern", module), config["r"])
    ranks = (sides["A"].shape[0], sides["B"].shape[1])
    if ranks != (rank, rank):
        raise CheckpointError(f"{where}: {name} has matrices of rank {ranks[0]} and {ranks[1]}, {CONFIG} says {rank}")
    if not _is_target(config, module):
        raise CheckpointError(f"{where}: {name} is no target of {CONFIG}, so PEFT would leave its matrices out")


def _scaling(config: Mapping[str, Any], module: str) -> float:
    """Return the factor of a module's B A."""
    rank = (config.get("rank_pattern") or {}).get(_pattern_of(config, "rank_pattern", module), config["r"])
    alpha = (config.get("alpha_pattern") or {}).get(_pattern_of(config, "alpha_pattern", module), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _pattern_of(config: Mapping[str, Any], key: str, module: str) -> str:
    """Return the first pattern of a map that ends a module's name, or "" (PEFT 0.21, get_pattern_key)."""
    return next((one for one in config.get(key) or {} if re.match(rf"(.*\.)?({one})$", module)), "")


def _is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether PEFT adapts a module (PEFT 0.21, check_target_module_exists)."""
    if _named(config.get("exclude_modules") or [], module):
        return False
    if config["target_modules"] == ALL_LINEAR:
        return not module.endswith("lm_head")
    if not _named(config["target_modules"], module):
        return False
    chosen, among = config.get("layers_to_transform"), config.get("layers_pattern") or []
    if isinstance(config["target_modules"], str) or module in config["target_modules"] or chosen in (None, []):
        return True
    patterns = [among] if isinstance(among, str) else among
    tried = [rf"(?:^|.*?\.){one}\.(?P<index>\d+)\." for one in patterns] or [r".*?\.[^.]*\.(?P<index>\d+)\."]
    first = next((match for one in tried if (match := re.match(one, module))), None)
    return first is not None and int(first["index"]) in (chosen if isinstance(chosen, list) else [chosen])


def _named(names: Any, module: str) -> bool:
    """Return whether a pattern is a module's whole name, or one of several names ends it."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)
