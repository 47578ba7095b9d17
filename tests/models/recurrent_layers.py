"""Layers with a recurrence beside transformers' own in fp64: passes of any widths, in which drafts are rejected.

And mistakes with several blocks in a pass, which any recurrence can make; and how far off a layer may be in fp16.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import limits
import numpy as np
import torch
from lab_script import load_script
from numpy.typing import NDArray
from torch import Tensor

from shardmill.models.caches import RING
from shardmill.models.contract import BLOCK, GraphSpec, caches
from shardmill.models.part_kinds import computed
from shardmill.models.shared import LayerCaches, Shared
from shardmill.runtime.kv import Floats, KVLayout

from . import hosts

WIDTHS = tuple(range(1, BLOCK + 1))
WIDE = 64  # tokens of a pass of several blocks
LONG = 400  # tokens of a text in such passes
# In emulated fp16: what each head forgets of its state at a token, on average (-log of what it keeps).
RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
TOKENS, HEAD = 1200, 32  # of the text, and the width of a head

Mistake = tuple[Any, str, Callable[[Any], Any]]  # an owner, an attribute, and its change


def in_fp64(theirs: ModuleType) -> ModuleType:
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


@torch.no_grad()
def fed(mixer: Any, x: Tensor, spec: GraphSpec, seed: int, widths: tuple[int, ...] = WIDTHS) -> Tensor:
    """Outputs [n, d] for inputs [n, d], in passes of any widths that carry wrong tokens at their ends.

    In the last block, if a pass has several; such a pass is filled up as a program fills it up.
    """
    rng, start, found = np.random.default_rng(seed), 0, []
    assert spec.graph.recurrence
    narrow = {"narrow": BLOCK} if WIDE in widths else {}
    host = hosts.recurrent(spec.slots, spec.graph.recurrence.taps, **narrow)
    held = LayerCaches({name[0]: torch.zeros(shape, dtype=x.dtype) for name, shape in caches(spec).items()}, False)
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
        wide = replace(spec, tokens=width)
        found.append(mixer(rows, Shared(wide, given, constants), held)[0, :, :kept, 0].T)
        start += kept
    return torch.cat(found)


def filled(arrays: Mapping[str, Floats], more: int) -> dict[str, Floats]:
    """The masks of a recurrence with `more` tokens added, which are written nowhere."""
    axes = {"conv_write_mask": 2, "recurrent_read_mask": 3, "recurrent_out_mask": 2, "recurrent_keep_mask": 3}
    return {
        name: np.pad(arrays[name], [(0, more if axis == each else 0) for each in range(4)])
        for name, axis in axes.items()
    }


def folded_twice(real: Any) -> Any:
    """Folds a block twice."""

    def folded(self: Any, state: Tensor, *given: Any) -> Any:
        return real(self, real(self, state, *given), *given)

    return folded


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

    def cut(read: Tensor, own: Tensor, n: int, sizes: Any) -> Any:
        found = real(read, own, n, sizes)
        return found if n == 2 else torch.cat([found[:, :1], found[:, 2:3], found[:, 1:2], found[:, 3:]], dim=1)

    return cut


def all_folded(real: Any) -> Any:
    """Blocks are folded of tokens that only fill the pass up."""

    def init(self: Shared, *given: Any) -> None:
        real(self, *given)
        self.follows = [torch.ones_like(one) for one in self.follows]

    return init


def block_mistakes(module: ModuleType, mixer: type) -> dict[str, Mistake]:
    """Return the mistakes of a recurrence's module and its layer."""
    return {
        "padding folded": (Shared, "__init__", all_folded),
        "blocks in another order": (module, "cut", reordered),
        "the last columns of the convolution lost": (KVLayout, "_recurrent_masks", without_taps),
        "what is pending folded twice": (mixer, "folded", folded_twice),
        "a slot written that is still read": (KVLayout, "ring_slots", lambda _: without_skipping),
    }


@torch.no_grad()
def errors_in_fp16(
    theirs: Any, ours: Callable[[Any], Any], outputs: Callable[[Any, Tensor], Tensor], width: int
) -> Any:
    """The error of each of RATES' heads in each quarter of a text, with subnormal numbers as 0: [4, heads].

    Args:
        theirs: transformers' layer, whose outputs are the heads' side by side.
        ours: gives our layer of the same weights, and its spec.
        outputs: gives the outputs [n, d] of transformers' layer for inputs [n, d].
        width: the number of tokens of a pass.
    """
    fp16 = load_script("recurrence")
    for weight in theirs.parameters():
        weight.copy_(fp16.rounded(weight))
    mixer, spec = ours(theirs)
    for weight in mixer.float().parameters():
        weight.data = fp16.rounded(weight.data)
    x = torch.randn(TOKENS, spec.graph.hidden, generator=torch.Generator().manual_seed(1)).half().float()
    with fp16.Rounded():
        found = fed(mixer, x, spec, 0, (width,))
    right, got = (each.double().reshape(4, -1, len(RATES), HEAD) for each in (outputs(theirs, x), found))
    return ((got - right).norm(dim=(1, 3)) / right.norm(dim=(1, 3))).numpy()


# A rounding is off by anything up to half a step, so by 1 / sqrt(3) of that typically. Half a step is one unit of the
# least number of a binade, and 1 / (2 log 2) = 0.72 units of any number in it, on average: 0.42 units in all. Roundings
# that follow each other are off in either direction, so n of them by the root of n. The error of a head is that of
# thousands of numbers together, so chance hardly moves it: twice the typical case is the limit.
ROUNDED, PATH = limits.UNITS["fp16"] / math.sqrt(3) / (2 * math.log(2)), 10  # some ten from a token to its output
# An error that does not add up is the same in the last quarter as in the first, but for chance. A head that forgets 1 %
# at a token has three independent errors in 300 tokens, in each of 32 channels: the root mean square of these 96 is off
# by 1 / sqrt(2 * 96), and the ratio of two by sqrt(2) times that. An error that adds up grows sqrt(7) = 2.6 times.
GROWTH = 1 + limits.MARGIN / math.sqrt(3 * 32)


def in_fp16(rate: float) -> limits.Limit:
    """Limit the error of a head in TOKENS tokens: of the path to its output, and of its state.

    A state is rounded when a block of 8 tokens is folded into it, and forgets earlier errors as it forgets tokens: of k
    blocks before, it holds exp(-8 k rate). That is 1 rounding for a head that forgets at once, and TOKENS / 8 for one
    that never does.
    """
    held = (1 - math.exp(-2 * rate * TOKENS)) / (1 - math.exp(-2 * rate * BLOCK))
    return limits.Limit(2 * ROUNDED * math.sqrt(PATH + held), f"roundings of a head that forgets {rate:g}")


def stay_small(errors: NDArray[np.float64]) -> None:
    """Fail if a head is further off than it may be, or if the error of one that forgets grows along a text."""
    for rate, error in zip(RATES, errors.T, strict=True):
        limits.agrees(f"a head that forgets {rate:g}", error.max(), in_fp16(rate))
        assert rate < 1e-2 or error[-1] <= GROWTH * error[0], f"the error of a head that forgets {rate:g} grows"
