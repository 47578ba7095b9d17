"""A model that recites one text, and the `shardmill` command run on it in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted_decoding.engine import PlainEngine
from manifests import manifest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner, Result

from shardmill import cli
from shardmill.runtime import process

PROMPT, CONTINUATION = "def ", "naïve() → “é”  # 東京\n"


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that every character outside ASCII is split; the last token is the end of the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


class Reciter(PlainEngine):
    """An engine that knows one text by heart: after position p comes its token p + 1."""

    slots, widths, vocab = 256, (1, 4), 257

    def __init__(self, text: Sequence[int]) -> None:
        self.text = [*text, 256]

    def reset(self) -> None:
        """Nothing is held."""

    def forget(self, slots: Sequence[int]) -> None:
        """Nothing is held."""

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        """One-hot logits [T, V]."""
        following = [self.text[min(p + 1, len(self.text) - 1)] for p in positions]
        return np.eye(self.vocab, dtype=np.float32)[following]


def reciting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder look like a built model; its engine recites PROMPT + CONTINUATION."""
    (folder / "source").mkdir(parents=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "source/tokenizer.json"))
    (folder / "model.json").write_text(json.dumps(manifest()))
    engine = Reciter(tokenizer.encode(PROMPT + CONTINUATION).ids)
    monkeypatch.setattr(process, "load_engine", lambda *_: engine)
    return folder


def shardmill(*arguments: object, stdin: str | None = None) -> Result:
    """Runs the command in this process."""
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], input=stdin)


def failure(*arguments: object) -> str:
    """The one line with which a command fails, exit code 1."""
    result = shardmill(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("shardmill: ")
    return result.stderr.removeprefix("shardmill: ").rstrip()
