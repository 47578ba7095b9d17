"""A chat template, the checkpoint's own or another, rendered as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from shardmill.serve.model import ChatTemplate, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ANSWER = "an answer"


def load_template(source: Path, chosen: Path | None = None) -> ChatTemplate | None:
    """A checkpoint's chat template; None where it has none.

    Args:
        source: the checkpoint's folder.
        chosen: a file with a template to use instead.

    Raises:
        ShardmillError: the chosen file can't be used, or the tokenizer that a template belongs to can't be loaded.
    """
    if chosen is None and not has_template(source):
        return None
    from transformers import AutoTokenizer

    text = None if chosen is None else _read(chosen)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever a checkpoint may hold
        raise ShardmillError(
            f"{source}: its tokenizer, and so its chat template, can't be loaded: {_first_line(error)}"
        ) from error

    def render(messages: Sequence[Message]) -> str:
        plain = [dict(message) for message in messages]
        rendered = tokenizer.apply_chat_template(plain, chat_template=text, tokenize=False, add_generation_prompt=True)
        return str(rendered)

    if chosen is not None:
        try:
            render([{"role": "user", "content": "a question"}])
        except Exception as error:  # templates raise what they like
            raise ShardmillError(f"{chosen} is no chat template: {_first_line(error)}") from error
    return render


def turn_end(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The special token that a template puts after an answer, where it puts one.

    A model that was taught with the template ends its turn with this token. Some checkpoints do not name it in
    generation_config.json, and their models would go on with the next turn by themselves.
    """
    try:
        _, _, after = template(
            [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
        ).rpartition(_ANSWER)
    except Exception:  # templates raise what they like; a request that can't be rendered will say so
        return None
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = [content for content in special if after.lstrip().startswith(content)]
    return special[max(found, key=len)] if found else None


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


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ShardmillError(f"{file} can't be read: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
