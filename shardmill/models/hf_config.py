"""Reads a checkpoint's config.json through transformers' own AutoConfig, once nothing in it can do harm.

config.json comes in two generations (`rope_scaling`, and `rope_parameters` from transformers 5 on); AutoConfig reads
both, so nothing here interprets the file itself. A multimodal model's config holds that of its text tower.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardmill.errors import CheckpointError
from shardmill.models import type_fault

SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
    "vocab_size",
    "head_dim",
)


def text_part(content: Any) -> Any:
    """The part of a parsed config.json that describes the language model: all of it, or its `text_config`."""
    inner = content.get("text_config") if isinstance(content, dict) else None
    return inner if isinstance(inner, dict) else content


def size_fault(content: Any) -> str:
    """Names the first size of a parsed config.json that is not a positive integer, or returns ''.

    A size that is absent has a default, so it is no fault.
    """
    if not isinstance(content, dict):
        return "not a model's config"
    sizes = {name: content[name] for name in SIZES if content.get(name) is not None}
    wrong = [f"{name} is {size!r}: it must be 1 or more" for name, size in sizes.items() if not _is_size(size)]
    return wrong[0] if wrong else ""


def load_hf_config(folder: Path) -> Any:
    """transformers' config of the checkpoint in `folder`; of a multimodal model that of its text tower.

    Code that a checkpoint brings along is never run, nor is anybody asked whether to.

    Raises:
        CheckpointError: where config.json is missing, holds what no model can be, or names a model_type that is not
            supported.
    """
    from transformers import AutoConfig

    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        fault = size_fault(content) or size_fault(text_part(content)) or type_fault(content.get("model_type"))
        if fault:
            raise ValueError(fault)
        return AutoConfig.from_pretrained(folder, trust_remote_code=False).get_text_config()
    except Exception as error:  # whatever transformers makes of it
        raise CheckpointError(f"{folder}/config.json can't be read as a model config: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The first line of an error, and the second where the first only announces it with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1  # true is an int, too
