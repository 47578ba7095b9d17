"""RG-LRU: what transformers computes, whatever is rejected, and each mistake of a port is found out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import limits
import numpy as np
import pytest
import torch
import transformers.models.recurrent_gemma.modeling_recurrent_gemma as recurrent_gemma
from kit_runner.figures import relative_error
from lab_script import load_script
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import gelu, softplus

from shardmill.gates.thresholds import THRESHOLDS
from shardmill.models import rg_lru
from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK, DECAY_SCALE, GraphSpec
from shardmill.models.recurrences import RgLru
from shardmill.models.rg_lru import RgLruMixer, root_of_lost

from .recurrent_layers import LONG, WIDE, WIDTHS, block_mistakes, fed, in_fp64

LIMIT, TEXT, HIDDEN = THRESHOLDS["program_error"].limit, 96, 64
EXACT = limits.sums("fp64", 128, TEXT)  # the longest projection; a state takes each token's sum on top of the last
SIZES = {"four taps": RgLru(heads=4, head_dim=32, taps=4), "two taps": RgLru(heads=2, head_dim=16, taps=2)}
KIND = LayerSpec(mixer="rg_lru", rope=None, mask="")


def layer(sizes: RgLru, hidden: int = HIDDEN) -> Any:
    """transformers' layer in fp64, with channels that forget slowly and channels that forget at once."""
    config = recurrent_gemma.RecurrentGemmaConfig(
        hidden_size=hidden, lru_width=sizes.width, num_attention_heads=sizes.heads, conv1d_width=sizes.taps
    )
    torch.manual_seed(0)
    found = in_fp64(recurrent_gemma).RecurrentGemmaRecurrentBlock(config, 0).eval().double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in found.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        found.rg_lru.recurrent_param.uniform_(-9, 3, generator=generator)
    return found


def theirs_of(layer: Any, x: Tensor) -> Tensor:
    """The outputs [n, d] of transformers' layer for inputs [n, d]."""
    with torch.no_grad():
        found: Tensor = layer(x[None], torch.arange(len(x))[None], None, use_cache=False)[0][0]
    return found


def ours(layer: Any, sizes: RgLru, hidden: int = HIDDEN, text: int = TEXT) -> tuple[RgLruMixer, GraphSpec]:
    """Our layer of the same weights."""
    graph = Graph(hidden, 4, 2, 32, 8, 96, 1e-6, activation="gelu_tanh", rg_lru=sizes)
    found = {name.removeprefix("rg_lru."): values.clone() for name, values in layer.state_dict().items()}
    taps = found.pop("conv_1d.weight")[:, 0]
    weights = {f"tap_{j}": taps[:, j] for j in range(sizes.taps)} | {"conv_bias": found.pop("conv_1d.bias")}
    weights |= {name: found.pop(f"{name}_weight") for name in ("input_gate", "recurrent_gate")}
    weights["rate"] = -8 * DECAY_SCALE * softplus(found.pop("recurrent_param"))
    mixer = RgLruMixer(graph, KIND, {**weights, **found}, "").to(taps.dtype)
    return mixer, GraphSpec("layers", graph, ((0, KIND),), slots=text + BLOCK)


def draw(count: int = TEXT) -> Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def exact_root(decay: Tensor) -> Tensor:
    return torch.sqrt(DECAY_SCALE * -torch.expm1(decay * (2 / DECAY_SCALE)))


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions that need not fit fp16."""
    monkeypatch.setattr(rg_lru, "root_of_lost", exact_root)
    monkeypatch.setitem(rg_lru.ACTIVATIONS, "gelu_tanh", partial(gelu, approximate="tanh"))  # type: ignore[arg-type]


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("widths", [WIDTHS, (1,), (WIDE,), (1, 3, WIDE), (8, 16, 24, WIDE)], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_the_arithmetic_is_transformers_own(name: str, widths: tuple[int, ...]) -> None:
    """In fp64, with rejected drafts, where only the order of sums differs; passes of several blocks are filled up."""
    sizes, x = SIZES[name], draw(LONG if WIDE in widths else TEXT)
    theirs = layer(sizes)
    mixer, spec = ours(theirs, sizes)
    for seed in range(3):
        limits.rows_agree(f"seed {seed}", fed(mixer, x, spec, seed, widths), theirs_of(theirs, x), EXACT)


ROUNDING = 2.0**-11


def test_the_root_of_what_is_lost_keeps_its_digits() -> None:
    """From a decay that fp16 holds times DECAY_SCALE to one that leaves nothing; in fp16, every operation rounds."""
    fp16 = load_script("recurrence")
    decay = fp16.rounded(-torch.logspace(-13, 12, 5000, base=2.0))
    right = exact_root(decay.double())
    assert relative_error_of(root_of_lost(decay.double()), right) < 2.0**-14  # the polynomial's, halved by the root
    with fp16.Rounded():
        found, plain = root_of_lost(decay), torch.sqrt(DECAY_SCALE * (1 - torch.exp(decay * (2 / DECAY_SCALE))))
    assert relative_error_of(found.double(), right) <= 4 * ROUNDING < relative_error_of(plain.double(), right)
    assert root_of_lost(torch.zeros(1)).item() == 0


def relative_error_of(found: Tensor, right: Tensor) -> float:
    return float(((found - right).abs() / right).max())


def test_a_channel_that_forgets_at_once_stays_finite_in_fp16() -> None:
    """Where a block's decays are beyond fp16, and would be infinity times 0."""
    sizes = SIZES["four taps"]
    mixer, spec = ours(layer(sizes), sizes)
    mixer.rate.fill_(-6e4)
    mixer.recurrent_gate_bias.fill_(6.0)
    found = fed(mixer.half(), 0.1 * draw()[:40].half(), spec, 0)
    assert torch.isfinite(found).all() and found.abs().max() > 0.01


