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


def encode_beginning(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text that is to be continued.

    They are the tokens that transformers feeds, without the special tokens that some tokenizers put after a text, such
    as an end-of-text token.
    """
    after = 0
    for special in reversed(tokenizer.encode("a").special_tokens_mask):
        if not special:
            break
        after += 1
    tokens: list[int] = tokenizer.encode(text).ids
    return tokens[: len(tokens) - after]
