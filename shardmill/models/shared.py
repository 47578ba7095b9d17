"""What the layers of a part get beside the residual stream: the inputs of the pass, and each layer's caches.

Shapes: T are the tokens of the pass, S the slots of a cache, R the slots of a ring, B the tokens of a block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardmill.models.caches import KINDS, RING, CacheKind
from shardmill.models.contract import BLOCK, ORDER, GraphSpec, rope_inputs
from shardmill.models.low_rank import LayerAdapter
from shardmill.models.primitives import write_cache, write_ring


class LayerCaches:
    """The caches of one layer in a pass, by the letters of their names, as they are after what was put into them.

    They are buffers of the module, which become states of the program. Or the host owns them: then they are inputs, and
    what a pass adds is an output.

    Attributes:
        new: what the pass adds, by letter; only of caches that the host owns.
    """

    def __init__(self, tensors: Mapping[str, Tensor], hosted: bool) -> None:
        self._tensors, self._hosted = dict(tensors), hosted
        self.new: dict[str, Tensor] = {}

    def __getitem__(self, letter: str) -> Tensor:
        return self._tensors[letter]

    def put(self, letter: str, new: Tensor, *masks: Tensor) -> Tensor:
        """Put what the pass adds into a cache and return the cache after that.

        Args:
            letter: the cache's.
            new: rows of tokens [1, kv_heads, T, head_dim]; for a ring columns [1, 1, channels, T]; or a whole state.
            masks: where the tokens go, and what is kept; a state has none.
        """
        old, kind = self._tensors[letter], KINDS[letter]
        written = new
        if kind is not CacheKind.STATE:
            written = (write_ring if kind is CacheKind.RING else write_cache)(old, new, *masks)
        if self._hosted:
            self.new[letter] = new
            self._tensors[letter] = written
        else:
            old[:] = written
        return self._tensors[letter]


class Shared:
    """The inputs of a part as its layers need them, computed once per part."""

    def __init__(self, spec: GraphSpec, arrays: Mapping[str, Tensor], constants: Mapping[str, Tensor]) -> None:
        self.constants = constants  # that no checkpoint decides, by name
        self.order = constants.get(ORDER)  # of the experts, [1, classes, 1, 1]
        self.ropes: dict[str, tuple[Tensor, Tensor]] = {}
        for table in spec.ropes:
            cos, sin = (arrays[name] for name in rope_inputs(table))
            self.ropes[table] = cos.transpose(0, 1), sin.transpose(0, 1)  # each [rope_dim / 2, T]
        self.embedded = arrays.get("embedded")  # the tokens' embedding, [1, d, T, 1]
        self.row: Tensor | None = None  # the tokens' row for the present layer, [1, P, T, 1]
        self.adapter: LayerAdapter | None = None  # of the present layer
        groups = {(kind.mask, spec.graph.of(kind).group) for _, kind in spec.layers if kind.attends}
        self.rows = {  # of scores at once, by mask and group; 0 for all
            (kind.mask, spec.graph.of(kind).group): spec.rows_at_once(kind) for _, kind in spec.layers if kind.attends
        }
        self.masks: dict[tuple[str, int], Tensor] = {}
        for name, group in sorted(groups):
            mask = torch.cat([arrays[name]] * group, dim=2)  # [1, 1, group * T, S]
            if len(groups) > 1:
                # torch.jit names a value where it is used first. Without this use, the kind of the first layer would
                # decide which mask gets which name. Nothing uses the sum, so no program has it.
                _ = mask + 0
            self.masks[name, group] = mask
        # By the attention mask: where its layers write, [1, 1, S, T], and what of the cache they keep, [1, 1, S, 1].
        cached = spec.written_masks
        written = {name: arrays[name] for name in sorted({spec.write_mask(mask) for mask in cached})}
        cleared = {name: 1 - mask.sum(dim=3, keepdim=True) for name, mask in written.items()}
        self.writes = {mask: (written[name], cleared[name]) for mask in cached for name in [spec.write_mask(mask)]}
        if spec.convolves or spec.recurs:
            self.ring_write = arrays["conv_write_mask"]  # [1, 1, T, R]
            self.ring_keep = 1 - self.ring_write.sum(dim=2, keepdim=True)  # [1, 1, 1, R]
        if spec.recurs and (sizes := spec.graph.recurrence):  # at the first token, and zeros at the others
            columns = 2 * (BLOCK + sizes.taps - 1)
            self.windows = arrays["recurrent_read_mask"].sum(dim=3, keepdim=True).reshape(1, 1, columns, RING)
            self.column = arrays["recurrent_out_mask"]  # [1, 1, T, B]
            self.blocks = spec.blocks
            firsts = range(BLOCK, BLOCK * spec.blocks, BLOCK)
            self.follows = [self.column[:, :, i : i + 1, 0:1] for i in firsts]  # for each block but the last
            self.goes_on = arrays["recurrent_keep_mask"].sum(dim=3, keepdim=True)  # [1, 1, 1, 1]
        if spec.convolves:
            self.ring_read = torch.split(arrays["conv_read_mask"], 1, dim=1)  # L - 1 of [1, 1, R, T]
