"""Parts chained through MLModel.predict give transformers' logits; the host's work is written here a second time."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import safetensors.torch
import tiny
import torch
from drafted_decoding import ContextPolicy, NotFiniteError, Session, create_drafter, create_policy, run
from drafted_decoding.policies import AlwaysDraft
from models.hosts import host
from numpy.typing import NDArray

from shardmill.errors import ShardmillError
from shardmill.runtime import engine
from shardmill.runtime.kv import NEVER
from shardmill.runtime.manifest import in_place

Floats = NDArray[np.float32]
MAC = sys.platform == "darwin"
# Core ML itself computes in fp16 only, and keeps part of a sum in it; the portable engine's fp16 is 1e-2 away.
CLOSE = limits.model(tiny.LAYERS, 4, "fp16") if MAC else limits.model(tiny.LAYERS, tiny.FFN)
SLIP = 10 * CLOSE.value if MAC else 1e-2  # what shows beyond any doubt
alike = pytest.mark.skipif(MAC, reason="in fp16 two widths may round a near tie apart, and other tokens follow")
SPLITS = {
    "T=1": [1],
    "T=2": [2],
    "T=3": [3],
    "T=4": [4],
    "mixed": [1, 4, 2, 3, 1, 1],
    "prefill, then decode": [4] * 8 + [1] * 64,
}


class ByHand:
    """The host of the graph contract, from its text alone: numpy, and transformers' own rotary embedding."""

    def __init__(self, build: tiny.Build) -> None:
        import coremltools as ct
        from safetensors.numpy import load_file
        from transformers import AutoConfig
        from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

        units = ct.ComputeUnit.CPU_AND_NE
        self.layers = [ct.models.MLModel(str(build.packages[p.name]), compute_units=units) for p in build.layers()]
        self.heads = [ct.models.MLModel(str(build.packages[p.name]), compute_units=units) for p in build.heads()]
        self.states = [layer.make_state() for layer in self.layers]
        self.table = load_file(build.table)["embedding"]
        rotary = Phi3RotaryEmbedding(AutoConfig.from_pretrained(build.source))
        cos, sin = rotary(torch.zeros(1), torch.arange(tiny.CONTEXT)[None])  # [1, S, rope_dim], its halves alike
        self.cos, self.sin = (t[0, :, : tiny.ROPE_DIM // 2].numpy() for t in (cos, sin))

    def logits(self, tokens: Sequence[int], first: int) -> Floats:
        """[T, V] of tokens at positions first, first + 1, ..., each in the slot of its position."""
        at = np.arange(first, first + len(tokens))
        slots = np.arange(tiny.CONTEXT)
        x = self.table[list(tokens)].T.reshape(1, tiny.HIDDEN, len(tokens), 1).astype(np.float32)
        shared = {
            "rope_cos": self.cos[at],
            "rope_sin": self.sin[at],
            "attn_mask": np.where(slots > at[:, None], np.float32(-1e4), np.float32(0)).reshape(1, 1, len(at), -1),
            "kv_write_mask": (slots[:, None] == at).astype(np.float32).reshape(1, 1, -1, len(at)),
        }
        for layer, state in zip(self.layers, self.states, strict=True):
            x = layer.predict({"x": x, **shared}, state=state)["hidden"]
        rows = [head.predict({"hidden": x})["logits"][0, :, :, 0] for head in self.heads]
        return np.concatenate(rows).T.astype(np.float32)


def fed(tokens: Sequence[int], widths: Sequence[int], logits: Any) -> Floats:
    """Logits [n, V] of all tokens, fed in passes of the given widths in turn."""
    rows, at, turn = [], 0, 0
    while at < len(tokens):
        chunk = tokens[at : at + widths[turn % len(widths)]]
        rows.append(logits(chunk, at))
        at, turn = at + len(chunk), turn + 1
    return np.concatenate(rows)


def through_engine(built: engine.Engine) -> Any:
    """The engine as a function of (tokens, first position)."""
    return lambda tokens, first: built.forward(tokens, *[range(first, first + len(tokens))] * 2)


def load(build: tiny.Build) -> engine.Engine:
    manifest = in_place(build.plan, build.packages, build.table)
    return engine.Engine(json.loads(json.dumps(manifest)), Path("/"))


def expected_logits(build: tiny.Build, weights: Any = None) -> Floats:
    """transformers', the whole text at once."""
    with torch.no_grad():
        logits: Floats = tiny.transformers_model(build.source, weights)(torch.tensor([build.text])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> tuple[tiny.Build, Floats]:
    """A build, and transformers' logits with the weights that its packages hold."""
    build = request.getfixturevalue({"tied": "built", "untied": "untied"}[request.param])
    return build, expected_logits(build, tiny.dequantised(build))


@pytest.mark.thorough(
    but=["tied-T=1", "tied-T=3", "tied-mixed", "untied-T=4", "untied-mixed", "untied-prefill, then decode"]
)
@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("split", SPLITS)
def test_parts_chained_by_hand_give_transformers_logits(model: tuple[tiny.Build, Floats], split: str) -> None:
    build, expected = model
    limits.rows_agree("logits", fed(build.text, SPLITS[split], ByHand(build).logits), expected, CLOSE)


@pytest.mark.thorough(
    but=["tied-T=1", "tied-T=3", "tied-mixed", "untied-T=4", "untied-mixed", "untied-prefill, then decode"]
)
@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("split", SPLITS)
def test_the_engine_gives_transformers_logits(model: tuple[tiny.Build, Floats], split: str) -> None:
    build, expected = model
    logits = fed(build.text, SPLITS[split], through_engine(load(build)))
    assert logits.dtype == np.float32
    limits.rows_agree("logits", logits, expected, CLOSE)


@pytest.mark.usefixtures("fp32")
def test_the_reference_is_no_easy_one(built: tiny.Build) -> None:
    """Attention, rotation and the tables matter so much here that a slip in any of them would show."""
    expected = expected_logits(built)
    other = tiny.transformers_model(built.source)
    other.model.rotary_emb.attention_scaling = 1.0
    with torch.no_grad():
        without_factor = other(torch.tensor([built.text])).logits[0].numpy()
        alone = tiny.transformers_model(built.source)(torch.tensor(built.text)[:, None]).logits[:, 0].numpy()
    assert limits.error(without_factor, expected) > SLIP
    assert limits.error(alone[1:], expected[1:]) > SLIP


def test_shipped_precision_stays_close_to_the_original_weights(built: tiny.Build) -> None:
    """Question 3, by hand: fp16 activations and INT8 weights against the checkpoint in fp32."""
    import portable_coreml

    portable_coreml.install(precision="fp16")
    shipped = torch.from_numpy(fed(built.text, [4], ByHand(built).logits)).log_softmax(-1)
    original = torch.from_numpy(expected_logits(built)).log_softmax(-1)
    divergence = (original.exp() * (original - shipped)).sum(-1).mean()
    assert 1e-7 < divergence < 5e-3
    clear = original.topk(2).values.diff()[:, 0] < -0.1
    assert (original.argmax(-1) == shipped.argmax(-1))[clear].all()


@pytest.mark.usefixtures("fp32")
def test_slots_may_be_used_in_any_order(built: tiny.Build) -> None:
    """The cache is a set: where a token lies decides nothing, only the position it was written with."""
    plain = fed(built.text, [1], through_engine(load(built)))
    order = np.random.default_rng(3).permutation(tiny.CONTEXT)
    shuffled = load(built)

    def logits(tokens: Sequence[int], first: int) -> Floats:
        return shuffled.forward(tokens, order[first : first + len(tokens)], range(first, first + len(tokens)))

    limits.rows_agree("logits", fed(built.text, [4, 1, 3], logits), plain, CLOSE)


@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("next_width", [1, 2, 4])
def test_a_rejected_draft_leaves_no_trace(built: tiny.Build, next_width: int) -> None:
    """Whether its slots are written again at once (T=4) or stay for a while (T=1, 2)."""
    plain = fed(built.text, [1], through_engine(load(built)))
    tried = load(built)
    go = through_engine(tried)
    fed(built.text[:8], [4], go)
    wrong = [(t + 1) % tiny.VOCAB for t in built.text[9:12]]
    kept = go([built.text[8], *wrong], 8)[:1]
    after = [go(built.text[at : at + next_width], at) for at in range(9, 33, next_width)]
    limits.rows_agree("logits", np.concatenate([kept, *after]), plain[8 : 9 + next_width * len(after)], CLOSE)


@pytest.mark.usefixtures("fp32")
def test_reset_and_forget_hide_what_was_written(built: tiny.Build) -> None:
    used = load(built)
    go = through_engine(used)
    fed(list(reversed(built.text)), [4], go)
    used.reset()
    fresh = fed(built.text[:8], [4], through_engine(load(built)))
    limits.rows_agree("logits", fed(built.text[:8], [4], go), fresh, CLOSE)
    used.forget(range(4, 8))
    assert limits.error(go(built.text[:4], 8), fresh[4:]) > SLIP  # other positions, four tokens less
    assert (used.host.held[4:8] == NEVER).all()


@pytest.mark.usefixtures("fp32")
def test_long_factors_are_used_throughout_a_context_over_the_original_length(built: tiny.Build, tmp_path: Path) -> None:
    """transformers does so for the whole of a sequence that is longer; the programs are the same ones."""
    long = tiny.relabelled(built, tmp_path, original=tiny.CONTEXT // 2)
    assert long.plan["architecture"]["ropes"]["rope"]["factors"] == "long"
    expected = expected_logits(long, tiny.dequantised(long))
    limits.rows_agree("logits", fed(long.text, [4], through_engine(load(long))), expected, CLOSE)
    assert limits.error(expected_logits(built), expected_logits(long)) > SLIP


@alike
@pytest.mark.usefixtures("fp32")
def test_a_sliding_context_says_the_same_whatever_drafts(built: tiny.Build) -> None:
    """Far past the slots and the rotary tables, on the real programs: drafts of any kind change no token."""
    prompt = list(built.text[:20])

    def decode(drafter: str, policy: str) -> tuple[int, ...]:
        session = Session(load(built), context_policy="slide")
        helpers = create_drafter(drafter), create_policy(policy, session.widths)
        return run(session, prompt, max_new_tokens=2 * tiny.CONTEXT, drafter=helpers[0], policy=helpers[1]).tokens

    plain = decode("none", "always")
    assert len(plain) == 2 * tiny.CONTEXT
    assert decode("suffix", "always") == decode("learned", "cost_model") == plain


def test_a_text_beyond_the_context_is_refused_in_one_line(built: tiny.Build) -> None:
    """Not by StopIteration, which ends a generator in silence or as another error; the engine goes on as it was."""
    loaded = load(built)
    before = loaded.forward([1], [0], [0])
    for ask in (lambda: loaded.fit(tiny.CONTEXT + 1), lambda: loaded.forward([2], [tiny.CONTEXT], [1])):
        with pytest.raises(ShardmillError, match=f"takes {tiny.CONTEXT + 1} slots, the context has {tiny.CONTEXT}: "):
            ask()
    assert np.array_equal(loaded.forward([1], [0], [0]), before)


@dataclass
class Moving:
    """A program that says where it was moved, and with its contents or without; it can't be loaded at `refused`."""

    refused: int = 0
    moves: list[tuple[int, bool]] = field(default_factory=list)

    def move(self, length: int, keep: bool) -> None:
        self.moves.append((length, keep))
        if length == self.refused:
            raise ShardmillError("no memory")


def test_another_length_takes_the_contents_along_if_there_are_any() -> None:
    """If a part can't be loaded there, all parts are where they were, with what they had."""
    moving = object.__new__(engine.Engine)
    programs = [Moving(), Moving(refused=48)]
    moving.layers = [engine.Layers("part", program, [], [], 0) for program in programs]  # type: ignore[arg-type]
    moving.host, moving.lengths = host(slots=64), (16, 32, 48)
    moving.host.resize(16)
    moving.fit(20)  # an empty text has nothing to take along
    moving.host.arrays([0], [0])
    moving.fit(16)
    assert [program.moves for program in programs] == [[(32, False), (16, True)]] * 2
    with pytest.raises(ShardmillError, match="no memory"):
        moving.fit(40)
    assert [program.moves[2:] for program in programs] == [[(48, True), (16, True)]] * 2
    assert moving.host.length == 16


def test_a_folder_that_is_no_build_is_named(tmp_path: Path) -> None:
    with pytest.raises(ShardmillError, match=r"build the model first"):
        engine.load(tmp_path)


def test_a_program_that_cannot_be_loaded_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ShardmillError, match=r"gone\.mlpackage can't be loaded: [^\n]+$"):
        engine.Program(tmp_path / "gone.mlpackage", {"inputs": {}, "states": {}, "output": "hidden"})


@pytest.mark.parametrize("content", [None, b"", b"no table", safetensors.torch.save({"other": torch.zeros(1)})])
def test_an_embedding_that_is_none_is_named(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "embedding.safetensors"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ShardmillError) as caught:
        engine.read_tables(file)
    assert str(caught.value).startswith(f"{file} can't be read as the embedding table (")
    assert str(caught.value).count(str(tmp_path)) == 1


@pytest.mark.thorough(but=["stop"])
@alike
@pytest.mark.usefixtures("fp32")
@pytest.mark.parametrize("policy", ["stop", "slide"])
def test_a_build_with_wide_prompts_says_what_one_without_says(
    built: tiny.Build, tmp_path: Path, policy: ContextPolicy
) -> None:
    """Real programs of tokens.max 16 and verify 4 against those of 4: with drafts, and with a prefix that is reused."""
    wide = tiny.converted(built.source, tmp_path, tokens={"max": 16, "verify": 4})
    prompts = [list(built.text[:27]), [*built.text[:19], *built.text[2:10]]]

    def decode(build: tiny.Build, drafter: str) -> list[tuple[int, ...]]:
        loaded = load(build)
        session = Session(loaded, context_policy=policy)
        new = 2 * tiny.CONTEXT if policy == "slide" else tiny.CONTEXT - len(prompts[0])
        found = [
            run(session, p, max_new_tokens=new, drafter=create_drafter(drafter), policy=AlwaysDraft()) for p in prompts
        ]
        assert max(max(one.drafted) for one in found) == (0 if drafter == "none" else 3)
        return [one.tokens for one in found]

    assert load(wide).widths == (1, 4, 16) and load(wide).verify == 4
    assert decode(wide, "suffix") == decode(wide, "none") == decode(built, "none")


@pytest.mark.usefixtures("fp32")
def test_a_build_made_before_prompts_had_a_width_of_their_own_decodes_by_its_widest(built: tiny.Build) -> None:
    """Its model.json does not say how many tokens a decode pass takes."""
    content = in_place(built.plan, built.packages, built.table)
    assert content.pop("verify") == 4
    assert engine.Engine(content, Path("/")).verify == 4
    assert engine.Engine(content | {"widths": [1, 3]}, Path("/")).verify == 3


@pytest.mark.usefixtures("fp32")
def test_a_text_whose_numbers_are_not_finite_ends_alone(built: tiny.Build) -> None:
    """NaN in a cache can't be masked, so the text after it would be NaN, too, which reads as token 0."""
    used, prompt = load(built), [int(token) for token in built.text[:6]]
    expected = run(Session(load(built)), prompt, max_new_tokens=8).tokens
    session = Session(used)
    run(session, prompt[:3], max_new_tokens=2)
    spoilt = next(token for token in range(used.vocab) if token not in (*prompt, *expected))
    table = used.table[list(range(used.vocab))]
    table[spoilt] = np.nan
    used.table = table  # type: ignore[assignment]
    for texts in ([*prompt, spoilt], [spoilt, *prompt]):
        with pytest.raises(NotFiniteError, match="a number that is not finite"):
            run(session, texts, max_new_tokens=2)
        assert run(session, prompt, max_new_tokens=8).tokens == expected
    assert 0 not in expected
