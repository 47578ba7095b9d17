"""A checkpoint's tokenizer, as transformers uses it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmill import files as shardmill_files
from shardmill.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer.json.

    Training leaves its truncation and padding in many of these files. transformers ignores both, and so must whoever
    feeds whole texts.

    Args:
        file: the checkpoint's tokenizer.json.

    Raises:
        CheckpointError: the file cannot be read as a tokenizer.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(shardmill_files.read_text(file))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{file} can't be read as a tokenizer: {error}; fetch the checkpoint again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
