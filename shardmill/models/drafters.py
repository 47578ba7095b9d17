"""A drafter's checkpoint, whichever kind of drafter it holds."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from shardmill.errors import CheckpointError
from shardmill.files import json_object
from shardmill.models import assistant, eagle3
from shardmill.models.architecture import Architecture
from shardmill.models.hf_config import load_hf_config, text_part


def describe_checkpoint(
    folder: Path, tensors: Collection[str] | None, target: Architecture, context: int, *, hosted: bool
) -> eagle3.DrafterDescription:
    """Return the description of a drafter's checkpoint, whose config.json names its kind.

    Args:
        folder: the checkpoint's folder.
        tensors: the names of its tensors; None if only its config is there yet.
        target: its model.
        context: key/value slots of the programs.
        hosted: whether the host keeps the model's caches.

    Raises:
        CheckpointError: it drafts for another model, or programs can't honour it.
    """
    content = json_object(folder / "config.json")  # of an unreadable one, load_head_config says what is wrong
    if content.get("model_type") not in assistant.TYPES:
        return eagle3.describe(eagle3.load_head_config(folder), tensors, target, context)
    if not hosted:
        why = "an assistant reads the model's caches, which programs keep otherwise"
        raise CheckpointError(f"drafter: {why}; write `program: {{state: host}}`, or leave out `drafter`")
    return assistant.describe(load_hf_config(folder, text_part), content.get("backbone_hidden_size"), target, context)
