"""Gated DeltaNet: what transformers computes, whatever is rejected, and each mistake of a port is found out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import util
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers.models.qwen3_5.modeling_qwen3_5 as qwen3_5
from numpy.typing import NDArray
from torch import Tensor

from shardmill.gates.parity import relative_error
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models import delta_net
from shardmill.models.architecture import Graph
from shardmill.models.attention import Shared
from shardmill.models.contract import BLOCK, DECAY_SCALE, RING, GraphSpec, caches
from shardmill.models.delta_net import GatedDeltaNet, Solved, substituted
from shardmill.models.families.qwen3_5_text import KINDS
from shardmill.models.host import Floats, KVLayout
from shardmill.models.part_constants import computed
from shardmill.models.primitives import L2Norm, RMSNorm, softplus
from shardmill.models.recurrences import DeltaNet

from . import tiny_families as tiny

LIMIT, TEXT = THRESHOLDS["program_error"].limit, 96
SIZES = DeltaNet(key_heads=2, value_heads=6, key_dim=32, value_dim=64, taps=4)
SPEC = GraphSpec(
    "layers", Graph(64, 4, 2, 32, 8, 96, 1e-6, delta=SIZES), ((0, KINDS["linear_attention"]),), slots=TEXT + BLOCK
)
LONG, WIDE = 400, 64  # tokens of a text, and of a pass of several blocks


def layout(spec: GraphSpec = SPEC, **narrow: int) -> KVLayout:
    """The host of a model that has recurrences only."""
    assert spec.graph.recurrence
    runtime = {"context": spec.slots, "rope": {}, "window": None, "window_slots": 0, "conv_taps": 0}
    return KVLayout(runtime | {"recurrent": {"block": BLOCK, "taps": spec.graph.recurrence.taps, **narrow}})


def in_fp64(theirs: ModuleType = qwen3_5) -> ModuleType:
    """transformers' own module, in which every cast to fp32 is one to fp64."""
    source = Path(str(theirs.__file__)).read_text(encoding="utf-8").replace("torch.float32", "torch.float64")
    source = source.replace("dtype=torch.float)", "dtype=torch.double)").replace(".float()", ".double()")
    spec = util.spec_from_loader(f"{theirs.__name__}_fp64", loader=None)
    assert spec is not None
    module = util.module_from_spec(spec)
    module.__file__ = theirs.__file__
    sys.modules[spec.name] = module
    exec(compile(source, spec.name, "exec"), vars(module))
    return module


