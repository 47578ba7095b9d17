"""A checkpoint's chat template, rendered as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.serve.model import ChatTemplate, Message


def load_template(source: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint folder; None where it has none.

    Raises:
        ShardmillError: there is one, but transformers can't load the tokenizer that it belongs to.
    """
    if not has_template(source):
        return None
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever a checkpoint may hold
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ShardmillError(f"{source}: its tokenizer, and so its chat template, can't be loaded: {first}") from error

    def render(messages: Sequence[Message]) -> str:
        plain = [dict(message) for message in messages]
        return str(tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True))

    return render


def has_template(source: Path) -> bool:
    """Whether a checkpoint folder holds a chat template.

    Raises:
        ShardmillError: its tokenizer_config.json is damaged.
    """
    if (source / "chat_template.jinja").is_file():
        return True
    file = source / "tokenizer_config.json"
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("chat_template")) if file.is_file() else False
    except (ValueError, AttributeError) as error:
        raise ShardmillError(f"{file} is damaged: {error}; fetch the checkpoint again") from error
