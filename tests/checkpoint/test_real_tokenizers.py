"""Tokenizers that other people made, from the checkpoints that are here: what transformers says, token by token.

Texts are in Unicode's composed form. transformers composes texts for Qwen2 whatever tokenizer.json says; the hub's says
so, too, and one that was made from a GGUF file does not.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drafted_decoding.text import TextStream
from transformers import AutoTokenizer

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.templates.render import load_template, turn_end

ROOT = Path(__file__).parents[2] / "checkpoints"
FOLDERS = sorted(file.parent for file in ROOT.glob("*/tokenizer.json"))
WORDS = [
    *(
        "def f(x):",
        "\n\n    ",
        "  two  spaces ",
        "don't",
        "1234567.89",
        "naïve café",
        "日本語の文章",
        "привет",
        "العربية",
    ),
    *("🙂🏳️‍🌈", "\t", "\u200b", "<b>", "{{x}}", "\r\n", "ﬁ", "𝒳", "<bos>", "<|im_end|>", "</s>"),
]
TALKS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " spaces  "}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three\n"},
    ],
]


def texts() -> list[str]:
    rng = random.Random(0)
    return ["", " ", *WORDS, *("".join(rng.choices(WORDS, k=8)) for _ in range(60))]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_texts_and_answers_are_those_of_transformers(folder: Path) -> None:
    """Every text becomes the same tokens, and streams back as transformers decodes it, with any tokens."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), read_tokenizer(folder / "tokenizer.json")
    rng, size = random.Random(1), ours.get_vocab_size()
    for text in texts():
        tokens = ours.encode(text).ids
        assert tokens == theirs(text).input_ids
        mixed = [*tokens, *rng.sample(range(size), 4), *theirs.all_special_ids, *tokens]
        stream = TextStream(ours.decode)
        streamed = "".join(map(stream.push, mixed)) + stream.flush()
        assert streamed == theirs.decode(mixed, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert not any(name in streamed.replace(text, "") for name in theirs.all_special_tokens)


@pytest.mark.parametrize(
    "folder", [folder for folder in FOLDERS if (folder / "chat_template.jinja").exists()], ids=lambda path: path.name
)
def test_conversations_are_those_of_transformers(folder: Path) -> None:
    """The template of the checkpoint, with a system's words and without; an answer ends at a token that it names."""
    theirs, ours, template = (
        AutoTokenizer.from_pretrained(folder),
        read_tokenizer(folder / "tokenizer.json"),
        load_template(folder),
    )
    assert template is not None
    for talk in TALKS:
        tokens = ours.encode(template(talk), add_special_tokens=False).ids
        assert tokens == theirs.apply_chat_template(talk, add_generation_prompt=True)["input_ids"]
    end = turn_end(template, ours)
    assert end is not None and ours.id_to_token(end) in template(TALKS[2])
