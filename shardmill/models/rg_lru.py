"""RG-LRU (arXiv 2402.19427; transformers, models/recurrent_gemma): a recurrence with a decay for each channel.

A convolution of a few taps and a bias gives x. Two gates r and i are sigmoids of products of x, head by head. With the
rate A < 0 of a channel, a = exp(r A):

    h = a h + sqrt(1 - a^2) i x;  y = h gelu(gate)

The first token of a text has the factor 1 in the place of the root.

The state, the ring and the masks are as in models/delta_net.py. What that file says about passes of several blocks
holds here too. A pass puts what its tokens would add into the ring: x before the convolution, and a 1 in one more
channel. A column without this 1 is no token, and adds nothing; the token after such a column is the first of a text. If
u is what a token adds, G_ij the sum of r A after token j up to token i, and G_i the sum up to i, a block of B tokens
computes

    y_i = exp(G_i) h + sum_{j <= i} exp(G_ij) u_j

The sums are made by doubling: over the last token, the last two, the last four. The state after the block is that of
its last token, spelled by the share that is lost, 1 - exp(G_B) = (1 + exp(G_B)) tanh(-G_B / 2), since fp16 has no
number between 1 and 1 - 2^-11.

1 - a^2 loses its digits where a is close to 1, and the root makes the most of what is left. So 64 (1 - a^2) is a
polynomial of -2 r A up to 1/2, and what is beyond 1/2 is a factor of the rest. r A is 64 times the model's, so that a
slow channel's is no subnormal number, and h is 8 times the model's, as the root of 64 makes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK, DECAY_SCALE
from shardmill.models.delta_net import convolved, cut, put_into_ring
from shardmill.models.primitives import ACTIVATIONS, projection, sigmoid_by_tanh
from shardmill.models.shared import LayerCaches, Shared

Weights = Mapping[str, Tensor]
STATE_SCALE = DECAY_SCALE**0.5
NEAR = 32.0  # where the polynomial ends, times DECAY_SCALE
TERMS = (5, 4, 3, 2)  # of 1 - exp(-y) = y (1 - y / 2 (1 - y / 3 (...))); what is left out is below 2^-14 of it
LEAST = 2.0**-14  # fp16's least normal number
MOST_DECAY = 7e3  # of a token, times DECAY_SCALE: exp(-109) is 0 in fp16, and the sum of a block must be finite there


class RgLruMixer(nn.Module):
    """The mixer: x [1, d, T, 1] -> [1, d, T, 1], with the ring [1, 1, W + 1, R] and the state [1, 1, 1, W]."""

    conv_bias: nn.Parameter
    rate: nn.Parameter
    input_gate: nn.Parameter
    recurrent_gate: nn.Parameter
    input_gate_bias: nn.Parameter
    recurrent_gate_bias: nn.Parameter

    def __init__(self, g: Graph, kind: LayerSpec, weights: Weights, path: str) -> None:
        super().__init__()
        assert g.rg_lru is not None
        self.sizes, self.activation = g.rg_lru, ACTIVATIONS[g.activation]
        self.linear_x, self.linear_y, self.linear_out = (
            projection(weights[f"{path}{name}.weight"], weights[f"{path}{name}.bias"])
            for name in ("linear_x", "linear_y", "linear_out")
        )
        for name in (*(f"tap_{j}" for j in range(self.sizes.taps)), "conv_bias", "rate"):
            setattr(self, name, nn.Parameter(weights[f"{path}{name}"].reshape(1, 1, 1, -1), requires_grad=False))
        heads, width = self.sizes.heads, self.sizes.head_dim
        for name in ("input_gate", "recurrent_gate"):
            matrices, bias = weights[f"{path}{name}"], weights[f"{path}{name}_bias"]
            setattr(self, name, nn.Parameter(matrices.reshape(1, heads, width, width), requires_grad=False))
            setattr(self, f"{name}_bias", nn.Parameter(bias.reshape(1, heads, 1, width), requires_grad=False))

    def forward(self, x: Tensor, shared: Shared, caches: LayerCaches) -> Tensor:
        new = self.new_columns(x)  # [1, 1, W + 1, T]
        read = put_into_ring(new, caches, shared)
        n = 1 + shared.blocks  # what is pending, and the blocks of the pass
        added, decays = self.summed(*self.updates(cut(read, new, n, self.sizes), n))
        states = self.in_turn(caches["s"], added, decays, shared)
        states[-1] = caches.put("s", states[-1])
        before = states[0] if n == 2 else torch.cat(states, dim=1)  # [1, n - 1, 1, W]
        y = before * torch.exp(decays[:, 1:n]) + added[:, 1:n]  # [1, n - 1, B, W]
        tokens = (1, 1, (n - 1) * BLOCK, self.sizes.width)
        y = torch.matmul(shared.column, y) if n == 2 else y.reshape(tokens)  # [1, 1, T, W]
        y = (y * (1 / STATE_SCALE)).transpose(2, 3).reshape(1, self.sizes.width, -1, 1)
        out: Tensor = self.linear_out(y * self.activation(self.linear_y(x)))
        return out

    def new_columns(self, x: Tensor) -> Tensor:
        """Return what the tokens of the pass would add: x before the convolution, and a 1, [1, 1, W + 1, T]."""
        y = self.linear_x(x).reshape(1, 1, self.sizes.width, -1)
        return torch.cat([y, y[:, :, :1] * 0 + 1], dim=2)

    def updates(self, windows: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return what tokens add to the state, and their decays times DECAY_SCALE, each [1, n, B, W].

        Args:
            windows: positions of each block, [1, n, B + taps - 1, W + 1].
            n: blocks.
        """
        sizes, back = self.sizes, self.sizes.taps - 1
        raw, ones = torch.split(windows, [sizes.width, 1], dim=3)
        x = convolved([getattr(self, f"tap_{j}") for j in range(sizes.taps)], raw) + self.conv_bias
        present, preceded = ones[:, :, back:], ones[:, :, back - 1 : back - 1 + BLOCK]  # each [1, n, B, 1]
        heads = x.reshape(n, BLOCK, sizes.heads, sizes.head_dim).transpose(1, 2)  # [n, heads, B, W / heads]
        i, r = (
            sigmoid_by_tanh(torch.matmul(heads, matrix) + bias).transpose(1, 2).reshape(1, n, BLOCK, sizes.width)
            for matrix, bias in (
                (self.input_gate, self.input_gate_bias),
                (self.recurrent_gate, self.recurrent_gate_bias),
            )
        )
        least = torch.full((1, 1, 1, 1), -MOST_DECAY, dtype=r.dtype)
        decay = torch.maximum(r * self.rate, least) * present
        factor = root_of_lost(decay) * preceded + (1 - preceded) * STATE_SCALE
        return x * i * factor * present, decay

    def summed(self, added: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after each token of blocks that begin with a state of 0, and G_i, each [1, n, B, W].

        Args:
            added: what each token adds, [1, n, B, W].
            decay: the tokens' decays, times DECAY_SCALE, of the same shape.
        """
        step = 1
        while step < BLOCK:
            added = added + _moved(added, step) * torch.exp(decay * (1 / DECAY_SCALE))
            decay = decay + _moved(decay, step)
            step *= 2
        return added, decay * (1 / DECAY_SCALE)

    def in_turn(self, state: Tensor, added: Tensor, decays: Tensor, shared: Shared) -> list[Tensor]:
        """Return the state before each block of a pass, after what is pending is folded, each [1, 1, 1, W].

        A block is folded if a token follows it, and not one that only fills the pass up.

        Args:
            state: the state before the pass.
            added: of what is pending and then of the blocks, what `summed` returns.
            decays: the same.
            shared: the inputs of the part.
        """
        last = slice(BLOCK - 1, BLOCK)
        states = [self.folded(state, added[:, :1, last], decays[:, :1, last], shared.goes_on)]
        for number, follows_here in enumerate(shared.follows, start=1):
            at = slice(number, number + 1)
            change = self.change(states[-1], added[:, at, last], lost(decays[:, at, last]))
            states.append(states[-1] - change * follows_here)
        return states

    def folded(self, state: Tensor, added: Tensor, decay: Tensor, goes_on: Tensor) -> Tensor:
        """Return the state after a block; where a text begins, `goes_on` is 0, and the state before counts as 0."""
        return state - self.change(state, added, lost(decay) * goes_on + (1 - goes_on))

    def change(self, state: Tensor, added: Tensor, share: Tensor) -> Tensor:
        """Return what a block takes off the state, less what it adds, given the share that it forgets."""
        return state * share - added


def _moved(x: Tensor, step: int) -> Tensor:
    """Return [1, n, B, W] with each token's numbers at the token `step` later, and zeros at the first tokens."""
    return torch.cat([x[:, :, :step] * 0, x[:, :, : BLOCK - step]], dim=2)


def lost(decay: Tensor) -> Tensor:
    """Return 1 - exp(decay)."""
    return (torch.exp(decay) + 1) * torch.tanh(decay * -0.5)


def root_of_lost(decay: Tensor) -> Tensor:
    """Return the root of DECAY_SCALE (1 - exp(2 decay)), given decays of 0 and less, times DECAY_SCALE."""
    z = decay * -2
    near = torch.minimum(z, torch.full((1, 1, 1, 1), NEAR, dtype=z.dtype))
    series = 1 - near * (1 / (DECAY_SCALE * TERMS[0]))
    for term in TERMS[1:]:
        series = 1 - near * (1 / (DECAY_SCALE * term)) * series
    share = near * series
    share = share + (DECAY_SCALE - share) * (1 - torch.exp((near - z) * (1 / DECAY_SCALE)))
    return share * torch.rsqrt(torch.maximum(share, torch.full((1, 1, 1, 1), LEAST, dtype=z.dtype)))
