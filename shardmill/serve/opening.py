"""The opening: tokens that many prompts begin with, such as a system prompt's, kept from one process to the next."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

from drafted_decoding import PrefixCache, Session
from drafted_decoding.generate import agreement

from shardmill.errors import ShardmillError
from shardmill.files import cache_folder, digest
from shardmill.printable import one_line
from shardmill.serve.model import Model

log = logging.getLogger(__name__)
MOST_FILES = 4  # of a model; the oldest go first


def opening_of(model: Model, system_prompt: str) -> Sequence[int]:
    """Return the first tokens of all conversations with a system prompt; without a template, the prompt's own tokens.

    Raises:
        ShardmillError: the chat template refuses a system prompt.
    """
    if model.template is None:
        return model.encode(system_prompt)
    system = {"role": "system", "content": system_prompt}
    try:
        texts = [model.template([system, {"role": "user", "content": question}]) for question in ("a", "b")]
    except Exception as error:  # templates may raise any exception
        raise ShardmillError(f"the chat template refuses the system prompt: {error}; leave it out") from error
    first, second = (model.encode(text, special=False) for text in texts)
    return first[: agreement(first, second)]


def keep_opening(model: Model, session: Session, prefixes: PrefixCache, opening: Sequence[int]) -> None:
    """Keep an opening: read it from an earlier process' file, or else compute it and write the file.

    Args:
        model: the model.
        session: a fresh session on the model's engine, which keeps its texts in `prefixes`.
        prefixes: the kept prefixes, none so far.
        opening: the tokens.

    Raises:
        DecodeError: the opening does not fit into the context.
    """
    session.check_prompt(opening)
    folder = cache_folder() / "prefixes" / digest({"name": model.name})[:32]  # a build may have any text as its name
    file = folder / f"{digest({'model': model.fingerprint, 'tokens': list(opening)})[:32]}.safetensors"
    with suppress(OSError):  # writing will say so
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # whoever has the model can read the prompt from its keys and values
    try:
        prefixes.load(opening, file)
        return
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever the file holds
        log.warning("the system prompt is computed again: %s", one_line(error))
    session.prefill(opening)
    session.keep()
    try:
        prefixes.save(opening, file)
        if file.exists():
            file.chmod(0o600)
        for old in sorted(folder.glob("*.safetensors"), key=lambda one: one.stat().st_mtime)[:-MOST_FILES]:
            old.unlink(missing_ok=True)  # another server may be faster
    except OSError as error:
        log.warning("%s: can't be written (%s); the next start computes the system prompt again", file, error.strerror)
