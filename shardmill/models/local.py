"""A local checkpoint's config.json, as far as plain JSON tells, so that what is wrong is said at once.

What is left out has a default that only transformers knows, so nothing here interprets the model's numbers.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardmill.files import load_json
from shardmill.models import DECODER, type_fault
from shardmill.models.hf_config import content_fault


def problems(path: str, root: Path, length: int, kind: str = DECODER) -> list[str]:
    """What is wrong with the checkpoint in a folder.

    Args:
        path: the folder, as the config names it.
        root: where that starts.
        length: positions that programs deal with.
        kind: what the model is to be built as.
    """
    file = root / path / "config.json"
    try:
        os.listdir(file.parent)  # as the build does
        content = load_json(file)
    except (FileNotFoundError, NotADirectoryError):
        return [f"source.path: {path} holds no config.json; give a folder in Hugging Face layout"]
    except OSError as error:
        return [f"source.path: {error.filename} can't be read: {error.strerror}"]
    except ValueError as error:
        return [f"{file}: not JSON: {error}"]
    wrong = content_fault(content) or (type_fault(content["model_type"], kind) if "model_type" in content else "")
    if wrong:
        return [f"{file}: {wrong}"]
    limit = content.get("max_position_embeddings")
    if isinstance(limit, int) and length > limit:
        key = "context" if kind == DECODER else "buckets"
        return [f"{key}: {length} is over the model's {limit} positions"]
    return []
