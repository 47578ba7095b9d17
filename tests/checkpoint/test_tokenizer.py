"""Tokenizers do what transformers does with them: on the way in, with templates, and on the way out token by token."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shardmill.checkpoint.tokenizer import read_tokenizer, single_tokens, unknown_token
from shardmill.decode.text import TextStream
from shardmill.errors import ConfigError
from shardmill.pipeline.steps.reference import encode
from shardmill.serve.chat import load_template
from shardmill.serve.model import Model

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
