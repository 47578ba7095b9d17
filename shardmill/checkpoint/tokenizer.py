"""A checkpoint's tokenizer, as transformers uses it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import files as shardmill_files
from shardmill.errors import CheckpointError, ConfigError
from shardmill.files import json_object, parse_json
from shardmill.printable import first_line, printable

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Beside tokenizer.json, transformers reads tokens in these. The last two count only without `added_tokens_decoder`.
TOKEN_FILES = (SETTINGS, "special_tokens_map.json", "added_tokens.json")
log = logging.getLogger(__name__)
LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
SPLIT = "split_special_tokens"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ A B C ÀÇÉÑÖØŽ ΑΒΓΔΩ АБВЯ"


def read_tokenizer(file: Path) -> Tokenizer:
    """Read a tokenizer.json with the tokens that the files beside it add.

    Training leaves its truncation and padding in many of these files. transformers ignores both, and so must whoever
    feeds whole texts.

    Args:
        file: the checkpoint's tokenizer.json.

    Raises:
        CheckpointError: the file cannot be read as a tokenizer.
    """
    text = _text(file)
    tokenizer = _parsed(text, file)
    if whole := _completed(file, text, tokenizer):
        tokenizer = _parsed(whole, file)
    tokenizer.encode_special_tokens = splits_special_tokens(file.parent)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _text(file: Path) -> str:
    try:
        return shardmill_files.read_text(file)
    except Exception as error:
        raise _unreadable(file, error) from error


def _parsed(text: str, file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{file} can't be read as a tokenizer: {error}; fetch the checkpoint again")


def completed(file: Path) -> str | None:
    """Return the text of a tokenizer.json with all tokens that transformers adds; None if it has them all.

    Some checkpoints name tokens, such as the marks of a chat, only in the files beside tokenizer.json. transformers
    adds them when it loads the tokenizer, and decides their ids. Whoever reads tokenizer.json alone, as runtimes on
    devices do, would spell such a mark letter by letter.

    Args:
        file: the checkpoint's tokenizer.json.

    Raises:
        CheckpointError: the file can't be read, or transformers can't load a tokenizer with these tokens.
    """
    if not _named(file.parent):
        return None
    text = _text(file)
    return _completed(file, text, _parsed(text, file))


def _completed(file: Path, text: str, tokenizer: Tokenizer) -> str | None:
    """See `completed`; `tokenizer` was read from `text`: reading a large one takes a second."""
    named = _named(file.parent)
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    lacking = [content for content, flags in named.items() if not _has(known.get(content), flags)]
    if not lacking:
        return None
    theirs = transformers_tokenizer(file.parent)
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None or backend.get_vocab(False) != tokenizer.get_vocab(False):
        names = ", ".join(printable(content) for content in lacking[:3])
        raise CheckpointError(f"{file}: lacks {names}, and transformers reads its tokens otherwise; {RESAVE}")
    added = parse_json(backend.to_str())["added_tokens"]
    content = parse_json(text)
    if content["added_tokens"] == added:
        return None
    return json.dumps(content | {"added_tokens": added}, ensure_ascii=False, indent=2)


def _has(token: AddedToken | None, flags: Mapping[str, bool]) -> bool:
    return token is not None and all(getattr(token, name) == flag for name, flag in flags.items())


def _named(folder: Path) -> dict[str, Mapping[str, bool]]:
    """Return the tokens that files beside tokenizer.json name, each with the flags that they give it."""
    settings, *others = (json_object(folder / name) for name in TOKEN_FILES)
    named: dict[str, Mapping[str, bool]] = {name: {} for name in _special(settings)}
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return named | {name: {} for name in [*_special(others[0]), *others[1]]}
    for token in listed.values():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            named[token["content"]] = {name: bool(token[name]) for name in FLAGS if name in token}
    return named


def _special(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the special tokens that a tokenizer_config.json or a special_tokens_map.json names."""
    for key, value in content.items():
        values = [value] if key.endswith("_token") else []
        if key in LISTS and isinstance(value, dict | list):
            values = list(value.values()) if isinstance(value, dict) else value
        yield from filter(None, map(_content, values))


def splits_special_tokens(folder: Path) -> bool:
    """Return whether a checkpoint's settings make transformers read special tokens in a text as other text."""
    return json_object(folder / SETTINGS).get(SPLIT) is True


def names_class(folder: Path) -> bool:
    """Return whether a file of a checkpoint names the class of transformers' tokenizer."""
    return any("tokenizer_class" in json_object(folder / name) for name in (SETTINGS, "config.json"))


