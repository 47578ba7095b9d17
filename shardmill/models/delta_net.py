"""Gated DeltaNet (arXiv 2412.06464; transformers, models/qwen3_5): a recurrence that no rejected draft can touch.

For each value head, with the decay g <= 0 of a token and its beta in 0 .. 1:

    S = exp(g) S;  delta = beta (v - k S);  S = S + k^T delta;  o = q S

A pass puts what its tokens would add into a ring by position, and nothing into S. A later pass, in which they count,
folds them into S; models/contract.py has the windows and masks. Since both passes compute query, key and value from
the same numbers of the ring by the same operations, it does not matter when a token is folded. A block of B tokens is
computed in closed form. With G_ij the sum of the decays after token j up to token i, and G_i of those up to i:

    N_ij = beta_i (k_i k_j) exp(G_ij) for i > j;   [u | w] = (1 + N)^-1 [beta v | beta exp(G_i) k];   d = u - w S
    o_i = exp(G_i) q_i S + sum_{j <= i} (q_i k_j) exp(G_ij) d_j;   S = exp(G_B) S + sum_j exp(G_Bj) k_j^T d_j

A token with a beta and a decay of 0 changes nothing, whatever its key and value are.

A pass of more than one block reads its own tokens, and from the ring only what is before them. It computes all blocks
at once up to u and w, and then what needs the state, block by block. Each block but the last is folded in the pass.

In fp16 the state keeps its digits over thousands of tokens because of how this is spelled. Queries are 16 and values
64 times the model's, so that no product is subnormal, which the Neural Engine would flush. The ring has decays times
64 for the same reason. Sums of decays are sums, never differences of sums. 1 - exp(G) is (1 + exp(G)) tanh(-G / 2),
which is precise if a head forgets next to nothing. (1 + N)^-1 is forward substitution, since products of powers of N
cancel if keys are alike. SiLU and softplus have no operation that the engine reads from a coarse table.

Shapes: x is [1, d, T, 1]; the ring [1, 1, C, R] has C channels of R positions; S is [1, heads, key_dim, value_dim].
n counts blocks of B tokens, the pending one first: q and k are [n, heads, B, key_dim], v and u [n, heads, B,
value_dim], beta and decays [n, heads, B, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK
from shardmill.models.primitives import (
    L2Norm,
    RMSNorm,
    multiply,
    projection,
    scale,
    sigmoid_by_tanh,
    silu_tanh,
    softplus,
    unquantized,
    vector,
)
from shardmill.models.recurrences import Recurrence
from shardmill.models.shared import LayerCaches, Shared

Weights = Mapping[str, Tensor]
Q_SCALE, V_SCALE = 16.0, 64.0  # of queries; of values, and so of the state


class Solved:
    """What a block of B tokens does, whatever state it meets; n blocks at once, heads are value heads."""

    def __init__(self, u: Tensor, w: Tensor, k: Tensor, pairs: Tensor, since: Tensor, until: Tensor, lost: Tensor):
        self.u, self.w = u, w  # [n, heads, B, value_dim], [n, heads, B, key_dim]
        self.k = k  # [n, heads, B, key_dim]
        self.pairs = pairs  # exp(G_ij), [n, heads, B, B]
        self.since, self.until = since, until  # exp of the decays since the start and until the end, [n, heads, B, 1]
        self.lost = lost  # the share of the state that the block forgets, [n, heads, 1, 1]

    def block(self, number: int) -> Solved:
        """Return one of the blocks."""
        every = (self.u, self.w, self.k, self.pairs, self.since, self.until, self.lost)
        return Solved(*(values[number : number + 1] for values in every))


class GatedDeltaNet(nn.Module):
    """The mixer: x [1, d, T, 1] -> [1, d, T, 1], with the ring [1, 1, C, R] and the state [1, heads, ., .]."""

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()
        assert g.delta is not None
        self.sizes = delta = g.delta
        self.in_proj_qkv = projection(weights[f"{path}in_proj_qkv.weight"])
        self.in_proj_ba = nn.ParameterDict({"weight": unquantized(weights[f"{path}in_proj_ba.weight"])})
        self.dt_bias = vector(weights[f"{path}dt_bias"])
        self.rate = vector(weights[f"{path}rate"])
        for j in range(delta.taps):
            setattr(self, f"tap_{j}", nn.Parameter(weights[f"{path}tap_{j}"].reshape(1, 1, 1, -1), requires_grad=False))
        self.norm = RMSNorm(weights[f"{path}norm.weight"], g.rms_norm_eps * (Q_SCALE * V_SCALE) ** 2, axis=3)
        self.in_proj_z = projection(weights[f"{path}in_proj_z.weight"])
        self.out_proj = projection(weights[f"{path}out_proj.weight"])
        self.unit = L2Norm()

    @property
    def widths(self) -> tuple[int, int, int]:
        """Return the channels of query, key and value."""
        delta = self.sizes
        keys = delta.key_heads * delta.key_dim
        return keys, keys, delta.value_heads * delta.value_dim

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches) -> Tensor:
        delta, new = self.sizes, self.new_columns(x)
        read = put_into_ring(new, caches, shared)
        n = 1 + shared.blocks  # what is pending, and the blocks of the pass
        q, k, v, beta, decay = self.heads(cut(read, new, n, delta), n)
        blocks = self.solved(k, v, beta, decay, shared.constants, n)
        folded = caches.put("s", self.folded(caches["s"], blocks.block(0), shared.goes_on))
        q = spread(q[1:n], n - 1, delta.key_heads, delta.value_heads, (BLOCK, delta.key_dim))
        if shared.blocks == 1:
            y = torch.matmul(shared.column, self.seen(folded, q, blocks.block(1)))  # [1, heads, T, value_dim]
        else:
            y, folded = self.in_turn(folded, q, blocks, shared.follows)
            caches.put("s", folded)
        gate = self.in_proj_z(x).reshape(1, delta.value_heads, delta.value_dim, -1)
        out: Tensor = self.out_proj(self.gated(y, gate).reshape(1, self.widths[2], -1, 1))
        return out

    def in_turn(self, state: Tensor, q: Tensor, blocks: Solved, follows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the blocks of a pass read, [1, heads, T, value_dim], and the state before its last tokens' block.

        A block is folded if a token follows it, and not one that only fills the pass up.

        Args:
            state: the state before the pass.
            q: queries of the blocks, [n, heads, B, key_dim].
            blocks: what was pending before the pass, and then the n blocks.
            follows: for each block but the last, 1 if a token follows it, otherwise 0, each [1, 1, 1, 1].
        """
        outputs = [self.seen(state, q[0:1], blocks.block(1))]
        for i, follows_here in enumerate(follows, start=1):
            block = blocks.block(i)
            state = state - self.change(state, block.lost, block.w, block) * follows_here
            outputs.append(self.seen(state, q[i : i + 1], blocks.block(i + 1)))
        return torch.cat(outputs, dim=2), state

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the heads' output [1, heads, T, value_dim], normed and then gated, as the gate lies: [., ., ., T]."""
        out: Tensor = self.norm(y).transpose(2, 3) * silu_tanh(gate)
        return out

    def new_columns(self, x: Tensor) -> Tensor:
        """Return what the tokens of the pass would add: query, key and value, beta and decay, [1, 1, C, T]."""
        heads = self.sizes.value_heads
        ba = multiply(self.in_proj_ba["weight"], x).reshape(1, 1, 2 * heads, -1)
        b, a = torch.split(ba, heads, dim=2)  # each [1, 1, heads, T]
        qkv = self.in_proj_qkv(x).reshape(1, 1, self.sizes.mixed, -1)
        return torch.cat([qkv, sigmoid_by_tanh(b), softplus(a + self.dt_bias) * self.rate], dim=2)

    def heads(self, windows: Tensor, n: int) -> tuple[Tensor, ...]:
        """Return q and k [n, key heads, B, key_dim], v [n, value heads, B, value_dim], beta and decay [n, ., B, 1].

        Args:
            windows: positions of each block, [1, n, B + taps - 1, C].
            n: blocks.
        """
        delta, back = self.sizes, self.sizes.taps - 1
        raw, rest = torch.split(windows, [delta.mixed, 2 * delta.value_heads], dim=3)
        y = convolved([getattr(self, f"tap_{j}") for j in range(delta.taps)], raw)
        qk, v = torch.split(y, [sum(self.widths[:2]), self.widths[2]], dim=3)
        qk, v = ((z * (factor / 2)) * (torch.tanh(z * 0.5) + 1) for z, factor in ((qk, 1.0), (v, V_SCALE)))  # SiLU
        qk = self.unit(qk.reshape(n, BLOCK, 2 * delta.key_heads, delta.key_dim)).transpose(1, 2)
        q, k = torch.split(qk, delta.key_heads, dim=1)
        v = v.reshape(n, BLOCK, delta.value_heads, delta.value_dim).transpose(1, 2)
        rest = rest[:, :, back:].reshape(n, BLOCK, 2 * delta.value_heads, 1).transpose(1, 2)
        beta, decay = torch.split(rest, delta.value_heads, dim=1)
        return scale(q, Q_SCALE * delta.key_dim**-0.5), k, v, beta, decay

    def solved(
        self, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, constants: Mapping[str, Tensor], n: int
    ) -> Solved:
        """Return what n blocks do, given the results of `heads` but the query, and the part's triangles."""
        delta, later = self.sizes, constants["later"]
        heads = delta.key_heads, delta.value_heads
        pairs, since, until, lost = decayed(decay, n, delta.value_heads, constants)
        alike = spread(torch.matmul(k, k.transpose(2, 3)), n, *heads, (BLOCK, BLOCK))
        k = spread(k, n, *heads, (BLOCK, delta.key_dim))
        solution = substituted(
            alike * (pairs * later) * beta, torch.cat([v * beta, k * (beta * since)], dim=3)
        )  # [n, heads, B, value_dim + key_dim]
        u, w = torch.split(solution, [delta.value_dim, delta.key_dim], dim=3)
        return Solved(u, w, k, pairs, since, until, lost)

    def folded(self, state: Tensor, block: Solved, goes_on: Tensor) -> Tensor:
        """Return the state after a block; where a text begins, `goes_on` is 0, and the state before counts as 0."""
        lost, w = block.lost * goes_on + (1 - goes_on), block.w * goes_on
        return state - self.change(state, lost, w, block)

    def change(self, state: Tensor, lost: Tensor, w: Tensor, block: Solved) -> Tensor:
        """Return what a block takes off the state, less what it adds, given its `lost` and `w`."""
        added = torch.matmul((block.k * block.until).transpose(2, 3), block.u - torch.matmul(w, state))
        return state * lost - added

    def seen(self, state: Tensor, q: Tensor, block: Solved) -> Tensor:
        """Return what the tokens of a block read, given the state before it, [1, heads, B, value_dim]."""
        scores = torch.matmul(q, block.k.transpose(2, 3)) * block.pairs
        return torch.matmul(q * block.since, state) + torch.matmul(scores, block.u - torch.matmul(block.w, state))


