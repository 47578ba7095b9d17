"""A head on its own programs: what it drafts is what the published code drafts, whatever was accepted before."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import heads
import limits
import numpy as np
import pytest
import tiny
import torch
from bench.folder import build_folder
from drafted_decoding import Options, Sampling, Session, create_drafter, run
from drafted_decoding.policies import AlwaysDraft
from drafting import loaded
from torch import Tensor

from shardmill.gates.weights import PackageWeights
from shardmill.machine import load_programs_as
from shardmill.runtime.drafter import DrafterEngine, drafted_tokens, load_drafter
from shardmill.runtime.engine import Engine
from shardmill.runtime.process import start_engine

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
DRAFTS = 3
ACCEPTED = (0, 3, 1, 0, 2, 3, 3, 0, 1, 2)  # of each pass, whatever was drafted


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> tiny.Build:
    return tiny.build_with_head(tmp_path_factory.mktemp("head"), "fp16")


@pytest.fixture(scope="module")
def model(build: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The engine that ships, in fp32."""
    with load_programs_as("fp32"):
        yield loaded(build, tmp_path_factory.mktemp("bundles"))


@pytest.fixture
def head(model: Engine) -> DrafterEngine:
    return load_drafter(model)


@pytest.fixture(scope="module")
def stored(build: tiny.Build) -> dict[str, Tensor]:
    """The head's weights as its packages hold them, by the published names."""
    found = heads.read_head(build.source / "drafter")
    for part in (part for part in build.parts.values() if part.drafter):
        held = PackageWeights(build.packages[part.name], part)
        found |= {t.source.tensor.removeprefix("drafter/"): held(t.source.tensor) for t in part.tensors}
    return found


def taps_of(build: tiny.Build, tokens: Sequence[int]) -> Tensor:
    """transformers' hidden states [n, 3 d] at the inputs of the tapped layers, with the packages' weights."""
    with torch.no_grad():
        model = tiny.transformers_model(build.source, tiny.dequantised(build))
        out = model(torch.tensor([list(tokens)]), output_hidden_states=True)
    return torch.cat([out.hidden_states[layer][0] for layer in build.plan["drafter"]["taps"]], dim=-1)


def test_taps_are_transformers_hidden_states(build: tiny.Build, model: Engine) -> None:
    """Within a part, at a part's first layer, and whatever was rejected at a slot before."""
    expected = taps_of(build, build.text[:24])
    session = Session(model)
    session.prefill(build.text[:9])
    for start in range(9, 24, 2):
        session.feed([*build.text[start : start + 2], 3])
        session.commit(min(2, 24 - start))
    limits.numbers_agree("taps", model.taps[:24], expected, limits.roundings("fp16"))  # kept in fp16


def test_drafts_are_those_of_the_published_code(
    build: tiny.Build, model: Engine, head: DrafterEngine, stored: dict[str, Tensor]
) -> None:
    """Pass after pass of a given text, with wrong drafts fed after the accepted ones."""
    session, drafter = Session(model), create_drafter("eagle3", head=head)
    text, at = list(build.text), 12
    session.prefill(text[: at - 1])
    drafter.reset(text[: at - 1])
    drafter.observe(text[at - 1 : at], 0)
    table, taps, compared = torch.from_numpy(model.table[range(tiny.VOCAB)]), taps_of(build, text), 0
    for accepted in ACCEPTED:
        found = drafter.propose(text[:at], DRAFTS).tokens
        expected, rows = heads.greedy(stored, table, text[:at], taps[: at - 1], DRAFTS)
        sure = min(float(row.topk(2).values.diff().abs()) for row in rows) > 0.02  # not a tie in fp16 taps
        compared += sure
        assert not sure or list(found) == expected
        wrong = [(token + 1) % tiny.VOCAB for token in text[at + accepted : at + DRAFTS]]
        session.feed([text[at - 1], *text[at : at + accepted], *wrong][: DRAFTS + 1])
        session.commit(1 + accepted)
        drafter.observe(text[at : at + accepted + 1], accepted)
        at += accepted + 1
    assert compared >= len(ACCEPTED) - 2


