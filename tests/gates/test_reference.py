"""The reference is transformers, whichever way its weights come."""

from __future__ import annotations

from pathlib import Path

import tiny
import torch

from shardmill.gates import reference

from . import judged


def test_layer_by_layer_is_the_whole_model(built: tiny.Build) -> None:
    with torch.no_grad():
        model = tiny.transformers_model(built.source)
        out = model(torch.tensor([built.text]), output_hidden_states=True)
    known = judged.known(built.source)
    torch.testing.assert_close(known["logits"], out.logits[0], rtol=1e-5, atol=1e-5)
    edges = torch.stack([h[0] for h in out.hidden_states[:-1]])  # the last one is after the norm
    torch.testing.assert_close(known["hidden"][:-1], edges, rtol=1e-5, atol=1e-5)


def test_an_untied_head_is_its_own(untied: tiny.Build) -> None:
    weights = reference.checkpoint_weights(untied.source)
    judge = reference.Reference(untied.source, tiny.CONTEXT)
    found = reference.run(
        judge, untied.text, weights("model.embed_tokens.weight"), [weights("lm_head.weight")], weights
    )
    with torch.no_grad():
        expected = tiny.transformers_model(untied.source)(torch.tensor([untied.text])).logits[0]
    torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-5)


def test_the_context_decides_the_factors_however_little_is_fed(built: tiny.Build, tmp_path: Path) -> None:
    """As for a whole sequence of that length: a test may feed fewer tokens."""
    long = tiny.relabelled(built, tmp_path, original=tiny.CONTEXT // 2)
    judge, full = reference.Reference(long.source, tiny.CONTEXT), tiny.transformers_model(long.source).model
    cos, _ = full.rotary_emb(torch.zeros(1), torch.arange(tiny.CONTEXT)[None])
    assert torch.equal(judge.cos, cos)
    short, _ = full.rotary_emb(torch.zeros(1), torch.arange(tiny.CONTEXT // 2)[None])
    assert not torch.allclose(judge.cos[:, : tiny.CONTEXT // 2], short)


def test_weights_may_be_others(built: tiny.Build) -> None:
    """The dequantised ones of a package, say: nothing is left of the checkpoint's."""
    judge, x = reference.Reference(built.source, tiny.CONTEXT), judged.known(built.source)["hidden"][2][:4]
    plain = reference.checkpoint_weights(built.source)
    first = judge.layers(x, [2], plain)[-1]
    doubled = judge.layers(x, [2], lambda name: 2 * plain(name))[-1]
    assert not torch.allclose(first, doubled)
    assert torch.equal(judge.layers(x, [2], plain)[-1], first)
