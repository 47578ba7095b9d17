"""Transformers' encoder: each text gives what it gives alone, and a layer's weights are read seldom."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import limits
import pytest
import torch
from models import tiny_encoders
from models.tiny_families import limit_of
from torch import Tensor

from shardmill.checkpoint.headers import read_tensors
from shardmill.gates.encoder_reference import BATCH, CLASSES, EncoderReference, passages
from shardmill.gates.reference import checkpoint_weights
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL

TEXT = tiny_encoders.tiny_text(90)


@pytest.mark.parametrize(("model_type", "task"), [("bert", CLASSIFY), ("modernbert", EMBED), ("modernbert", LABEL)])
def test_texts_of_a_length_go_through_a_layer_together(model_type: str, task: str, tmp_path: Path) -> None:
    """Each layer's weights are read once for five texts of 16 tokens, and once more for the last of 10."""
    import transformers

    source = tiny_encoders.write_tiny(model_type, tmp_path / "checkpoint", task)
    weights, asked = checkpoint_weights(source), Counter[str]()

    def counted(name: str) -> Tensor:
        asked[name] += 1
        return weights(name)

    (name,) = (name for name in read_tensors(source) if "tok_embeddings.weight" in name or "word_embeddings" in name)
    texts = passages(TEXT, 16, task)
    found = EncoderReference(source, task).run(texts, counted, name)
    assert max(asked.values()) == 2
    model = getattr(transformers, CLASSES[task]).from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    assert len(found) == len(texts) == 6
    for text, own in zip(texts, found, strict=True):
        alone = tiny_encoders.expected(model.eval(), text).reshape(own.shape)
        limits.rows_agree(f"{len(text)} tokens", own, alone, limit_of(model))


def test_long_texts_go_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many of them at once would take memory that a job does not declare."""
    source = tiny_encoders.write_tiny("modernbert", tmp_path / "checkpoint", LABEL)
    monkeypatch.setattr("shardmill.gates.encoder_reference.BATCH", 20)
    reference, weights, sizes = EncoderReference(source, LABEL), checkpoint_weights(source), list[torch.Size]()
    reference.layers[0].register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[:2]))
    texts = [TEXT[:8]] * 3 + [TEXT[:30]] * 2
    reference.run(texts, weights, "model.embeddings.tok_embeddings.weight")
    assert BATCH > 20 and sizes == [(2, 8), (1, 8), (1, 30), (1, 30)]