@pytest.fixture(scope="module")
def theirs() -> Any:
    """transformers' layer in fp64, with heads that forget slowly and heads that forget at once."""
    config = tiny.tiny_config(
        "qwen3_5_text", rms_norm_eps=1e-6, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=32
    )
    torch.manual_seed(0)
    layer = in_fp64().Qwen3_5GatedDeltaNet(config, 0).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            weight.copy_(0.2 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
            weight.add_(1.0 if name == "norm.weight" else 0.0)
        layer.A_log.uniform_(-4, 2.7, generator=generator)
    return layer


def ours(layer: Any) -> GatedDeltaNet:
    """Our layer of the same weights in fp64, with the constants that need not fit fp16 then."""
    found = dict(layer.state_dict())
    taps = found.pop("conv1d.weight")[:, 0]
    weights = {f"tap_{j}": taps[:, j] for j in range(SIZES.taps)}
    weights["in_proj_ba.weight"] = torch.cat([found.pop("in_proj_b.weight"), found.pop("in_proj_a.weight")])
    weights["rate"] = -DECAY_SCALE * found.pop("A_log").exp()
    mixer = GatedDeltaNet(SPEC.graph, {**weights, **found}, "").double()
    mixer.unit.root_eps.fill_(1e-3)
    mixer.norm.root_eps.fill_(1e-3 * delta_net.Q_SCALE * delta_net.V_SCALE)
    mixer.norm.factors = []
    return mixer


WIDTHS = tuple(range(1, BLOCK + 1))


@torch.no_grad()
def fed(mixer: Any, x: Tensor, seed: int, widths: tuple[int, ...] = WIDTHS, spec: GraphSpec = SPEC) -> Tensor:
    """Outputs [n, d] for inputs [n, d], in passes of any widths that carry wrong tokens at their ends.

    In the last block, if a pass has several; such a pass is filled up as a program fills it up.
    """
    rng, start, found = np.random.default_rng(seed), 0, []
    host = layout(spec, narrow=BLOCK) if WIDE in widths else layout(spec)
    ring, state = (torch.zeros(shape, dtype=x.dtype) for shape in caches(spec).values())
    constants = {name: torch.from_numpy(values).to(x.dtype) for name, values in computed(spec).items()}
    while start < len(x):
        width = int(rng.choice(widths))
        count = int(rng.integers(BLOCK + 1, width + 1)) if width > BLOCK else width
        kept = min(count - int(rng.integers(0, (count - 1) % BLOCK + 1)), len(x) - start)
        wrong = torch.from_numpy(rng.normal(size=(count - kept, x.shape[1]))).to(x.dtype)
        at = [position % spec.slots for position in range(start, start + count)]
        arrays = filled(host.arrays(at, range(start, start + count)), width - count)
        given = {name: torch.from_numpy(values).to(x.dtype) for name, values in arrays.items()}
        rows = torch.cat([x[start : start + kept], wrong])
        rows = torch.cat([rows, rows[-1:].expand(width - count, -1)]).T[None, :, :, None]
        wide = replace(spec, blocks=max(width // BLOCK, 1))
        found.append(mixer(rows, Shared(wide, given, constants), ring, state)[0, :, :kept, 0].T)
        start += kept
    return torch.cat(found)


def filled(arrays: Mapping[str, Floats], more: int) -> dict[str, Floats]:
    """The masks of a recurrence with `more` tokens added, which are written nowhere."""
    axes = {"conv_write_mask": 2, "recurrent_read_mask": 3, "recurrent_out_mask": 2, "recurrent_keep_mask": 3}
    return {
        name: np.pad(arrays[name], [(0, more if axis == each else 0) for each in range(4)])
        for name, axis in axes.items()
    }


def draw(count: int = TEXT) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants that need not fit fp16."""
    monkeypatch.setattr(delta_net, "scale", lambda x, factor: x * factor)
    monkeypatch.setattr(delta_net, "softplus", torch.nn.functional.softplus)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("seed", range(3))
def test_the_arithmetic_is_transformers_own(theirs: Any, seed: int) -> None:
    """In fp64, with rejected drafts, where only the order of sums differs."""
    x = draw()
    with torch.no_grad():
        expected = theirs(x[None])[0]
    assert relative_error(fed(ours(theirs), x, seed), expected) <= 1e-12


@pytest.mark.usefixtures("exact")
def test_a_long_text_in_passes_of_one_token(theirs: Any) -> None:
    """As it is decoded: a fold for every eight tokens."""
    x = draw()
    with torch.no_grad():
        expected = theirs(x[None])[0]
    assert relative_error(fed(ours(theirs), x, 0, widths=(1,)), expected) <= 1e-12


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("widths", [(WIDE,), (1, 3, WIDE), (8, 16, 24, WIDE)], ids=str)
def test_passes_of_several_blocks_are_transformers_own(theirs: Any, widths: tuple[int, ...]) -> None:
    """Alone and among others, filled up, with rejected tokens in the last block."""
    x = draw(LONG)
    with torch.no_grad():
        expected = theirs(x[None])[0]
    for seed in range(3):
        assert relative_error(fed(ours(theirs), x, seed, widths), expected) <= 1e-12


# The host.


def test_a_recurrence_goes_back_as_far_as_it_is_not_folded() -> None:
    """And always to the beginning of a text."""
    host = layout()
    for start in range(20):
        host.arrays([start], [start])
    assert host.folded == 16
    assert [host.rewindable(p) for p in (0, 1, 15, 16, 20, 21)] == [True, False, False, True, True, False]
    before = host.ring.copy()
    with pytest.raises(ValueError, match="position 15: the recurrence is folded up to 16; feed the text again"):
        host.arrays([15], [15])
    assert host.folded == 16 and np.array_equal(host.ring, before)  # refused, so nothing is marked
    assert not host.arrays([0], [0])["recurrent_keep_mask"].any() and host.folded == 0


@pytest.mark.parametrize("position", range(1, 20))
def test_as_many_tokens_can_be_undone_as_the_host_says(position: int) -> None:
    """And no more, or a draft model would have to read its text again."""
    host = layout()
    for start in range(position):
        host.arrays([start], [start])
    most = host.undoable(position)
    assert most is not None and 1 <= most <= BLOCK
    for start in range(position, position + most):
        host.arrays([start], [start])
    assert host.rewindable(position)
    host.arrays([position + most], [position + most])
    assert not host.rewindable(position)
    host.arrays([0], [0])
    assert layout().undoable(0) == BLOCK and host.undoable(1) == BLOCK - 1


def test_a_copy_belongs_to_the_position_up_to_which_its_state_is_folded() -> None:
    """Restored after another text, a pass goes on where the copy was made, and no further back."""
    host, other = layout(), layout()
    for start in range(20):
        host.arrays([start], [start])
    kept = host.rings()
    later = host.arrays([20], [20])
    for start in range(0, 40, 8):
        other.arrays(range(start, start + 8), range(start, start + 8))
    other.restore(0, 20, kept)
    assert [other.rewindable(p) for p in (15, 16, 20, 21)] == [False, True, True, False]
    again = other.arrays([20], [20])
    assert all(np.array_equal(later[name], again[name]) for name in later if "recurrent" in name or "conv" in name)


def test_a_session_goes_back_as_far_after_several_blocks() -> None:
    """To the beginning of the last block, which has at least a token."""
    for count in range(5, WIDE + 1):
        host = layout(narrow=4)
        host.arrays(range(3), range(3))
        host.arrays(range(3, 3 + count), range(3, 3 + count))
        assert host.folded == 3 + (count - 1) // BLOCK * BLOCK
        able = [p for p in range(1, 4 + count) if host.rewindable(p)]
        assert able == list(range(host.folded, 4 + count))
        assert host.undoable(3 + count) == host.folded + BLOCK - 3 - count or BLOCK


@pytest.mark.parametrize("at", [range(9), [0, 2], [1, 0]])
def test_positions_that_no_window_holds_are_refused(at: Any) -> None:
    with pytest.raises(ValueError, match="a recurrence takes up to 8 that follow one another"):
        layout().arrays(list(at), list(at))


def test_every_kept_position_is_folded_once() -> None:
    """By the first window, in order, whatever was rejected."""
    rng, host, folded, start = np.random.default_rng(0), layout(), [], 0
    back = SIZES.taps - 1
    while start < 80:
        at = np.arange(start, start + int(rng.integers(1, BLOCK + 1)))
        arrays = host.arrays(at.tolist(), at.tolist())
        read = arrays["recurrent_read_mask"][0, :, :, 0]
        first, second = (read[n * (BLOCK + back) : (n + 1) * (BLOCK + back)] for n in range(2))
        if first.any():  # the columns before the first of the block are for the convolution
            folded += [host.ring[slot] for slot in (row.argmax() for row in first[back:] if row.any())]
        assert host.folded == len(folded)
        places = arrays["recurrent_out_mask"][0, 0].argmax(axis=1)
        assert [host.ring[second[back + place].argmax()] for place in places] == at.tolist()
        start += int(rng.integers(1, len(at) + 1))
    assert folded == list(range(len(folded))) and len(folded) > 60


# The pieces in fp16 and at small numbers.


def test_softplus_is_right_in_fp16_where_a_head_forgets_next_to_nothing() -> None:
    """And where log(1 + exp(x)) would overflow."""
    x = torch.linspace(-9, 60, 4001).half().reshape(1, 1, 1, -1)
    expected = torch.nn.functional.softplus(x.double())
    assert float(((softplus(x).double() - expected).abs() / expected).max()) < 2e-3
    wide = softplus(x.float()).double()
    assert float(((wide - expected).abs() / expected).max()) < 4e-6


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0, 1e3])
def test_the_epsilon_of_the_l2_norm_is_added_to_the_sum(size: float) -> None:
    """Not to the mean, which shows only at numbers as small as after the convolution."""
    x = size * torch.randn(1, 3, 5, 32, generator=torch.Generator().manual_seed(0))
    expected = qwen3_5.l2norm(x, dim=-1, eps=1e-6)
    assert relative_error(L2Norm()(x)[0, 0], expected[0, 0]) < 1e-6
    by_mean = x * torch.rsqrt((x * x).mean(3, keepdim=True) + 1e-6) * x.shape[3] ** -0.5
    assert size >= 1 or relative_error(by_mean[0, 0], expected[0, 0]) > 1e-3
    assert not L2Norm()(torch.zeros(1, 1, 1, 32)).any()


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
def test_the_norm_of_scaled_heads_stays_in_the_range_of_fp16(eps: float) -> None:
    """Its epsilon is a million times the model's, and would overflow once divided by the square of a small number."""
    norm = RMSNorm(torch.ones(64), eps * (delta_net.Q_SCALE * delta_net.V_SCALE) ** 2, axis=3).half()
    for size in (1e-2, 1.0, 1e3):
        x = size * torch.randn(1, 4, 8, 64, generator=torch.Generator().manual_seed(0)).half()
        expected = torch.nn.functional.rms_norm(x.double() / 1024, (64,), eps=eps)
        assert relative_error(norm(x)[0, 0].double(), expected[0, 0]) < 4e-3


def test_forward_substitution_inverts() -> None:
    """Also if all keys are alike, where the inverse has large numbers of both signs."""
    i, j = np.mgrid[0:BLOCK, 0:BLOCK]
    lower = torch.from_numpy(np.where(i > j, 0.99, 0.0))[None, None]
    x = torch.randn(1, 1, BLOCK, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = torch.linalg.solve(torch.eye(BLOCK, dtype=torch.float64) + lower, x)
    assert torch.allclose(substituted(lower, x), expected, rtol=0, atol=1e-14)


# Mistakes, each on the whole tiny model with rejected drafts.

Patch = Callable[[pytest.MonkeyPatch], None]


def error(host: type[KVLayout] = KVLayout, changes: Mapping[str, Any] = {}, before: int = 0) -> float:
    """How far off the tiny model is, perhaps after another text."""
    model, tokens = tiny.tiny_model("qwen3_5_text", **changes), tiny.tiny_text()
    engine = tiny.Blocks(tiny.described(model), tiny.tensors_of(model), host=host)
    if before:
        tiny.error_of(engine, tiny.tiny_text(before), tiny.expected(model, tiny.tiny_text(before)))
    return tiny.error_of(engine, tokens, tiny.expected(model, tokens))


def method(name: str, change: Callable[[Any], Any], owner: Any = GatedDeltaNet) -> Patch:
    """A method in the place of one, which `change` gets."""
    return lambda patch: patch.setattr(owner, name, change(getattr(owner, name)))


def folded_twice(real: Any) -> Any:
    def folded(self: Any, state: Tensor, block: Solved, goes_on: Tensor) -> Any:
        return real(self, real(self, state, block, goes_on), block, goes_on)

    return folded


def decayed_after(real: Any) -> Any:
    """The state decays after a token is added, its own update too."""

    def solved(self: Any, *given: Any) -> Any:
        *heads, constants, n = given
        later = constants["later"]
        sums = torch.cat([later, later.transpose(2, 3) + torch.eye(BLOCK)], dim=2) / DECAY_SCALE
        return real(self, *heads, {**constants, "decay_sums": sums}, n)

    return solved


def without_beta(real: Any) -> Any:
    def heads(self: Any, windows: Tensor, n: int) -> Any:
        q, k, v, beta, decay = real(self, windows, n)
        return q, k, v, torch.ones_like(beta), decay

    return heads


def gated_before(_: Any) -> Any:
    """The gate before the norm, as Mamba 2 has it."""
    silu = torch.nn.functional.silu
    return lambda self, y, gate: self.norm(y * silu(gate).transpose(2, 3)).transpose(2, 3)


def without_correction(_: Any) -> Any:
    """Gated linear attention: what a key already reads from the state is not taken off."""

    def folded(self: Any, state: Tensor, block: Solved, goes_on: Tensor) -> Tensor:
        kept = state * (1 - (block.lost * goes_on + (1 - goes_on)))
        return kept + torch.matmul((block.k * block.until).transpose(2, 3), block.u)

    return folded


def plain_epsilon(real: Any) -> Any:
    def init(self: Any, g: Graph, weights: Any, path: str) -> None:
        real(self, g, weights, path)
        self.norm = RMSNorm(weights[f"{path}norm.weight"], g.rms_norm_eps, axis=3)  # not scaled with queries and values

    return init


def tiled(x: Tensor, n: int, key_heads: int, value_heads: int, sizes: tuple[int, int]) -> Tensor:
    """Key heads in the order of GGUF's weights."""
    return torch.cat([x] * (value_heads // key_heads), dim=1)


MISTAKES: dict[str, Patch] = {
    "a state folded twice": method("folded", folded_twice),
    "decay after the update": method("solved", decayed_after),
    "no beta": method("heads", without_beta),
    "no l2 norm": method("forward", lambda _: lambda self, x: x, L2Norm),
    "the gate before the norm": method("gated", gated_before),
    "no correction by the state": method("folded", without_correction),
    "an inverse of one term": lambda patch: patch.setattr(delta_net, "substituted", lambda n, x: x - n @ x),
    "key heads in turn": lambda patch: patch.setattr(delta_net, "spread", tiled),
    "no scale of the norm's epsilon": method("__init__", plain_epsilon),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_recurrence_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name](monkeypatch)
    assert error() > LIMIT


def without_skipping(self: KVLayout, positions: Any) -> Any:
    """Each position in the slot of its number, where a pass of several blocks still reads another."""
    return np.asarray(positions) % RING


def without_taps(real: Any) -> Any:
    """Loses the positions before the last block, which the next convolution reads."""

    def masks(self: KVLayout, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        found = real(self, at, block, taps)
        found["conv_write_mask"][:, :, : max(self.folded - int(at[0]), 0)] = 0
        return found  # type: ignore[no-any-return]

    return masks


def reordered(real: Any) -> Any:
    """The first two blocks of a pass change places."""

    def cut(self: Any, read: Tensor, own: Tensor, n: int) -> Any:
        found = real(self, read, own, n)
        return found if n == 2 else torch.cat([found[:, :1], found[:, 2:3], found[:, 1:2], found[:, 3:]], dim=1)

    return cut


def all_folded(real: Any) -> Any:
    """Blocks are folded of tokens that only fill the pass up."""

    def in_turn(self: Any, state: Tensor, q: Tensor, blocks: Solved, follows: list[Tensor]) -> Any:
        return real(self, state, q, blocks, [torch.ones_like(one) for one in follows])

    return in_turn


BLOCK_MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "padding folded": (GatedDeltaNet, "in_turn", all_folded),
    "blocks in another order": (GatedDeltaNet, "cut", reordered),
    "the last columns of the convolution lost": (KVLayout, "_recurrent_masks", without_taps),
    "what is pending folded twice": (GatedDeltaNet, "folded", folded_twice),
    "a slot written that is still read": (KVLayout, "ring_slots", lambda _: without_skipping),
}


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", BLOCK_MISTAKES)
def test_a_mistake_with_several_blocks_is_found_out(theirs: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = BLOCK_MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    x = draw(LONG)
    with torch.no_grad():
        expected = theirs(x[None])[0]
    assert relative_error(fed(ours(theirs), x, 0, (3, WIDE)), expected) > LIMIT


class WithRejected(KVLayout):
    """Folds all that the last pass fed, kept or not, as a state does that each pass writes."""

    end = 0

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        folded, first = self.folded, int(at[0])
        found = super()._recurrent_masks(at, block, taps)
        for position in range(first, min(self.end, folded + block)) if self.folded > folded else ():
            found["recurrent_read_mask"][0, position - folded + taps - 1, position % RING, 0] = 1
        self.end = first + len(at)
        return found


class OffByOne(KVLayout):
    """Reads each position's neighbour from the ring."""

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        found = super()._recurrent_masks(at, block, taps)
        read = np.roll(found["recurrent_read_mask"], 1, axis=2)
        return found | {"recurrent_read_mask": read}


class Forgetful(KVLayout):
    """Goes on with the state of the text before."""

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        found = super()._recurrent_masks(at, block, taps)
        found["recurrent_keep_mask"][..., 0] = 1
        return found


@pytest.mark.parametrize(("host", "before"), [(WithRejected, 0), (OffByOne, 0), (Forgetful, 30)])
def test_a_mistake_of_the_host_is_found_out(host: type[KVLayout], before: int) -> None:
    assert error(host, before=before) > LIMIT
    assert error(before=before) <= LIMIT


class AnyPosition(KVLayout):
    """Goes back to any position, though the state already holds later ones."""

    def _foldable(self, position: int, block: int, taps: int) -> bool:
        return True

    def _recurrent_masks(self, at: NDArray[np.int64], block: int, taps: int) -> dict[str, Floats]:
        self.folded = min(self.folded, int(at[0]))
        return super()._recurrent_masks(at, block, taps)


@pytest.mark.parametrize(("host", "wrong"), [(KVLayout, False), (AnyPosition, True)])
def test_a_prefix_of_another_text_is_fed_again_if_the_state_is_past_it(host: type[KVLayout], wrong: bool) -> None:
    """A session would go on after the shared prefix; the state must be of that position, or of none."""
    from shardmill.decode import Session

    model = tiny.tiny_model("qwen3_5_text")
    engine: Any = tiny.Blocks(tiny.described(model), tiny.tensors_of(model), host=host)
    engine.rewindable = engine.host.rewindable
    engine.forget = engine.host.forget
    session, first = Session(engine), tiny.tiny_text(30)
    second = [*first[:14], *reversed(first[14:])]
    session.prefill(first)
    found = session.prefill(second)
    expected = tiny.expected(model, second)[-1]
    assert (relative_error(found.row[None], expected[None]) > LIMIT) == wrong
    assert found.reused == (14 if wrong else 0)
    kept = [*second[:28], *first[:2]]  # within what is not folded: nothing is fed again
    again = session.prefill(kept)
    assert wrong or again.reused == 28
    assert wrong or relative_error(again.row[None], tiny.expected(model, kept)[-1:]) <= LIMIT


@pytest.mark.slow
def test_a_text_of_two_thousand_tokens_does_not_drift() -> None:
    """One token a pass, and the error of the last tokens is no larger than of the first."""
    model, tokens = tiny.tiny_model("qwen3_5_text", max_position_embeddings=2048), tiny.tiny_text(2000)
    engine: Any = tiny.Blocks(tiny.described(model, 2048), tiny.tensors_of(model), slots=2048)
    rows = np.concatenate([engine.forward(tokens[i : i + 1], [i], [i]) for i in range(len(tokens))])
    expected = tiny.expected(model, tokens)
    errors = [relative_error(rows[a:b], expected[a:b]) for a, b in pairwise(range(0, 2001, 500))]
    assert max(errors) <= LIMIT and errors[-1] <= 4 * errors[0]
