"""Tokenizers do what transformers does with them: on the way in, with templates, and on the way out token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drafted_decoding.text import TextStream
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardmill.checkpoint.fetch import as_fetched, fetch
from shardmill.checkpoint.tokenizer import (
    check_vocabulary,
    difference,
    every_added_token,
    read_tokenizer,
    single_tokens,
    transformers_tokenizer,
    unknown_token,
)
from shardmill.errors import CheckpointError, ConfigError
from shardmill.pipeline.steps.reference import encode
from shardmill.serve.model import Model
from shardmill.templates.render import load_template

WORDS = [
    "the cat",
    " sat  on",
    "\n\n",
    "naïve",
    "東京の",
    "привет ",
    "שלום",
    "مرحبا",
    "हिन्दी",
    "🙂",
    "👩‍👩‍👧",
    "🇩🇪",
    "x=1;",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.content }}<|end|>{% endfor %}<|turn|>"
SPECIAL = ["<bos>", "<|end|>", "<|turn|>"]


def byte_level() -> Tokenizer:
    """Byte-level BPE that adds nothing, like Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=290, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS[:2], trainer)
    return tokenizer


def byte_fallback(strip: bool = False) -> Tokenizer:
    """Spaces are U+2581, unknown characters bytes, and each text begins with <bos>, like Gemma's."""
    symbols = [*SPECIAL, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecasonï東"]
    vocab = {symbol: i for i, symbol in enumerate(symbols)} | {"th": len(symbols), "▁s": len(symbols) + 1}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=[("t", "h"), ("▁", "s")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:  # Llama's: a text begins with a space of its own
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([*SPECIAL, "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


def stripped() -> Tokenizer:
    """Byte fallback as Llama 2 has it."""
    return byte_fallback(strip=True)


MAKERS = [byte_level, byte_fallback, stripped]


@pytest.fixture(params=MAKERS, ids=lambda make: make.__name__)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint's tokenizer as training leaves it: it cuts texts and fills them up."""
    make: Callable[[], Tokenizer] = request.param
    tokenizer = make()
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def texts() -> list[str]:
    rng = random.Random(0)
    return ["", "hi", "a <bos> and <|end|> inside", *("".join(rng.choices(WORDS, k=12)) for _ in range(20))]


def test_texts_become_the_tokens_that_transformers_makes(folder: Path) -> None:
    """With what the tokenizer puts before a text, without what training left in the file."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), read_tokenizer(folder / "tokenizer.json")
    for text in texts():
        assert ours.encode(text).ids == theirs(text).input_ids
        (folder / "text").write_text(text, encoding="utf-8")
        assert encode(folder, folder / "text") == theirs(text).input_ids


def test_a_conversation_begins_once(folder: Path) -> None:
    """The template writes <bos> itself: the tokenizer must not add a second."""
    theirs = AutoTokenizer.from_pretrained(folder)
    tokenizer, template = read_tokenizer(folder / "tokenizer.json"), load_template(folder)
    assert template is not None
    model = Model("m", None, "portable", tokenizer, (), template)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "the cat 🙂"}]
    tokens = model.encode(template(messages), special=False)
    assert tokens == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokens.count(tokenizer.token_to_id("<bos>")) == 1


def test_streamed_text_is_what_transformers_decodes(folder: Path) -> None:
    """In several scripts, with special tokens anywhere, none of which shows."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), read_tokenizer(folder / "tokenizer.json")
    special, rng = [ours.token_to_id(name) for name in SPECIAL], random.Random(1)
    for text in texts():
        tokens = [
            token
            for word in [text, *rng.choices(WORDS, k=4)]
            for token in [*ours.encode(word, add_special_tokens=False).ids, *rng.sample(special, rng.randrange(3))]
        ]
        stream = TextStream(ours.decode)
        streamed = "".join(map(stream.push, tokens)) + stream.flush()
        assert streamed == theirs.decode(tokens, skip_special_tokens=True)
        assert not any(name in streamed for name in SPECIAL)


def test_a_label_s_token_is_the_one_that_continues_a_text(folder: Path) -> None:
    """Also if the tokenizer puts a space before a text, which makes other tokens of a label that stands alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder, add_bos_token=False)
    labels = [" cat", "cat", "on"] if "Ġcat" in tokenizer.get_vocab() else ["t", " s", "th"]
    found = single_tokens(folder / "tokenizer.json", labels)
    for text in ("on\n", "at: the cat\n\n"):
        before = tokenizer(text, add_special_tokens=False).input_ids
        for label, token in zip(labels, found, strict=True):
            assert tokenizer(text + label, add_special_tokens=False).input_ids == [*before, token]


def test_a_label_of_several_tokens_or_of_another_s_token_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    byte_level().save(str(file))
    with pytest.raises(
        ConfigError, match=r"program\.labels: 'xz' is \['x', 'z'\] after a line, not one separate token"
    ):
        single_tokens(file, ["t", "xz"])
    byte_fallback().save(str(file))
    with pytest.raises(ConfigError, match="program.labels: '▁s' has the token of ' s'; leave one out"):
        single_tokens(file, [" s", "▁s"])


UNKNOWN = [
    Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "\n": 3}, unk_token="[UNK]")),
    Tokenizer(models.BPE({"a": 0, "b": 1, "\n": 2, "[UNK]": 3}, [], unk_token="[UNK]")),
    Tokenizer(models.Unigram([("a", -1.0), ("[UNK]", 0.0), ("b", -1.0), ("\n", -1.0)], unk_id=1)),
]


@pytest.mark.parametrize("tokenizer", UNKNOWN, ids=lambda one: type(one.model).__name__)
def test_a_label_that_the_tokenizer_does_not_know_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """All unknown texts share one token."""
    if isinstance(tokenizer.model, models.WordLevel):
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    assert unknown_token(tokenizer) == theirs.unk_token_id == theirs("è", add_special_tokens=False).input_ids[0]
    file = tmp_path / "tokenizer.json"
    tokenizer.save(str(file))
    assert single_tokens(file, ["a", "b"]) == theirs("ab", add_special_tokens=False).input_ids
    with pytest.raises(ConfigError, match=r"program\.labels: 'è' is unknown to the tokenizer; leave it out"):
        single_tokens(file, ["a", "è"])


def test_a_tokenizer_may_know_everything() -> None:
    """It has a token for each byte, or no token for unknown text."""
    assert unknown_token(byte_level()) is unknown_token(byte_fallback()) is None
    assert unknown_token(Tokenizer(models.Unigram([("a", -1.0)]))) is None


MARKS = ["<|im_start|>", "<|im_end|>"]
MARKED = "<|im_start|>user\nthe cat<|im_end|>\n <|im_start|> Naïve"
PLAIN = {"special": True, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
STRIPS = PLAIN | {"lstrip": True, "rstrip": True}


def entries(flags: dict[str, bool]) -> dict[str, Any]:
    return {str(290 + i): {"content": name, **flags} for i, name in enumerate(MARKS)}


# Where tokens may be named, beside tokenizer.json: what tokenizer_config.json has, and other files.
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "added_tokens_decoder": ({"added_tokens_decoder": entries(PLAIN)}, {}),
    "other flags of tokens that are there": ({"added_tokens_decoder": {"1": {"content": "<|end|>", **STRIPS}}}, {}),
    "tokens that strip": ({"added_tokens_decoder": entries(STRIPS)}, {}),
    "ids that transformers does not give": ({"added_tokens_decoder": {"400": {"content": MARKS[0], **PLAIN}}}, {}),
    "eos_token": ({"eos_token": MARKS[1]}, {}),
    "eos_token, an object": ({"eos_token": {"__type": "AddedToken", "content": MARKS[1], **PLAIN}}, {}),
    "a token under a name of its own": ({"image_token": MARKS[0]}, {}),
    "additional_special_tokens": ({"additional_special_tokens": MARKS}, {}),
    "extra_special_tokens": ({"extra_special_tokens": MARKS}, {}),
    "extra_special_tokens by name": ({"extra_special_tokens": {"a": MARKS[0], "b": MARKS[1]}}, {}),
    "added_tokens.json": ({}, {"added_tokens.json": {MARKS[0]: 290, MARKS[1]: 291}}),
    "special_tokens_map.json": ({}, {"special_tokens_map.json": {"additional_special_tokens": MARKS}}),
    "an object there": ({}, {"special_tokens_map.json": {"eos_token": {"content": MARKS[1], **STRIPS}}}),
    "a file that does not count": (
        {"added_tokens_decoder": entries(PLAIN)},
        {"added_tokens.json": {"<|none|>": 292}},
    ),
}


def named_beside(folder: Path, settings: dict[str, Any], more: dict[str, Any]) -> Path:
    """A checkpoint with these files beside tokenizer.json."""
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    more = {"tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **settings}, **more}
    for file, content in more.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return folder


def fetched(folder: Path, dest: Path) -> dict[str, Any]:
    return fetch(path=folder, repo=None, revision=None, dest=dest, cache=None)


@pytest.mark.parametrize("name", BESIDE)
def test_tokens_that_other_files_name_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """In the checkpoint's folder, and in a build's, whose tokenizer.json says all by itself, as devices read it."""
    folder = named_beside(tmp_path / "checkpoint", *BESIDE[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    record = fetched(folder, tmp_path / "source")
    alone = Tokenizer.from_file(str(tmp_path / "source/tokenizer.json"))
    alone.no_truncation()
    for text in (MARKED, every_added_token(theirs)):
        wanted = theirs(text).input_ids
        for ours in (
            read_tokenizer(folder / "tokenizer.json"),
            alone,
            AutoTokenizer.from_pretrained(tmp_path / "source"),
        ):
            ids = ours.encode(text)
            assert getattr(ids, "ids", ids) == wanted
        assert alone.decode(wanted) == theirs.decode(wanted, skip_special_tokens=True)
    assert (
        record["completed"].keys() == {"tokenizer.json"}
        and as_fetched(record)["tokenizer.json"]["size"] == (folder / "tokenizer.json").stat().st_size
    )
    assert fetched(folder, tmp_path / "source") == record


def test_a_tokenizer_that_has_its_tokens_is_the_checkpoint_s_file(folder: Path, tmp_path: Path) -> None:
    """Byte by byte, whatever is named beside it."""
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    record = fetched(folder, tmp_path / "source")
    assert "completed" not in record
    assert (tmp_path / "source/tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_a_setting_that_splits_special_tokens_is_refused(tmp_path: Path) -> None:
    """Python's runtime would follow transformers, and no other one would."""
    folder = named_beside(tmp_path / "checkpoint", {"split_special_tokens": True, "eos_token": "<|end|>"}, {})
    text = "the cat<|end|>"
    assert (
        read_tokenizer(folder / "tokenizer.json").encode(text).ids
        == AutoTokenizer.from_pretrained(folder)(text).input_ids
    )
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: split_special_tokens is true"):
        fetched(folder, tmp_path / "source")


def test_a_class_that_makes_other_tokens_is_told(tmp_path: Path) -> None:
    """transformers builds some classes' tokenizers anew, from the vocabulary of tokenizer.json alone."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    file, ours = tmp_path / "tokenizer.json", read_tokenizer(tmp_path / "tokenizer.json")
    assert not difference(file, ours, transformers_tokenizer(tmp_path), [MARKED, *texts()])
    for name, said in (
        ("Qwen2Tokenizer", "gives a text other tokens than transformers' Qwen2Tokenizer does (token 1 is "),
        ("BertTokenizer", "transformers' BertTokenizer can't read a text: "),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        told = difference(file, ours, transformers_tokenizer(tmp_path), ["ae\u0301", MARKED])
        assert told.startswith(f"{file}: {said}") and "\n" not in told


def test_a_token_without_a_row_is_refused_where_texts_have_it(tmp_path: Path) -> None:
    """One of the vocabulary proper, an end token, one of a template; a mark that no text has is left alone."""
    file, vocab = tmp_path / "tokenizer.json", 290
    tokenizer = byte_level()
    vocab = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>", "<|im_end|>"])
    tokenizer.save(str(file))
    check_vocabulary(file, vocab)
    with pytest.raises(
        CheckpointError, match=rf"token {vocab - 5}, '.*', is beyond the model's vocabulary of {vocab - 5}"
    ):
        check_vocabulary(file, vocab - 5)
    refused = rf"tokenizer\.json: token {vocab + 1}, '<\|im_end\|>', is beyond the model's vocabulary of {vocab}; take"
    for name, content in (
        ("chat_template.jinja", "{{ messages[0].content }}<|im_end|>"),
        ("chat_template.json", json.dumps({"chat_template": "a<|im_end|>"})),
        ("tokenizer_config.json", json.dumps({"eos_token": "<|im_end|>"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "a<|im_end|>"})),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(CheckpointError, match=refused):
            check_vocabulary(file, vocab)
        check_vocabulary(file, vocab + 2)
        (tmp_path / name).unlink()