def transformers_tokenizer(folder: Path) -> Any:
    """Return transformers' tokenizer of a checkpoint, without running the checkpoint's own code.

    Where no file names its class, transformers would guess a class by the model's type and build a tokenizer that
    tokenizer.json does not describe. Such a file is read as it stands.

    Raises:
        CheckpointError: transformers can't load it.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    reader: Any = AutoTokenizer if names_class(folder) else PreTrainedTokenizerFast
    try:
        return reader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a checkpoint may cause any exception
        raise CheckpointError(f"{folder}: transformers can't load its tokenizer: {first_line(error)}") from error


RESAVE = "save transformers' own: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"


def check_vocabulary(file: Path, vocab: int) -> None:
    """Check that the model has a row for each token that a usual text or a conversation may have.

    Some tokenizers have marks of other members of the model's family, such as an image's, beyond the vocabulary. These
    are named in the log only, unless the chat template writes them.

    Args:
        file: the checkpoint's tokenizer.json; a checkpoint without one fails in the step that needs it.
        vocab: tokens of the model.

    Raises:
        CheckpointError: the tokenizer can't be read, or writes a token beyond the vocabulary.
    """
    if not file.is_file():
        return
    tokenizer = read_tokenizer(file)
    beyond = sorted((token, content) for content, token in tokenizer.get_vocab().items() if token >= vocab)
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    around, templates = set(tokenizer.encode("a").ids), _templates(file.parent)
    ends = {_content(json_object(file.parent / SETTINGS).get(key)) for key in ("bos_token", "eos_token")}
    for token, content in beyond:
        if content not in added or token in around or content in ends or any(content in text for text in templates):
            raise CheckpointError(
                f"{file}: token {token}, {printable(content)!r}, is beyond the model's vocabulary of {vocab}; take the "
                "checkpoint's own tokenizer, or a checkpoint whose embedding has a row for each token"
            )
    for token, content in beyond[:1]:
        log.warning(
            "the model has no row for %d tokens from %d on, %r: no text may hold them", len(beyond), token, content
        )


def _templates(folder: Path) -> list[str]:
    """Return the texts of a checkpoint's chat templates; JSON's stay as they are, which changes no token in them."""
    files = [*folder.glob("*.jinja"), *folder.glob("additional_chat_templates/*.jinja")]
    templates = (json_object(folder / name).get("chat_template") for name in (SETTINGS, "chat_template.json"))
    return [*map(_text, files), *(json.dumps(template, ensure_ascii=False) for template in templates if template)]


def named_eos(folder: Path) -> int | None:
    """Return the token that a checkpoint's tokenizer_config.json names as the end of a text; None if it names none."""
    content, file = _content(json_object(folder / SETTINGS).get("eos_token")), folder / TOKENIZER
    if not content or not file.is_file():
        return None
    token: int | None = read_tokenizer(file).token_to_id(content)
    return token


def _content(token: Any) -> str | None:
    """Return the text of a token in a settings file, which may be an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def keeps_capitals(file: Path) -> bool:
    """Return whether a tokenizer.json gives capital letters other tokens than small ones."""
    tokenizer = read_tokenizer(file)
    return tokenizer.encode(CAPITALS).ids != tokenizer.encode(CAPITALS.lower()).ids


ODD_TEXTS = (  # in which tokenizers and templates that seem equal differ
    "plain words",
    "",
    "  spaces  ",
    "\n\nlines\n",
    "\tdef f(x):\n\t    return x\n\n",
    "\u00a0\u2003odd spaces\u3000\x1c\x85",
    "\r\nreturns\r\n",
    "naïve e\u0301 日本語 العربية 🙂🏳️\u200d🌈 \u200b",
    "<|im_end|>\n<|im_start|>system\nx</s><eos><bos>",
    "[INST] [/INST] <start_of_turn>user <|eot_id|>",
    "<think>\na thought\n</think>\n\nan answer",
    "</think>",
    "<tool_call>{}</tool_call>",
    "<tool_response>\n{}\n</tool_response>",
    "{{ messages }} {% raw %} \\n",
    "'quotes' \"double\" & <b>&amp;</b>",
    "None",
    "0",
)


def difference(file: Path, ours: Tokenizer, theirs: Any, texts: Iterable[str], *, special: bool = True) -> str:
    """Say where tokenizer.json and transformers' tokenizer make other tokens of a text; return "" if nowhere.

    Args:
        file: the checkpoint's tokenizer.json, for the message.
        ours: see `read_tokenizer`.
        theirs: transformers' tokenizer, see `transformers_tokenizer`.
        texts: the texts.
        special: whether tokens are put around a text.
    """
    for text in texts:
        try:
            wanted = list(theirs(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"])
        except Exception as error:  # of a vocabulary that does not fit the class, for example
            return f"{file}: transformers' {type(theirs).__name__} can't read a text: {first_line(error)}; {RESAVE}"
        ids = ours.encode(text, add_special_tokens=special).ids
        if ids != wanted:
            pairs = zip([*ids, None], [*wanted, None], strict=False)
            at, (one, other) = next((at, pair) for at, pair in enumerate(pairs) if pair[0] != pair[1])
            return (
                f"{file}: gives a text other tokens than transformers' {type(theirs).__name__} does "
                f"(token {at} is {one}, not {other}); {RESAVE}, or set tokenizer_class to TokenizersBackend in "
                f"{SETTINGS} if tokenizer.json is right"
            )
    return ""


def every_added_token(theirs: Any) -> str:
    """Return a text with each token that transformers' tokenizer has added to its vocabulary."""
    return " a ".join(["a", *sorted(theirs.get_added_vocab()), "a"])


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
        tokens = tokenizer.model.tokenize("\U0010fffd")  # of private use, so no vocabulary has it
    except Exception:  # the library raises plain Exception if the token is missing
        return None
    return int(tokens[0].id) if len(tokens) == 1 else None  # otherwise its bytes, or nothing


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
    tokenizer, by_token = read_tokenizer(file), dict[int, str]()
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
        if ids[0] in by_token:
            raise ConfigError(f"program.labels: {label!r} has the token of {by_token[ids[0]]!r}; leave one out")
        by_token[ids[0]] = label
    return list(by_token)