def put_into_ring(new: Tensor, caches: LayerCaches, shared: Shared) -> Tensor:
    """Put what the tokens of a pass would add into the ring of a recurrence, and read both windows.

    Args:
        new: what the tokens would add, [1, 1, C, T].
        caches: the layer's; the ring is [1, 1, C, R].
        shared: the inputs of the part.

    Returns:
        The positions of both windows, [1, 1, 2 (B + taps - 1), C].
    """
    ring = caches.put("c", new, shared.ring_write, shared.ring_keep)
    return torch.matmul(shared.windows, ring.transpose(2, 3))


def cut(read: Tensor, new: Tensor, n: int, sizes: Recurrence) -> Tensor:
    """Return each block's positions, after the positions that its convolution reads, [1, n, B + taps - 1, C].

    Args:
        read: both windows of the ring, [1, 1, 2 (B + taps - 1), C].
        new: the tokens of the pass, [1, 1, C, T].
        n: blocks, the first one pending. Two blocks are the two windows.
        sizes: of the recurrence.
    """
    back = sizes.taps - 1
    if n == 2:
        return read.reshape(1, 2, BLOCK + back, sizes.pending)
    line = torch.cat([read[:, :, BLOCK + back : BLOCK + 2 * back], new.transpose(2, 3)], dim=2)
    starts = range(0, (n - 1) * BLOCK, BLOCK)
    return torch.cat([read[:, :, : BLOCK + back], *(line[:, :, i : i + BLOCK + back] for i in starts)], dim=1)


