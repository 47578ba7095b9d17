"""Which files of a folder or repository make up a checkpoint: configs, tokenizer and safetensors, nothing else.

No Python code, no pickles, no weights in other formats are ever taken. Two kinds of subfolders are taken. The modules
of sentence-transformers follow the model: 1_Pooling, 2_Dense and their like. In additional_chat_templates,
transformers looks for the template of conversations with tools.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from shardmill.checkpoint.headers import read_index
from shardmill.checkpoint.paths import (
    INDEX_FILE,
    RECORD_FILE,
    SINGLE_FILE,
    describe_missing_config,
    describe_missing_weights,
)
from shardmill.errors import CheckpointError
from shardmill.files import is_left_by_macos

_TEXT_SUFFIXES = (".json", ".tiktoken")
_TEXT_NAMES = ("tokenizer.model", "spiece.model", "merges.txt", "vocab.txt", "chat_template.jinja")
_MODULE = re.compile(r"\d+_\w+/(config\.json|model\.safetensors)")
_TEMPLATE = re.compile(r"additional_chat_templates/\w+\.jinja")


def text_files(names: Collection[str]) -> list[str]:
    """Return configs and tokenizer files among `names`."""
    inner = [n for n in sorted(names) if _TEMPLATE.fullmatch(n) or (_MODULE.fullmatch(n) and n.endswith(".json"))]
    chosen = [name for name in sorted(names) if not ("/" in name or name == RECORD_FILE or is_left_by_macos(name))]
    return [*(name for name in chosen if name.endswith(_TEXT_SUFFIXES) or name in _TEXT_NAMES), *inner]


def weight_files(folder: Path, names: Collection[str], where: str) -> list[str]:
    """Return the safetensors files among `names` that transformers would load, and then the modules' files.

    The index is read from `folder`.
    Raises CheckpointError (beginning with `where`) if config.json or a safetensors file is missing.
    """
    if "config.json" not in names:
        raise CheckpointError(describe_missing_config(where, names))
    modules = [name for name in sorted(names) if _MODULE.fullmatch(name) and name.endswith(SINGLE_FILE)]
    if SINGLE_FILE in names:
        return [SINGLE_FILE, *modules]
    if INDEX_FILE not in names:
        raise CheckpointError(describe_missing_weights(where, names))
    files = sorted(set(read_index(folder).values()))
    for file in files:
        if file not in names:
            raise CheckpointError(f"{where}: {INDEX_FILE} lists {file}, which is missing; fetch it again")
    return [*files, *modules]
