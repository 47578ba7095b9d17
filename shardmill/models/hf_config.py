"""Reads a checkpoint's config.json through transformers' own AutoConfig, after a check for harmful values.

config.json comes in two generations (`rope_scaling`, and `rope_parameters` from transformers 5 on); AutoConfig reads
both, so nothing here interprets the file itself. A multimodal model's config holds the config of its text tower.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardmill.errors import CheckpointError
from shardmill.files import load_json
from shardmill.models import DECODER, type_fault
from shardmill.printable import first_line

if TYPE_CHECKING:
    from shardmill.models.architecture import ModelDescription

STUMBLES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def model_description(family: ModuleType, config: Any, length: int) -> ModelDescription:
    """Return the description of the model of a transformers config.

    Args:
        family: the module of its model_type.
        config: the config.
        length: the number of positions that the programs support; None if it is chosen by the checkpoint.

    Raises:
        CheckpointError: if the model can't be built, or a field is null or of an unexpected type.
        Exception: an error of `family` that transformers' own default config causes too: that is a bug.
    """
    try:
        model: ModelDescription = family.describe(config, length)
    except STUMBLES as error:
        if _stumbles(family, type(config)(), length):
            raise
        raise CheckpointError(
            f"config.json: a field is null, or of another type than a {config.model_type} model's "
            f"({type(error).__name__}: {error})"
        ) from error
    return model


def _stumbles(family: ModuleType, config: Any, length: int) -> bool:
    """Return whether a family fails to read a config; a refusal with a reason does not count."""
    try:
        family.describe(config, length)
    except STUMBLES:
        return True
    except CheckpointError:
        pass
    return False


SIZES = {  # name -> the most that is believed: several times what any decoder has
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "shared_intermediate_size": 1 << 20,
    "vocab_size": 1 << 24,
    "head_dim": 1 << 14,
    "conv_L_cache": 1 << 6,
    "type_vocab_size": 1 << 10,
}
MOST_EXPERTS, MOST_LABELS = 1 << 12, 1 << 16  # numbers that may be 0, or absent
UNBOUNDED = ("time_step_limit",)  # of Mamba layers: (0, infinity) if steps have no upper limit
FLOAT_TAG = "__float__"  # transformers' spelling of numbers that JSON lacks: {"__float__": "Infinity"}


def text_part(content: Any) -> Any:
    """Return the part of a parsed config.json that describes the language model: the whole, or its `text_config`."""
    inner = content.get("text_config") if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) else content


def content_fault(content: Any) -> str:
    """Name the first value in a parsed config.json that no model can have, or return ''.

    The check is here because transformers computes rotary tables and lists of layers and labels from these numbers,
    whatever they are, and passes NaN on.
    """
    return size_fault(content) or size_fault(text_part(content)) or number_fault(content)


def size_fault(content: Any) -> str:
    """Name the first size of a parsed config.json that is no positive integer or is too large, or return ''.

    A size that is absent has a default, so it is no fault.
    """
    if not isinstance(content, dict):
        return "not a model's config"
    for name, most in SIZES.items():
        size = content.get(name)
        if size is not None and not (type(size) is int and size >= 1):  # true is an int, too
            return f"{name} is {size!r}: it must be 1 or more"
        if size is not None and size > most:
            return f"{name} is {size}: it may be {most} at most"
    counts = {name: MOST_EXPERTS for name in content if "experts" in name} | {"num_labels": MOST_LABELS}
    for name, most in counts.items():
        count = content.get(name)
        if isinstance(count, int) and count > most:
            return f"{name} is {count}: it may be {most} at most"
    return ""


def number_fault(content: Any) -> str:
    """Name the first number of a parsed config.json that is NaN or infinite, or return ''."""
    waiting: list[tuple[str, Any]] = [("", content)]
    for name, value in waiting:  # which grows meanwhile
        if isinstance(value, dict) and FLOAT_TAG in value:
            return f"{name[1:]} is {value[FLOAT_TAG]}: it must be a finite number"
        if isinstance(value, float) and not isfinite(value):
            return f"{name[1:]} is {value}: it must be a finite number"
        if isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{name}.{key}", item) for key, item in inner if key not in UNBOUNDED]
    return ""


def _quantization_fault(content: Any) -> str:
    """Say that the weights are quantised, or return ''."""
    settings = content.get("quantization_config")
    if not settings:
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    kind = f"{method} weights" if isinstance(method, str) else "quantised weights"
    return f"quantization_config: {kind} can't be converted; take the checkpoint without quantization"


def load_hf_config(folder: Path, flattened: Callable[[Any], Any] | None = None) -> Any:
    """Return transformers' config of the checkpoint in `folder`; for a multimodal model, its text tower's.

    Code in the checkpoint is never run, and the user is never asked whether to run it.

    Args:
        folder: the checkpoint.
        flattened: returns the content for transformers of a config.json that transformers can't read itself.

    Raises:
        CheckpointError: if config.json is missing, holds a value that no model can have, or names a model_type that is
            not supported.
    """
    from transformers import AutoConfig, PretrainedConfig

    try:
        content = load_json(folder / "config.json")
        content = flattened(content) if flattened else content
        fault = content_fault(content) or type_fault(content.get("model_type"))
        fault = fault or _quantization_fault(content) or _quantization_fault(text_part(content))
        if fault:
            raise ValueError(fault)
        if flattened:
            config = AutoConfig.for_model(**content)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
            # transformers ties a multimodal model's head by the outer setting, which the text tower may lack.
            if "tie_word_embeddings" in content and "tie_word_embeddings" not in text_part(content):
                config.tie_word_embeddings = content["tie_word_embeddings"]
        if not isinstance(config, PretrainedConfig):
            raise ValueError("text_config is no model's config")
        return config
    except Exception as error:  # transformers may raise any error
        raise CheckpointError(f"{folder}/config.json can't be read as a model config: {first_line(error)}") from error


def config_problems(path: str, root: Path, length: int | None, kind: str = DECODER) -> list[str]:
    """Return the problems of the checkpoint in a folder.

    Args:
        path: the folder, as the config names it.
        root: the folder where `path` starts.
        length: the number of positions that the programs support.
        kind: the kind of model to build.
    """
    file = root / path / "config.json"
    try:
        os.listdir(file.parent)  # as the build does
        content = load_json(file)
    except (FileNotFoundError, NotADirectoryError):
        if (root / path / "adapter_config.json").is_file():
            return [
                f"source.path: {path} holds an adapter; give its base model here, and this folder as source.adapter"
            ]
        return [f"source.path: {path} holds no config.json; give a folder in Hugging Face layout"]
    except OSError as error:
        return [f"source.path: {error.filename} can't be read: {error.strerror}"]
    except ValueError as error:
        return [f"{file}: not JSON: {error}"]
    wrong = content_fault(content) or (type_fault(content["model_type"], kind) if "model_type" in content else "")
    if wrong:
        return [f"{file}: {wrong}"]
    limit = content.get("max_position_embeddings")
    if isinstance(limit, int) and length and length > limit:
        key = "context" if kind == DECODER else "buckets"
        return [f"{key}: {length} is over the model's {limit} positions"]
    return []


def load_whole_config(folder: Path) -> Any:
    """Return transformers' config of a checkpoint with all its towers, after the checks of `load_hf_config`.

    Raises:
        CheckpointError: as `load_hf_config` does.
    """
    from transformers import AutoConfig

    load_hf_config(folder)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers may raise any error
        raise CheckpointError(f"{folder}/config.json can't be read as a model config: {first_line(error)}") from error