def convolved(taps: Sequence[Tensor], raw: Tensor) -> Tensor:
    """Return the convolution of blocks [., ., B + taps - 1, C], the last tap for the token itself: [., ., B, C]."""
    y = taps[0] * raw[:, :, 0:BLOCK]
    for j, tap in enumerate(taps[1:], start=1):
        y = y + tap * raw[:, :, j : j + BLOCK]
    return y


def decayed(
    decay: Tensor, n: int, heads: int, constants: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what blocks forget.

    Args:
        decay: of each token, times DECAY_SCALE, [n, heads, B, 1].
        n: blocks.
        heads: heads with a decay each.
        constants: the part's triangles.

    Returns:
        exp(G_ij), [n, heads, B, B]; exp of the decays since the start and until the end, [n, heads, B, 1]; and the
        share of the state that the block forgets, [n, heads, 1, 1].
    """
    causal, after, both = (constants[name] for name in ("causal", "later_decays", "decay_sums"))
    pairs = torch.exp(torch.matmul(decay.reshape(n, heads, 1, BLOCK) * causal, after)) * causal
    sums = torch.matmul(both, decay)  # [n, heads, 2 B, 1]
    since, until = torch.split(torch.exp(sums), BLOCK, dim=2)
    lost = (since[:, :, BLOCK - 1 :] + 1) * torch.tanh(sums[:, :, BLOCK - 1 : BLOCK] * -0.5)
    return pairs, since, until, lost


def spread(x: Tensor, n: int, key_heads: int, value_heads: int, sizes: tuple[int, int]) -> Tensor:
    """Return [n, key heads, a, b] as [n, value heads, a, b]; a key head serves neighbouring value heads.

    Sizes are numbers, since a size that is read from a traced tensor is no constant.
    """
    if key_heads == value_heads:
        return x
    x = x.reshape(n, key_heads, 1, sizes[0] * sizes[1])
    return torch.cat([x] * (value_heads // key_heads), dim=2).reshape(n, value_heads, *sizes)


def substituted(lower: Tensor, x: Tensor) -> Tensor:
    """Return (1 + lower)^-1 x by forward substitution, a row at a time.

    Args:
        lower: strictly lower triangular, [., ., B, B].
        x: [., ., B, columns].
    """
    rows = [x[:, :, 0:1]]
    for i in range(1, BLOCK):
        known = torch.cat(rows, dim=2) if i > 1 else rows[0]
        rows.append(x[:, :, i : i + 1] - torch.matmul(lower[:, :, i : i + 1, 0:i], known))
    return torch.cat(rows, dim=2)
