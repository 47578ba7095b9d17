"""RG-LRU: what transformers computes, whatever is rejected, and each mistake of a port is found out."""

from __future__ import annotations

from collections.abc import Callable
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

from .recurrent_layers import (
    HEAD,
    LONG,
    RATES,
    TOKENS,
    WIDE,
    WIDTHS,
    Mistake,
    block_mistakes,
    errors_in_fp16,
    fed,
    folded_twice,
    in_fp64,
    stay_small,
)

LIMIT, TEXT, HIDDEN = THRESHOLDS["program_error"].limit, 96, 64
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
    # The longest projection has 128 products; a state takes each token's sum on top of the last.
    limit = limits.sums("fp64", 128, len(x))
    for seed in range(3):
        limits.rows_agree(f"seed {seed}", fed(mixer, x, spec, seed, widths), theirs_of(theirs, x), limit)


def test_the_root_of_what_is_lost_keeps_its_digits() -> None:
    """From a decay that fp16 holds times DECAY_SCALE to one that leaves nothing; in fp16, every operation rounds."""
    fp16 = load_script("recurrence")
    decay = fp16.rounded(-torch.logspace(-13, 12, 5000, base=2.0))
    right = exact_root(decay.double())
    assert relative_error_of(root_of_lost(decay.double()), right) < 2.0**-14  # the polynomial's, halved by the root
    with fp16.Rounded():
        found, plain = root_of_lost(decay), torch.sqrt(DECAY_SCALE * (1 - torch.exp(decay * (2 / DECAY_SCALE))))
    most = limits.roundings("fp16").value
    assert relative_error_of(found.double(), right) <= most < relative_error_of(plain.double(), right)
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


def constants(change: Callable[[RgLruMixer], Any]) -> Mistake:
    """Other constants of a layer."""

    def changed(real: Any) -> Any:
        def init(self: RgLruMixer, *given: Any) -> None:
            real(self, *given)
            change(self)

        return init

    return RgLruMixer, "__init__", changed


def exchanged(one: str, other: str) -> Mistake:
    """Two constants, each in the place of the other."""

    def change(mixer: RgLruMixer) -> None:
        first, second = getattr(mixer, one), getattr(mixer, other)
        first.data, second.data = second.data, first.data

    return constants(change)


def marked(first: bool) -> Mistake:
    """The ones of the ring where there is no token: before a text's first, or at every column."""

    def changed(real: Any) -> Any:
        def updates(self: RgLruMixer, windows: Tensor, n: int) -> Any:
            windows = windows.clone()
            windows[:, :, self.sizes.taps - 2 if first else slice(None), -1] = 1
            return real(self, windows, n)

        return updates

    return RgLruMixer, "updates", changed


def transposed(mixer: RgLruMixer) -> None:
    mixer.input_gate.data = mixer.input_gate.data.transpose(2, 3)


MISTAKES: dict[str, Mistake] = {
    "a state folded twice": (RgLruMixer, "folded", folded_twice),
    "the first token as any other": marked(first=True),
    "columns of zeros as tokens": marked(first=False),
    "gates exchanged": exchanged("input_gate", "recurrent_gate"),
    "biases of gates exchanged": exchanged("input_gate_bias", "recurrent_gate_bias"),
    "a gate's matrices transposed": constants(transposed),
    "taps in reverse": exchanged("tap_0", "tap_3"),
    "no bias of the convolution": constants(lambda mixer: mixer.conv_bias.data.fill_(0)),
    "half the rate": constants(lambda mixer: mixer.rate.data.mul_(0.5)),
}
BLOCK_MISTAKES = block_mistakes(rg_lru, RgLruMixer)


def error(tokens: int, widths: tuple[int, ...]) -> float:
    """The error of the layer with four taps."""
    sizes, x = SIZES["four taps"], draw(tokens)
    theirs = layer(sizes)
    mixer, spec = ours(theirs, sizes)
    return relative_error(fed(mixer, x, spec, 0, widths), theirs_of(theirs, x))


def test_without_a_mistake_the_layer_is_within_the_limit() -> None:
    assert error(TEXT, WIDTHS) <= LIMIT and error(LONG, (3, WIDE)) <= LIMIT


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_recurrence_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    assert error(TEXT, WIDTHS) > LIMIT


@pytest.mark.parametrize("name", BLOCK_MISTAKES)
def test_a_mistake_with_several_blocks_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, change = BLOCK_MISTAKES[name]
    monkeypatch.setattr(owner, attribute, change(getattr(owner, attribute)))
    assert error(LONG, (3, WIDE)) > LIMIT


# In emulated fp16.


def measured(width: int) -> NDArray[np.float64]:
    """The error of each head in each quarter of a text; see `errors_in_fp16`."""
    sizes = RgLru(heads=len(RATES), head_dim=HEAD, taps=4)
    hidden = sizes.width
    theirs = layer(sizes, hidden).float()
    with torch.no_grad():  # of the sizes that a new model has
        for name, weight in theirs.named_parameters():
            weight.normal_(0, hidden**-0.5 if name.startswith("linear") else 0.15)
        theirs.rg_lru.recurrent_param.copy_((torch.tensor(RATES) / 4).expm1().log().repeat_interleave(HEAD))  # r is 1/2
        theirs.linear_out.weight.copy_(torch.eye(hidden))
        theirs.linear_out.bias.fill_(0)
    return errors_in_fp16(theirs, partial(ours, sizes=sizes, hidden=hidden, text=TOKENS), theirs_of, width)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 8, WIDE])
def test_errors_in_fp16_stay_small(width: int) -> None:
    """They are flat in heads that forget; others add up the roundings of their state, one for eight tokens."""
    stay_small(measured(width))


@pytest.mark.slow
def test_a_share_that_is_kept_in_place_of_the_share_that_is_lost_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since fp16 has no number between 1 and 1 - 2^-11."""

    def folded(self: RgLruMixer, state: Tensor, added: Tensor, decay: Tensor, goes_on: Tensor) -> Tensor:
        return state * (torch.exp(decay) * goes_on) + added

    monkeypatch.setattr(RgLruMixer, "folded", folded)
    with pytest.raises(AssertionError, match="a head that forgets 0.0001: the error 0.0"):
        stay_small(measured(8))
