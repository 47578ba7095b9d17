"""A checkpoint's tokenizer, as transformers uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill import files as shardmill_files
from shardmill.errors import CheckpointError, ConfigError

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


def unknown_token(tokenizer: Tokenizer) -> int | None:
    """Return the token that a tokenizer writes for whatever it does not know; None if it has no such token."""
    try:
        found = tokenizer.model.tokenize("\U0010fffd")  # of private use, so no vocabulary has it
    except Exception:  # the library raises plain Exception if the token is missing
        return None
    return int(found[0].id) if len(found) == 1 else None  # otherwise its bytes, or nothing


LINE = "\n"  # a text that labels follow: tokenizers join no letter with the end of a line


def single_tokens(file: Path, labels: Sequence[str]) -> list[int]:
    """Return the token of each label of a config's `program.labels`, as it continues a text.

    Labels are read after a text, because some tokenizers put a space before the beginning of a text.

    Args:
        file: the checkpoint's tokenizer.json.
        labels: the labels, all different.

    Raises:
        CheckpointError: the file cannot be read as a tokenizer.
        ConfigError: a label is no single token, is unknown to the tokenizer, or has another label's token.
    """
    tokenizer, found = read_tokenizer(file), dict[int, str]()
    unknown = unknown_token(tokenizer)
    before = tokenizer.encode(LINE, add_special_tokens=False).ids
    for label in labels:
        whole = tokenizer.encode(LINE + label, add_special_tokens=False).ids
        ids = whole[len(before) :] if whole[: len(before)] == before else whole
        if len(ids) != 1 or ids == whole:
            pieces = [tokenizer.decode([token]) for token in ids]
            raise ConfigError(
                f"program.labels: {label!r} is {pieces} after a line, not one separate token; leave it out"
            )
        if ids[0] == unknown:
            raise ConfigError(f"program.labels: {label!r} is unknown to the tokenizer; leave it out")
        if ids[0] in found:
            raise ConfigError(f"program.labels: {label!r} has the token of {found[ids[0]]!r}; leave one out")
        found[ids[0]] = label
    return list(found)
