"""Mamba-2 (arXiv 2405.21060; transformers, models/granitemoehybrid and models/nemotron_h): the other recurrence.

For each head, with a rate A < 0 and the step dt >= 0 of a token:

    S = exp(dt A) S + dt x^T B;  y = C S^T + D x

A convolution of a few taps gives x, B and C; a group of neighbouring heads shares B and C. The output is multiplied by
SiLU of a gate, and then each group of heads has a norm.

The state, the ring and the masks are as in models/delta_net.py. What that file says about fp16 and about passes of
several blocks holds here too. A pass puts what its tokens would add into the ring. A later pass, in which they count,
folds them into S. If G_ij is the sum of dt A after token j up to token i, and G_i the sum up to i, a block of B tokens
computes

    y_i = exp(G_i) C_i S^T + sum_{j <= i} (C_i B_j) exp(G_ij) dt_j x_j + D x_i
    S = exp(G_B) S + sum_j exp(G_Bj) dt_j x_j^T B_j

A token with a step of 0 changes nothing, whatever the bias of the convolution makes of it. Steps in the ring are 64
times the model's, x is a quarter of the model's, and so S and y are 16 times the model's. The gate takes this factor
away again, since a gate may be large where y is.

Shapes: as in models/delta_net.py, with P = head_dim and N = state_dim: S is [1, heads, P, N], x, u and y are
[n, heads, B, P], B and C [n, groups, B, N], steps and decays [n, heads, B, 1].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK, DECAY_SCALE
from shardmill.models.delta_net import convolved, cut, decayed, put_into_ring
from shardmill.models.primitives import RMSNorm, multiply, projection, scale, softplus, unquantized, vector
from shardmill.models.shared import LayerCaches, Shared

Weights = Mapping[str, Tensor]
X_SCALE = 0.25
GATE_SCALE = 1 / (DECAY_SCALE * X_SCALE)
FLOOR = 2.0**-4  # what the least step becomes before it is compared, since fp16 holds this number exactly
MOST_DECAY = 6e4  # of a token, times DECAY_SCALE: exp(-937) is 0 in any precision, and infinity times 0 would be NaN


class MambaMixer(nn.Module):
    """The mixer: x [1, d, T, 1] -> [1, d, T, 1], with the ring [1, 1, C, R] and the state [1, heads, P, N]."""

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()
        assert g.mamba is not None
        self.sizes = mamba = g.mamba
        self.in_proj_xbc = projection(weights[f"{path}in_proj_xbc.weight"])
        self.in_proj_dt = nn.ParameterDict({"weight": unquantized(weights[f"{path}in_proj_dt.weight"])})
        self.dt_bias = vector(weights[f"{path}dt_bias"])
        self.rate, self.skip = (_by_head(weights[f"{path}{name}"]) for name in ("rate", "skip"))
        self.conv_bias: nn.Parameter
        for name in (*(f"tap_{j}" for j in range(mamba.taps)), *(("conv_bias",) if mamba.conv_bias else ())):
            setattr(self, name, nn.Parameter(weights[f"{path}{name}"].reshape(1, 1, 1, -1), requires_grad=False))
        self.in_proj_z = projection(weights[f"{path}in_proj_z.weight"])
        self.norm = RMSNorm(None, g.rms_norm_eps, axis=2)
        gains = weights[f"{path}norm.weight"].reshape(1, mamba.groups, -1, 1)
        self.norm.weight = nn.Parameter(gains, requires_grad=False)
        self.out_proj = projection(weights[f"{path}out_proj.weight"])

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches) -> Tensor:
        mamba, new = self.sizes, self.new_columns(x)
        read = put_into_ring(new, caches, shared)
        n = 1 + shared.blocks  # what is pending, and the blocks of the pass
        v, b, c, dt = self.heads(cut(read, new, n, mamba), n)
        decay = torch.maximum(dt * self.rate, torch.full((1, 1, 1, 1), -MOST_DECAY, dtype=dt.dtype))
        pairs, since, until, lost = decayed(decay, n, mamba.heads, shared.constants)
        u = v * dt
        states = self.in_turn(caches["s"], u, b, until, lost, shared)
        states[-1] = caches.put("s", states[-1])
        alike = torch.matmul(c[1:n], b[1:n].transpose(2, 3))  # [n - 1, groups, B, B]
        c = self.spread(c[1:n], since[1:n], (mamba.state_dim, 1), n - 1)
        seen = torch.matmul(c, (states[0] if n == 2 else torch.cat(states)).transpose(2, 3))
        seen = seen + torch.matmul(self.spread(alike, pairs[1:n], (BLOCK, BLOCK), n - 1), u[1:n]) + v[1:n] * self.skip
        if n == 2:
            y = torch.matmul(shared.column, seen)  # [1, heads, T, P]
        else:
            y = seen.transpose(0, 1).reshape(1, mamba.heads, (n - 1) * BLOCK, mamba.head_dim)
        out: Tensor = self.out_proj(self.gated(y, self.in_proj_z(x)))
        return out

    def in_turn(self, state: Tensor, u: Tensor, b: Tensor, until: Tensor, lost: Tensor, shared: Shared) -> list[Tensor]:
        """Return the state before each block of a pass, after what is pending is folded, each [1, heads, P, N].

        A block is folded if a token follows it, and not one that only fills the pass up.

        Args:
            state: the state before the pass.
            u: steps times x, of what is pending and then of the blocks, [n, heads, B, P].
            b: B, [n, groups, B, N].
            until: exp of the decays until the end of each block, [n, heads, B, 1].
            lost: the share of the state that each block forgets, [n, heads, 1, 1].
            shared: the inputs of the part.
        """

        def block(number: int) -> tuple[Tensor, Tensor, Tensor]:
            at = slice(number, number + 1)
            return u[at], self.spread(b[at], until[at], (self.sizes.state_dim, 1), 1), lost[at]

        states = [self.folded(state, *block(0), shared.goes_on)]
        for number, follows_here in enumerate(shared.follows, start=1):
            states.append(states[-1] - self.change(states[-1], *block(number)) * follows_here)
        return states

    def new_columns(self, x: Tensor) -> Tensor:
        """Return what the tokens of the pass would add: x, B and C before the convolution, and steps, [1, 1, C, T]."""
        dt = multiply(self.in_proj_dt["weight"], x).reshape(1, 1, self.sizes.heads, -1)
        return torch.cat([self.in_proj_xbc(x).reshape(1, 1, self.sizes.mixed, -1), self.steps(dt)], dim=2)

    def steps(self, dt: Tensor) -> Tensor:
        """Return the steps of tokens, times DECAY_SCALE, given their projection [1, 1, heads, T]."""
        dt, least = softplus(dt + self.dt_bias), self.sizes.least_step
        if not least:
            return dt * DECAY_SCALE
        dt = torch.maximum(scale(dt, FLOOR / least), torch.full((1, 1, 1, 1), FLOOR, dtype=dt.dtype))
        return scale(dt, DECAY_SCALE * least / FLOOR)

    def heads(self, windows: Tensor, n: int) -> tuple[Tensor, ...]:
        """Return x [n, heads, B, P], B and C [n, groups, B, N], and the steps [n, heads, B, 1].

        Args:
            windows: positions of each block, [1, n, B + taps - 1, C].
            n: blocks.
        """
        mamba, back = self.sizes, self.sizes.taps - 1
        raw, dt = torch.split(windows, [mamba.mixed, mamba.heads], dim=3)
        y = convolved([getattr(self, f"tap_{j}") for j in range(mamba.taps)], raw)
        y = y + self.conv_bias if mamba.conv_bias else y
        x, bc = torch.split(y, [mamba.width, mamba.mixed - mamba.width], dim=3)
        x, bc = ((z * (factor / 2)) * (torch.tanh(z * 0.5) + 1) for z, factor in ((x, X_SCALE), (bc, 1.0)))  # SiLU
        x = x.reshape(n, BLOCK, mamba.heads, mamba.head_dim).transpose(1, 2)
        bc = bc.reshape(n, BLOCK, 2 * mamba.groups, mamba.state_dim).transpose(1, 2)
        b, c = torch.split(bc, mamba.groups, dim=1)
        return x, b, c, dt[:, :, back:].reshape(n, BLOCK, mamba.heads, 1).transpose(1, 2)

    def folded(self, state: Tensor, u: Tensor, b: Tensor, lost: Tensor, goes_on: Tensor) -> Tensor:
        """Return the state after a block; where a text begins, `goes_on` is 0, and the state before counts as 0."""
        lost = lost * goes_on + (1 - goes_on)
        return state - self.change(state, u, b, lost)

    def change(self, state: Tensor, u: Tensor, b: Tensor, lost: Tensor) -> Tensor:
        """Return what a block takes off the state, less what it adds.

        Args:
            state: [1, heads, P, N].
            u: steps times x, [1, heads, B, P].
            b: B, decayed until the end of the block, [1, heads, B, N].
            lost: the share of the state that the block forgets, [1, heads, 1, 1].
        """
        return state * lost - torch.matmul(u.transpose(2, 3), b)

    def spread(self, x: Tensor, factors: Tensor, widths: tuple[int, int], n: int) -> Tensor:
        """Return numbers of groups times factors of their heads.

        Args:
            x: [n, groups, B, width].
            factors: [n, heads, B, width or 1].
            widths: the last axes of both.
            n: blocks.

        Returns:
            [n, heads, B, width].
        """
        groups, heads = self.sizes.groups, self.sizes.heads
        factors = factors.reshape(n * groups, heads // groups, BLOCK, widths[1])
        return (x.reshape(n * groups, 1, BLOCK, widths[0]) * factors).reshape(n, heads, BLOCK, widths[0])

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Return the heads' output [1, heads, T, P], gated and then normed: [1, heads * P, T, 1]."""
        groups, width = self.sizes.groups, self.sizes.width
        y = y.transpose(2, 3).reshape(1, groups, width // groups, -1)
        gate = gate.reshape(1, groups, width // groups, -1)
        gate = gate * ((torch.tanh(gate * 0.5) + 1) * (GATE_SCALE / 2))  # SiLU
        out: Tensor = self.norm(y * gate)
        return out.reshape(1, width, -1, 1)


def _by_head(values: Tensor) -> nn.Parameter:
    """Return a number for each head, [1, heads, 1, 1]."""
    return nn.Parameter(values.reshape(1, -1, 1, 1), requires_grad=False)