# Mistakes, each with rejected drafts.


def exchanged(one: str, other: str) -> Callable[[RgLruMixer], None]:
    """Two constants, each in the place of the other."""

    def change(mixer: RgLruMixer) -> None:
        first, second = (getattr(mixer, name).clone() for name in (one, other))
        getattr(mixer, one).data, getattr(mixer, other).data = second, first

    return change


def marked(first: bool) -> Callable[[RgLruMixer], None]:
    """The ones of the ring where there is no token: before a text's first, or at every column."""

    def change(mixer: RgLruMixer) -> None:
        real, back = mixer.updates, mixer.sizes.taps - 1

        def updates(windows: Tensor, n: int) -> tuple[Tensor, Tensor]:
            windows = windows.clone()
            windows[:, :, back - 1 if first else slice(None), -1] = 1
            return real(windows, n)

        mixer.updates = updates  # type: ignore[method-assign]

    return change


def folded_twice(mixer: RgLruMixer) -> None:
    real = mixer.folded
    mixer.folded = lambda state, *given: real(real(state, *given), *given)  # type: ignore[method-assign]


def transposed(mixer: RgLruMixer) -> None:
    mixer.input_gate.data = mixer.input_gate.data.transpose(2, 3)


MISTAKES: dict[str, Callable[[RgLruMixer], Any]] = {
    "a state folded twice": folded_twice,
    "the first token as any other": marked(first=True),
    "columns of zeros as tokens": marked(first=False),
    "gates exchanged": exchanged("input_gate", "recurrent_gate"),
    "biases of gates exchanged": exchanged("input_gate_bias", "recurrent_gate_bias"),
    "a gate's matrices transposed": transposed,
    "taps in reverse": exchanged("tap_0", "tap_3"),
    "no bias of the convolution": lambda mixer: mixer.conv_bias.data.fill_(0),
    "half the rate": lambda mixer: mixer.rate.data.mul_(0.5),
}


@pytest.mark.parametrize("name", [None, *MISTAKES])
def test_a_mistake_in_the_recurrence_is_found_out(name: str | None) -> None:
    """And without one the layer is within the limit."""
    sizes, x = SIZES["four taps"], draw()
    theirs = layer(sizes)
    mixer, spec = ours(theirs, sizes)
    with torch.no_grad():
        MISTAKES.get(name or "", lambda _: None)(mixer)
    assert (relative_error(fed(mixer, x, spec, 0), theirs_of(theirs, x)) > LIMIT) == (name is not None)


BLOCK_MISTAKES = block_mistakes(rg_lru, RgLruMixer)


@pytest.mark.parametrize("name", BLOCK_MISTAKES)
def test_a_mistake_with_several_blocks_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = BLOCK_MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    sizes, x = SIZES["four taps"], draw(LONG)
    theirs = layer(sizes)
    mixer, spec = ours(theirs, sizes)
    assert relative_error(fed(mixer, x, spec, 0, (3, WIDE)), theirs_of(theirs, x)) > LIMIT


# In emulated fp16.

RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # what each head forgets of its state at a token, on average: -log a


def measured(rates: Sequence[float], tokens: int, width: int) -> NDArray[np.float64]:
    """The error of each head in each quarter of a text, in emulated fp16 with subnormal numbers as 0; [4, heads]."""
    fp16 = load_script("recurrence")
    sizes = RgLru(heads=len(rates), head_dim=32, taps=4)
    hidden = sizes.width
    theirs = layer(sizes, hidden).float()
    with torch.no_grad():  # of the sizes that a new model has
        for name, weight in theirs.named_parameters():
            weight.normal_(0, hidden**-0.5 if name.startswith("linear") else 0.15)
        theirs.rg_lru.recurrent_param.copy_((torch.tensor(rates) / 4).expm1().log().repeat_interleave(32))  # r is 1/2
        theirs.linear_out.weight.copy_(torch.eye(hidden))
        theirs.linear_out.bias.fill_(0)
        for weight in theirs.parameters():
            weight.copy_(fp16.rounded(weight))
        x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).half().float()
        right = theirs_of(theirs, x).double().reshape(4, -1, len(rates), 32)
    mixer, spec = ours(theirs, sizes, hidden, tokens)
    for weight in mixer.parameters():
        weight.data = fp16.rounded(weight.data)
    with fp16.Rounded():
        got = fed(mixer, x, spec, 0, (width,)).double().reshape(right.shape)
    return ((got - right).norm(dim=(1, 3)) / right.norm(dim=(1, 3))).numpy()


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 8, WIDE])
def test_errors_in_fp16_stay_small(width: int) -> None:
    """They are flat in heads that forget; others add up the roundings of their state, one for eight tokens."""
    errors = measured(RATES, 1200, width)
    assert errors.max() <= 8 * ROUNDING
    assert errors[:, 2:].max() <= 4 * ROUNDING and (errors[-1] <= 1.5 * errors[0])[2:].all()


@pytest.mark.slow
def test_a_share_that_is_kept_in_place_of_the_share_that_is_lost_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since fp16 has no number between 1 and 1 - 2^-11."""

    def folded(self: RgLruMixer, state: Tensor, added: Tensor, decay: Tensor, goes_on: Tensor) -> Tensor:
        return state * (torch.exp(decay) * goes_on) + added

    monkeypatch.setattr(RgLruMixer, "folded", folded)
    assert measured(RATES, 1200, 8).max() > 8 * ROUNDING
