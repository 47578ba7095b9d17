"""Qwen3.5's MTP layer on its own programs: drafts are those of the written-out arithmetic, texts the model's own."""

from __future__ import annotations

import sys
from typing import Any

import limits
import mtp_layers
import numpy as np
import pytest
import tiny
import torch
from drafted_decoding import Session, run
from drafted_decoding.drafters import create_drafter
from drafted_decoding.drafters.head import MTP, HeadDrafter
from drafted_decoding.policies import AlwaysDraft
from drafting import Recorded, loaded

from shardmill.models.families import qwen3_5_text
from shardmill.runtime.drafter import DrafterEngine, load_drafter
from shardmill.runtime.engine import Engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only"),
]
NEW, VOCAB = 40, 12  # so few tokens that random weights guess some of them


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "states in the graph": ({}, {}),
    "states on the host, an LM head of its own": ({"tie_word_embeddings": False}, {"program": {"state": "host"}}),
    "a scaled stream": ({}, {}),
    "drafts of the first tokens": ({"vocab_size": 18}, {"head": {"draft_vocab_size": 16}}),
    "drafts of the first tokens, an LM head of its own": (
        {"vocab_size": 18, "tie_word_embeddings": False},
        {"head": {"draft_vocab_size": 16}},
    ),
}


@pytest.fixture(scope="module", params=FORMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Engine]:
    """transformers' model, the tensors of the MTP layer, and the engine."""
    changes, settings = FORMS[request.param]
    folder, model = tmp_path_factory.mktemp("mtp"), mtp_layers.target(**{"vocab_size": VOCAB, **changes})
    weights = mtp_layers.drawn(model)
    checkpoint = mtp_layers.write(model, weights, folder / "checkpoint")
    (checkpoint / "tokenizer.json").unlink()  # has more tokens than the model, and nobody reads it
    source = tiny.fetched(checkpoint, folder / "source")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "a scaled stream":
            patch.setattr(qwen3_5_text, "WIDE", 64)
        build = tiny.converted(source, folder, quantization="fp16", **mtp_layers.SETTINGS, **settings)
    return model, weights, loaded(build, folder)


@pytest.mark.parametrize("seed", range(2))
def test_drafts_and_accepted_counts_are_those_of_the_arithmetic(made: tuple[Any, Any, Engine], seed: int) -> None:
    """Also after rejected drafts; the text is transformers' own greedy text."""
    model, weights, engine = made
    prompt = [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, 9)]
    drafter = Recorded(HeadDrafter(load_drafter(engine), MTP))
    found = run(Session(engine), prompt, max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
    plain = run(Session(engine), prompt, max_new_tokens=NEW)
    text = mtp_layers.continued(model, prompt, NEW)
    assert list(found.tokens) == list(plain.tokens) == text
    rounds, drafted = [one for one in drafter.rounds if one[1]], engine.manifest["drafter"]["vocab"]
    assert len(rounds) > 10 and {accepted for *_, accepted in rounds} >= {0, 1}
    whole = prompt + text
    for context, draft, accepted in rounds:
        assert list(draft) == mtp_layers.greedy(model, weights, context, len(draft), vocab=drafted)[0]
        follows = whole[len(context) :][: len(draft)]
        right = [ours == theirs for ours, theirs in zip(draft, follows, strict=False)]
        assert accepted == [*right, False].index(False)


def test_logits_are_those_of_the_arithmetic(made: tuple[Any, Any, Engine], request: pytest.FixtureRequest) -> None:
    """In every step of a draft: the first reads the model's hidden state, and the others the layer's own."""
    model, weights, engine = made
    head = load_drafter(engine)
    assert isinstance(head, DrafterEngine)
    context = [int(i) for i in np.random.default_rng(7).integers(0, VOCAB, 12)]
    run(Session(engine), context[:-1], max_new_tokens=1)
    scale = qwen3_5_text.STREAM_SCALE if "scaled" in request.node.name else 1.0
    kept = torch.from_numpy(engine.taps[: len(context) - 1]).float() / scale
    drafted = engine.manifest["drafter"]["vocab"]
    drafts, rows = mtp_layers.greedy(model, weights, context, 4, kept, drafted)
    head.follow(len(context) - 1)
    got = [head.forward([token], [p], [p])[0] for p, token in enumerate(context[1:])][-1:]
    got += [head.forward([token], [p], [p])[0] for p, token in enumerate(drafts[:-1], len(context) - 1)]
    for ours, theirs in zip(got, rows, strict=True):
        assert ours.shape == (drafted,)
        # The hidden states that it reads are kept in fp16: one rounding each, and nothing else of that size.
        limits.rows_agree("logits of a draft", ours, theirs, limits.roundings("fp16"))


def test_it_is_made_by_its_name(made: tuple[Any, Any, Engine]) -> None:
    assert create_drafter("mtp", head=load_drafter(made[2])).name == "mtp"
