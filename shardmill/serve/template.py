"""A chat template, the checkpoint's own or another, rendered as transformers renders it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardmill import regular
from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.serve.model import ChatTemplate
from shardmill.serve.renderer import Renderer, RenderError

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
    text = None if chosen is None else _read(chosen)
    try:
        render = Renderer(source, text)
    except RenderError as error:
        raise ShardmillError(f"{source}: its tokenizer, and so its chat template, can't be loaded: {error}") from error
    if chosen is not None:
        try:
            render([{"role": "user", "content": "a question"}])
        except RenderError as error:
            raise ShardmillError(f"{chosen} is no chat template: {error}") from error
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
        return bool(load_json(file).get("chat_template")) if file.is_file() else False
    except (ValueError, AttributeError) as error:
        raise ShardmillError(f"{file} is damaged: {error}; fetch the checkpoint again") from error


def _read(file: Path) -> str:
    try:
        return regular.read_text(file)
    except OSError as error:
        raise ShardmillError(f"{file} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ShardmillError(f"{file} can't be read: {error}") from error