def test_another_request_is_drafted_like_the_first(model: Engine, head: DrafterEngine) -> None:
    """Whatever the head's session still holds, also of a text that begins with another token."""
    drafter, fresh = create_drafter("eagle3", head=head), list[tuple[int, ...]]()
    texts = [[5, 9, 7, 7, 30, 2], [6, 9, 7, 7, 30, 2], [6, 9, 7, 8, 30, 2]]
    for text in texts:
        Session(model).prefill(text[:-1])
        one = create_drafter("eagle3", head=head)
        one.reset(text[:-1])
        fresh.append(one.propose(text, DRAFTS).tokens)
    for text, tokens in zip(texts, fresh, strict=True):
        Session(model).prefill(text[:-1])
        drafter.reset(text[:-1])
        assert drafter.propose(text, DRAFTS).tokens == tokens  # and no `observe`: an abandoned request


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_same_with_drafts(model: Engine, head: DrafterEngine, temperature: float) -> None:
    """Greedy to the token; with a seed, again the same text on a second run."""
    options = Options(sampling=Sampling(temperature=temperature, seed=3))

    def text(drafter: str) -> tuple[int, ...]:
        found = run(
            Session(model),
            [5, 77, 130],
            max_new_tokens=40,
            drafter=create_drafter(drafter, head=head),
            policy=AlwaysDraft(),
            options=options,
        )
        assert drafter == "none" or sum(found.drafted) > 60
        return found.tokens

    assert text("eagle3") == text("none" if temperature == 0 else "eagle3")


def test_only_its_own_tokens_are_drafted(build: tiny.Build, model: Engine, head: DrafterEngine) -> None:
    tokens = drafted_tokens(model.manifest)
    known = heads.read_head(build.source / "drafter")
    assert tokens.tolist() == torch.nonzero(known["t2d"]).flatten().tolist()
    Session(model).prefill([5, 9, 7])
    head.follow(2)
    assert np.array_equal(head.ids, tokens)
    assert head.forward([9], [0], [0]).shape == (1, heads.ROWS)  # and no logit of any other token


@pytest.mark.thorough
def test_a_head_in_another_process_is_called_like_one_here(
    build: tiny.Build, model: Engine, head: DrafterEngine, tmp_path: Path
) -> None:
    """What is known of it without a call, its logits, and the members that every engine has."""
    there = start_engine(build_folder(build, tmp_path), "fp32")
    rows = []
    for engine, own in ((model, head), (there, there.load_drafter())):
        assert own.ids.tolist() == head.ids.tolist() and own.vocab == model.vocab and own.widths == model.widths
        Session(engine).prefill([5, 9, 7])
        own.renew()
        own.follow(2)
        rows.append(own.forward([9, 7], [0, 1], [0, 1]))
        assert own.undoable(2) is None and own.rewindable(1) and own.adapt(None) == ""
    assert rows[0].shape == (2, heads.ROWS)
    limits.rows_agree("logits of a draft", rows[1], rows[0], limits.roundings("fp16"))  # the taps are kept in fp16


@pytest.mark.slow
def test_programs_of_another_form_draft_the_same(
    build: tiny.Build, model: Engine, head: DrafterEngine, tmp_path: Path
) -> None:
    """A function for each width, caches on the host, and a text that outgrows a shorter context."""
    form = {"shapes": "fixed", "state": "host", "contexts": [32]}
    with load_programs_as("fp32"):
        other = loaded(tiny.build_with_head(tmp_path, "fp16", program=form), tmp_path)
        second = load_drafter(other)
    assert (other.lengths, second.lengths) == ((32, 64), (32, 64))
    proposals: dict[int, list[tuple[int, ...]]] = {}
    for number, (engine, own) in enumerate(((model, head), (other, second))):
        drafter, session, text = create_drafter("eagle3", head=own), Session(engine), build.text
        session.prefill(text[:11])
        drafter.reset(text[:11])
        proposals[number] = []
        for at in range(12, 52, 2):
            proposals[number].append(drafter.propose(text[:at], DRAFTS).tokens)
            session.feed([*text[at - 1 : at + 1], 3])
            session.commit(2)
            drafter.observe(text[at : at + 2], 1)
    assert own.host.length == 64
    same = [a == b for a, b in zip(proposals[0], proposals[1], strict=True)]
    assert sum(same) >= len(same) - 1  # but for a tie between taps in fp16
