"""Finds the tokens that end a text, in the three files of a checkpoint that may name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmill.checkpoint.tokenizer import SETTINGS, named_eos
from shardmill.errors import CheckpointError
from shardmill.files import load_json
from shardmill.models.hf_config import text_part


def eos_token_ids(source: Path, hf: Any, vocab: int) -> list[int]:
    """Return a generation's end tokens.

    They are generation_config.json's or else config.json's. Where neither names one, tokenizer_config.json's end token
    counts before transformers' default for the model's type, which is another tokenizer's.

    Args:
        source: the checkpoint's folder.
        hf: transformers' config of the model.
        vocab: tokens of the model.

    Raises:
        CheckpointError: generation_config.json can't be read, or an end token is no token of the model.
    """
    from transformers import GenerationConfig

    file, ids = source / "generation_config.json", None
    if file.is_file():
        try:
            ids = GenerationConfig.from_pretrained(source).eos_token_id
        except Exception as error:  # whatever transformers raises
            raise CheckpointError(f"{file} can't be read: {' '.join(str(error).split())}; fetch it again") from error
    if ids in (None, []):  # token 0 may be one
        file, ids = source / "config.json", hf.eos_token_id
        content = load_json(file)
        if all(each.get("eos_token_id") is None for each in (content, text_part(content))):
            file, ids = source / SETTINGS, named_eos(source)
            ids = hf.eos_token_id if ids is None and _are_tokens(hf.eos_token_id, vocab) else ids
    if not _are_tokens(ids, vocab):
        raise CheckpointError(
            f"{file}: eos_token_id {ids!r} is no token's number below {vocab}, the model's vocabulary; write the "
            "token that ends a text, or leave it out"
        )
    return _listed(ids)


def _listed(ids: Any) -> list[Any]:
    return list(ids) if isinstance(ids, list | tuple) else [] if ids is None else [ids]


def _are_tokens(ids: Any, vocab: int) -> bool:
    return all(type(token) is int and 0 <= token < vocab for token in _listed(ids))  # true is an int, too
