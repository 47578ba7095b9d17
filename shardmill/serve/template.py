"""A chat template, the checkpoint's own or another, rendered as in transformers."""

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
    """Return a checkpoint's chat template; None if it has none.

    Args:
        source: the checkpoint's folder.
        chosen: a file with a template to use instead.

    Raises:
        ShardmillError: the chosen file can't be used, or the checkpoint's tokenizer can't be loaded.
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
    """Return the special token that a template puts after an answer; None if it puts no special token there.

    A model that was trained with the template ends its turn with this token. Some checkpoints do not name it in
    generation_config.json; without it their models would continue with the user's next turn.
    """
    try:
        _, _, after = template(
            [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _ANSWER}]
        ).rpartition(_ANSWER)
    except Exception:  # templates may raise any exception; a request that can't be rendered reports it
        return None
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    found = [content for content in special if after.lstrip().startswith(content)]
    return special[max(found, key=len)] if found else None


def has_template(source: Path) -> bool:
    """Return whether a checkpoint folder contains a chat template.

    Raises:
        ShardmillError: the folder's tokenizer_config.json is damaged.
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
