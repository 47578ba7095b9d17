"""Layers with a recurrence beside transformers' own in fp64: passes of any widths, in which drafts are rejected.

And mistakes with several blocks in a pass, which either recurrence can make.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
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
