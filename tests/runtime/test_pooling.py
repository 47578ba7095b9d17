"""Embeddings and scores of language models: which row counts, what follows it, and how a question is spelled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import encoders
import limits
import numpy as np
import pytest
import torch
from models import tiny_encoders
from torch import nn

from shardmill.errors import ShardmillError
from shardmill.machine import is_portable
from shardmill.runtime.kv import Floats
from shardmill.runtime.label import Reader, embed, load_reader, rank, read_projection

TEXTS = ["Anna lives at 14 Harbour Street.", "x", "🎉 Zoë"]
# Three layers; Core ML computes in fp16, and sums in a wider format.
ROUNDING = limits.model(3, 128) if is_portable() else limits.model(3, 1, "fp16")


def hidden(checkpoint: Path, tokens: list[int]) -> Floats:
    """transformers' last hidden states of a text, [n, d]."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found: Floats = model(input_ids=torch.tensor([tokens])).last_hidden_state[0].numpy()
    return found


def of_length_1(row: Floats) -> Floats:
    return row / np.linalg.norm(row)


@pytest.fixture(scope="module")
def last(tmp_path_factory: pytest.TempPathFactory) -> tuple[Reader, Path]:
    """A tiny Qwen3-Embedding, whose names of tensors lack "model.", as on the hub."""
    folder = tmp_path_factory.mktemp("last")
    checkpoint = tiny_encoders.write_tiny("qwen3", folder / "ck")
    tiny_encoders.write_modules(checkpoint)
    return load_reader(encoders.build(checkpoint, folder / "build", buckets=[64]), "fp32"), checkpoint


def test_an_embedding_is_the_last_tokens_row(last: tuple[Reader, Path]) -> None:
    """The texts share a pass, and the tokenizer adds the last token of each."""
    reader, checkpoint = last
    tokens = [reader.tokenizer.encode(text).ids for text in TEXTS]
    assert reader.encoder.manifest["pooling"] == "last" and sum(map(len, tokens)) < 64
    for ids, found in zip(tokens, embed(reader, tokens), strict=True):
        limits.rows_agree("an embedding", found, of_length_1(hidden(checkpoint, ids)[-1]), ROUNDING)


def test_a_projection_is_torchs(tmp_path: Path) -> None:
    for bias, activation in ((True, nn.Tanh()), (False, nn.Identity())):
        torch.manual_seed(0)
        layer, row = nn.Linear(64, 96, bias=bias), torch.randn(64)
        folder = tmp_path / str(bias)
        folder.mkdir()
        tiny_encoders.write_modules(folder, dense=[layer, nn.Linear(96, 8)])
        project = read_projection(folder / "2_Dense/model.safetensors", "tanh" if bias else "identity")
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(project(row.numpy())), activation(layer(row)))
    with pytest.raises(ShardmillError, match="can't be read as a projection"):
        read_projection(tmp_path / "model.safetensors", "tanh")


def test_only_a_model_that_ranks_gives_scores(last: tuple[Reader, Path]) -> None:
    with pytest.raises(ShardmillError, match="is for feature-extraction, not for text-ranking"):
        rank(last[0], "query", ["document"])


def test_a_text_that_names_a_place_of_the_template_is_only_text(
    last: tuple[Reader, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer remembers what a reranker is asked."""
    asked: list[str] = []

    class Listening:
        def encode(self, text: str, add_special_tokens: bool) -> None:
            asked.append(text)
            raise ShardmillError("heard")

    reader = replace(last[0], tokenizer=Listening())  # type: ignore[arg-type]
    ranking = {"task": "text-ranking", "template": "{instruction}|{query}|{document}", "instruction": "I"}
    monkeypatch.setattr(reader.encoder, "manifest", reader.encoder.manifest | ranking)
    with pytest.raises(ShardmillError, match="heard"):
        rank(reader, "{document}", ["{query} {instruction}"])
    assert asked == ["I|{document}|{query} {instruction}"]
