"""Every encoder that has a file computes what transformers computes, in any bucket, whatever fills the bucket up."""

from __future__ import annotations

import limits
import numpy as np
import pytest
import torch

from shardmill.models import ENCODER, family, supported
from shardmill.models.encoder import with_answers

from . import tiny_encoders as tiny
from .tiny_families import limit_of


def test_every_encoder_has_a_tiny_config() -> None:
    """One without would not be tested at all."""
    assert set(tiny.TINY) == set(supported(ENCODER))


@pytest.mark.parametrize(("model_type", "task"), tiny.TASKS)
def test_blocks_compute_what_transformers_computes(model_type: str, task: str) -> None:
    """At every length, with a bucket that the text fills and with one that noise fills up."""
    model = tiny.tiny_model(model_type, task)
    blocks = tiny.Blocks(tiny.described(model), model.state_dict())
    for length in (1, 2, 5, tiny.TEXT):
        tokens = tiny.tiny_text(length)
        truth = tiny.expected(model, tokens)
        exact, padded = blocks.run(tokens, length), blocks.run(tokens, 64, noise=True)
        if task == "text-classification":
            exact, padded = exact[0], padded[0]
        limits.rows_agree(f"{length} tokens", exact, truth, limit_of(model))
        limits.rows_agree(f"{length} tokens, padded", padded, exact, limit_of(model))
        assert np.array_equal(exact.argmax(-1), truth.argmax(-1)), length


@pytest.mark.parametrize("model_type", tiny.TINY)
def test_texts_that_share_a_pass_do_not_see_each_other(model_type: str) -> None:
    model, whole = tiny.tiny_model(model_type), tiny.tiny_text()
    texts = [whole[:17], whole[17:18], whole[5:]]
    found = tiny.Blocks(tiny.described(model), model.state_dict()).run_together(texts, 64, noise=True)
    for text, rows in zip(texts, found, strict=True):
        limits.rows_agree(f"{len(text)} tokens", rows, tiny.expected(model, text), limit_of(model))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_answers_are_rows_of_the_lm_head(tied: bool) -> None:
    """At every token, and under both spellings of a checkpoint's names."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(tiny.tiny_config("qwen3", tie_word_embeddings=tied))
    model, tokens, answers = tiny.drawn(made.eval()), tiny.tiny_text(), (97, 21, 350)
    description = with_answers(family("qwen3", ENCODER).describe(model.config, 64), ("a", "b", "c"), answers)
    with torch.no_grad():
        truth = model(input_ids=torch.tensor([tokens])).logits[0][:, answers].numpy()
    for prefix in ("model.", ""):
        held = {prefix + name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
        if not tied:
            held["lm_head.weight"] = held.pop(f"{prefix}lm_head.weight")
        named = description.stored_as(held)
        limits.rows_agree(f"names with '{prefix}'", tiny.Blocks(named, held).run(tokens, 64), truth, limit_of(model))
