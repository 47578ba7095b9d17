"""The blocks of the graph contract, as PyTorch modules that trace to operations the Neural Engine takes.

Activations are [1, channels, T, 1], every projection is a 1x1 convolution, no tensor has more than four axes, and
nothing is indexed by a runtime value. T is symbolic after conversion: only -1 stands for it in a reshape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from shardmill.errors import CheckpointError
from shardmill.models.architecture import SILU_TANH

# Below this magnitude RMSNorm divides by the constant instead of the largest element, so that a token of zeros is safe.
NORM_FLOOR = 2.0**-4
LARGEST_ROOT = 128.0  # of eps / m^2, whose square fp16 must hold
# For a smaller root of epsilon (3e-5) the floor is lower, and no constant is subnormal. Otherwise (root_eps / m)^2
# would soon be 0 in fp16, and the norm of a column of zeros would be 0 * rsqrt(0), which is NaN.
SMALL_ROOT = 2.0**-15
LEAST_ROOT = 2.0**-20  # counts instead of a smaller one: an x to which that matters has fewer digits in fp16 anyway
ROOT_AT_FLOOR = 2.0**-6  # what the root over the lower floor is at least: its square is a normal number in fp16
SHIFT = 2.0**-10  # a factor of a small root, so that the other factor is a normal number
GELU_RANGE = 10.0
MOST_PIECES = 8
# logit(Phi(x)) = x * sum c_i (x / 5)^(2 i), fitted by least squares so that x * Phi(x) is off by 7e-8 at most.
ERF_RANGE = 5.0
ERF_LOGIT = (1.595769, 1.816705, -0.04123294, -1.727702, 3.106274, -2.615562, 0.8873228)
# log(1 + t) = t * sum c_i t^i on 0 .. 1, fitted by least squares to coefficients that fp16 holds: off by 2.1e-6.
LOG1P = (1.0, -0.5, 0.333008, -0.24585, 0.178833, -0.108521, 0.0440979, -0.00842285)
# How far RMSNorm's root of epsilon may be off in fp16. The root of 1e-5 is off by 3e-5, which shows nowhere. The root
# of 1e-6 is off by 4e-4. This made the logits of Gemma 3 270M's first token wrong by 1e-4: the model has branches as
# small as epsilon.
EPS_TOLERANCE = 1e-4
FACTOR_TOLERANCE = 1e-3  # how far a product of two fp16 numbers may be off


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over one axis, by default the channels, within the range of fp16.

    Without a weight the last factor is left out.

    The square of an activation over 256 overflows fp16, so x is first divided by its largest magnitude m; the mean of
    the squares then lies in 1/channels .. 1, and eps is divided by m^2 to keep the result exactly RMSNorm's. Spelled
    in operations that were measured on the Neural Engine, hence no abs, no clip and no reciprocal.

    A column of zeros becomes zeros, whatever eps is: an encoder's bucket is filled up with such columns.
    """

    def __init__(self, weight: Tensor | None, eps: float, axis: int = 1) -> None:
        super().__init__()
        shape = [-1 if i == axis else 1 for i in range(4)]
        self.axis = axis
        self.weight = None if weight is None else nn.Parameter(weight.reshape(shape), requires_grad=False)
        self.floor: Tensor
        self.root_eps: Tensor
        root = max(math.sqrt(eps), LEAST_ROOT)
        if root < SMALL_ROOT:
            root_eps, *factors = fp16_factors(root / SHIFT, EPS_TOLERANCE)
            self.factors = [*factors, SHIFT]
            floor = 2.0 ** math.floor(math.log2(root / ROOT_AT_FLOOR))
        else:
            root_eps, *self.factors = fp16_factors(root, EPS_TOLERANCE)
            # With a higher floor for a large eps, eps divided by m^2 stays in the range of fp16.
            floor = max(NORM_FLOOR, 2.0 ** math.ceil(math.log2(root / LARGEST_ROOT)))
        self.register_buffer("floor", torch.full((1, 1, 1, 1), floor))
        self.register_buffer("root_eps", torch.full((1, 1, 1, 1), root_eps))

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis
        high, low = x.amax(dim=axis, keepdim=True), x.amin(dim=axis, keepdim=True)  # [1, 1, T, 1]
        largest = torch.maximum(torch.maximum(high, low * -1), self.floor)
        y, e = x / largest, self.root_eps / largest
        for factor in self.factors:
            e = e * factor
        y = y * torch.rsqrt((y * y).mean(dim=axis, keepdim=True) + e * e)
        return y if self.weight is None else y * self.weight


class UnitNorm(nn.Module):
    """x * sqrt(n) / |x| over the n elements of axis 2, within the range of fp16; 0 for a vector of zeros.

    Divided by the largest magnitude first, as RMSNorm does; what is added under the root then shows nowhere else.
    """

    def __init__(self) -> None:
        super().__init__()
        self.floor: Tensor
        self.least: Tensor
        self.register_buffer("floor", torch.full((1, 1, 1, 1), 2.0**-10))
        self.register_buffer("least", torch.full((1, 1, 1, 1), 2.0**-24))

    def forward(self, x: Tensor) -> Tensor:
        high, low = x.amax(dim=2, keepdim=True), x.amin(dim=2, keepdim=True)
        y = x / torch.maximum(torch.maximum(high, low * -1), self.floor)
        return y * torch.rsqrt((y * y).mean(dim=2, keepdim=True) + self.least)


class L2Norm(nn.Module):
    """x / sqrt(sum(x^2) + 1e-6) over the last axis, within the range of fp16; 0 for zeros.

    Divided by the largest magnitude m first, as RMSNorm does, and eps by m^2. Nothing subnormal is squared or divided
    by, since the Neural Engine would take it for 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.floor: Tensor
        self.root_eps: Tensor
        self.register_buffer("floor", torch.full((1, 1, 1, 1), 2.0**-10))
        self.register_buffer("root_eps", torch.full((1, 1, 1, 1), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        high, low = x.amax(dim=3, keepdim=True), x.amin(dim=3, keepdim=True)
        largest = torch.maximum(torch.maximum(high, low * -1), self.floor)
        y, e = x / largest, self.root_eps / largest
        return y * torch.rsqrt((y * y).sum(dim=3, keepdim=True) + e * e)


class LayerNorm(RMSNorm):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the channels."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__(weight, eps)
        self.bias = None if bias is None else vector(bias)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x - x.mean(dim=1, keepdim=True))
        return y if self.bias is None else add_channels(y, self.bias)


def vector(values: Tensor) -> nn.Parameter:
    """Return a number for each channel, as `add_channels` takes it: [1, 1, channels, 1]."""
    return nn.Parameter(values.reshape(1, 1, -1, 1), requires_grad=False)


def add_channels(x: Tensor, values: Tensor) -> Tensor:
    """Return x [1, channels, T, 1] plus a constant for each channel.

    x is reshaped for the addition. Otherwise coremltools folds a constant that is added right after a convolution, or
    after a product with a constant, into a new bias or batch norm. The constant would not be the checkpoint's.
    """
    channels = values.shape[2]
    return (x.reshape(1, 1, channels, -1) + values).reshape(1, channels, -1, 1)


def unquantized(weight: Tensor) -> nn.Parameter:
    """Return a matrix [rows, columns] that INT8 leaves alone, in the shape that `multiply` takes.

    The shape is [1, 1, rows, columns].
    """
    return nn.Parameter(weight.reshape(1, 1, *weight.shape[-2:]), requires_grad=False)


def multiply(weight: Tensor, x: Tensor) -> Tensor:
    """Return weight [1, 1, rows, columns] @ x [1, columns, T, 1] -> [1, rows, T, 1], as a matrix product."""
    rows, columns = weight.shape[2:]
    return torch.matmul(weight, x.reshape(1, 1, columns, -1)).reshape(1, rows, -1, 1)


def scale(x: Tensor, factor: float) -> Tensor:
    """Return x * factor, to a few parts in 10^6 though constants are stored in fp16.

    A square root such as head_dim ** -0.5 is off by up to 2e-4 in fp16. This would be most of the program's error
    against the original model. The product of two fp16 numbers comes as close as wanted.
    """
    if factor == 1:
        return x
    for constant in fp16_factors(factor):
        x = x * constant
    return x


def fp16_factors(value: float, tolerance: float = 0.0) -> tuple[float, ...]:
    """Return `value` alone if fp16 holds it to a relative tolerance, otherwise two numbers that fp16 holds exactly.

    The product of the two is `value` to a few parts in 10^6, and for values under 10^-7 to one in a thousand.

    Raises:
        CheckpointError: if the value is so small or so large that no product of two fp16 numbers comes near it.
    """
    if abs(float(np.float16(value)) - value) <= tolerance * value:
        return (value,)
    first = 1 + np.arange(1024) / 1024  # every fp16 number in [1, 2)
    second = (value / first).astype(np.float16).astype(np.float64)
    best = int(np.argmin(np.abs(first * second - value)))
    if not abs(first[best] * second[best] - value) <= FACTOR_TOLERANCE * abs(value):
        raise CheckpointError(f"a factor of {value:g}: no product of two fp16 numbers comes near it")
    return float(first[best]), float(second[best])


def cap(x: Tensor, limit: float) -> Tensor:
    """Return limit * tanh(x / limit); x itself for a limit of 0."""
    return scale(torch.tanh(scale(x, 1 / limit)), limit) if limit else x


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation, spelled as x * sigmoid(2u), since tanh(u) = 2 * sigmoid(2u) - 1.

    Beyond 10 in magnitude the sigmoid is 0 or 1 to fp16's last digit. So the cubic is computed from x clamped to this
    magnitude, which keeps the cubic in the range of fp16.
    """
    near = torch.clamp(x, -GELU_RANGE, GELU_RANGE)
    inner = near + scale(near * near * near, 0.044715)
    return x * torch.sigmoid(scale(inner, 2 * math.sqrt(2 / math.pi)))


def gelu_erf(x: Tensor) -> Tensor:
    """Return GELU itself, spelled as x * sigmoid(logit(Phi(x))).

    An odd polynomial is as close to that logit as fp32 is.

    Beyond ERF_RANGE in magnitude, Phi keeps its value at ERF_RANGE, which is 3e-7 away from 0 or 1.
    """
    near = torch.clamp(x, -ERF_RANGE, ERF_RANGE)
    square = near * scale(near, ERF_RANGE**-2)  # 0 .. 1
    power, total = near, scale(near, ERF_LOGIT[0])
    for coefficient in ERF_LOGIT[1:]:
        power = power * square
        total = total + scale(power, coefficient)
    return x * torch.sigmoid(total)


def sigmoid_by_tanh(x: Tensor) -> Tensor:
    """Return sigmoid(x), spelled as (1 + tanh(x / 2)) / 2.

    The last factor comes last although it might come first in x / 2 * (1 + tanh(x / 2)): coremltools folds a factor
    that follows a projection into the projection's weights.
    """
    return (torch.tanh(x * 0.5) + 1) * 0.5


def silu_tanh(x: Tensor) -> Tensor:
    """Return SiLU without the operations `silu` and `sigmoid`, which the Neural Engine reads from coarse tables."""
    return x * sigmoid_by_tanh(x)


def _positive_part(x: Tensor) -> Tensor:
    """Return ReLU, spelled as a maximum, since the operation `relu` is not known to run on the Neural Engine."""
    return torch.maximum(x, torch.zeros(1, 1, 1, 1, dtype=x.dtype))


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) as max(x, 0) + log(1 + t) with t = exp(-|x|), where log(1 + t) is t times a polynomial.

    Its relative error is at most 2.9e-6, and 1.1e-3 in fp16. The operation `softplus` overflows fp16, and in
    fp16 log(1 + t) loses the digits of a small t.
    """
    t = torch.exp(torch.minimum(x, x * -1))
    total = t * LOG1P[-1]
    for coefficient in LOG1P[-2:0:-1]:
        total = (total + coefficient) * t
    return _positive_part(x) + t * (total + LOG1P[0])


def relu2(x: Tensor) -> Tensor:
    """Return the square of ReLU. It overflows fp16 if x is over 256."""
    y = _positive_part(x)
    return y * y


class XIELUActivation(nn.Module):
    """xIELU with beta = 1/2 and two learned numbers (arXiv 2411.13010; transformers, activations.py).

    Positive numbers become alpha_p x^2 + x / 2, and other numbers alpha_n (exp(x) - 1 - x) + x / 2. There is no branch:
    the first term is computed from the positive part of x, the second from the negative part. exp(x) - 1 is spelled as
    tanh(x / 2) (exp(x) + 1), because the difference would lose the digits of a small x. In exp(x), transformers takes
    eps = -1e-6 in place of a larger x, which changes the result by about 1e-6. The first term overflows fp16 if x is
    over 256 / sqrt(alpha_p).

    Args:
        alpha_p: for each channel, softplus of the checkpoint's number.
        alpha_n: for each channel, softplus of the checkpoint's other number, plus beta. If the program added beta,
            coremltools would fold the sum into a new constant.
    """

    def __init__(self, alpha_p: Tensor, alpha_n: Tensor) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = (
            nn.Parameter(alpha.reshape(1, -1, 1, 1), requires_grad=False) for alpha in (alpha_p, alpha_n)
        )

    def forward(self, x: Tensor) -> Tensor:
        above = _positive_part(x)
        below = x - above
        grown = torch.tanh(below * 0.5) * (torch.exp(below) + 1)
        return above * (above * self.alpha_p) + (grown - below) * self.alpha_n + x * 0.5


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    SILU_TANH: silu_tanh,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu_erf,
    "relu": nn.functional.relu,
    "relu2": relu2,
    "tanh": torch.tanh,
}


def projection(weight: Tensor, bias: Tensor | None = None) -> nn.Conv2d:
    """Return a linear layer of [out, in] weights as the 1x1 convolution over [1, in, T, 1]."""
    rows, columns = weight.shape
    conv = nn.Conv2d(columns, rows, kernel_size=1, bias=bias is not None, device="meta")  # of no numbers of its own
    conv.weight = nn.Parameter(weight[:, :, None, None], requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias, requires_grad=False)
    return conv


def convolution(
    weight: Tensor, kernel: tuple[int, int], bias: Tensor | None = None, step: int = 1, padding: int = 0
) -> nn.Conv2d:
    """Return a convolution of [out, in * kernel] weights over [n, in, height, width]."""
    rows, columns = weight.shape[0], weight.shape[1] // (kernel[0] * kernel[1])
    conv = nn.Conv2d(columns, rows, kernel, step, padding, bias=bias is not None, device="meta")
    conv.weight = nn.Parameter(weight.reshape(rows, columns, *kernel), requires_grad=False)
    if bias is not None:
        conv.bias = nn.Parameter(bias, requires_grad=False)
    return conv


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, sizes: tuple[int, int]) -> Tensor:
    """Return rotary embedding of the first dimensions of each head; the rest passes through.

    Args:
        x: [1, heads, head_dim, T].
        cos: [rope_dim / 2, T].
        sin: of the same shape.
        sizes: (rope_dim / 2, head_dim - rope_dim), as numbers since a size read from a traced tensor is not a constant.
    """
    half, rest = sizes
    a, b, *tail = torch.split(x, [half, half, rest] if rest else [half, half], dim=2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, *tail], dim=2)


def one_by_one(x: Tensor, count: int, size: int = 1) -> list[Tensor]:
    """Return `count` pieces of `size` channels, by nested splits into at most MOST_PIECES pieces.

    A long list of sizes would be a constant in a file.
    """
    if count == 1:
        return [x]
    most = -(-count // MOST_PIECES)
    counts = [min(most, count - first) for first in range(0, count, most)]
    pieces = torch.split(x, [size * n for n in counts], dim=1)
    return [one for piece, n in zip(pieces, counts, strict=True) for one in one_by_one(piece, n, size)]


def write_cache(cache: Tensor, new: Tensor, write_mask: Tensor, keep: Tensor) -> Tensor:
    """Return the cache with token t's row put where write_mask's column t says.

    The write has no dynamic index, so it works for any T and any slots.

    Args:
        cache: [1, kv_heads, S, head_dim].
        new: [1, kv_heads, T, head_dim].
        write_mask: [1, 1, S, T].
        keep: [1, 1, S, 1] = 1 - sum_t write_mask.
    """
    return cache * keep + torch.matmul(write_mask, new)


def write_ring(ring: Tensor, new: Tensor, write_mask: Tensor, keep: Tensor) -> Tensor:
    """Return the ring of a convolution's inputs with token t's input put where write_mask's row t says.

    Args:
        ring: [1, 1, d, R].
        new: [1, 1, d, T].
        write_mask: [1, 1, T, R], one-hot in its rows.
        keep: [1, 1, 1, R] = 1 - sum_t write_mask.
    """
    return ring * keep + torch.matmul(new, write_mask)


def read_ring(ring: Tensor, read_mask: Tensor, width: int) -> Tensor:
    """Read each token's input from the ring [1, 1, width, R] by a mask [1, 1, R, T]: [1, width, T, 1]."""
    return torch.matmul(ring, read_mask).reshape(1, width, -1, 1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    limit: float = 0.0,
    sinks: Tensor | None = None,
    rows: int = 0,
) -> Tensor:
    """Return softmax attention, all query heads of a key/value head in one matrix product.

    Args:
        q: [1, kv_heads, group * T, head_dim], already scaled.
        k: [1, kv_heads, S, head_dim].
        v: [1, kv_heads, S, head_dim].
        mask: [1, 1, group * T, S], or [1, 1, 1, S] if all queries see the same; additive.
        limit: of the scores' magnitude, see `cap`.
        sinks: [1, heads, 1, 1], a logit of each head that takes part in the softmax and has no value.
        rows: how many queries of a key/value head are multiplied by the keys at once; 0 for all.

    Returns:
        [1, kv_heads, group * T, head_dim].
    """
    if rows:
        return _attend_in_pieces(q, k, v, mask, limit, sinks, rows)
    scores = cap(torch.matmul(q, k.transpose(-1, -2)), limit) + mask  # [1, kv_heads, group * T, S]
    if sinks is None:
        return torch.matmul(torch.softmax(scores, dim=-1), v)
    heads, kv_heads, slots = sinks.shape[1], v.shape[1], v.shape[2]
    scores = scores.reshape(1, heads, -1, slots)
    with_sinks = torch.cat([scores, scores[..., :1] * 0 + sinks], dim=-1)  # [1, heads, T, S + 1]
    shares = torch.softmax(with_sinks, dim=-1)[..., :slots].reshape(1, kv_heads, -1, slots)
    return torch.matmul(shares, v)


def _attend_in_pieces(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, limit: float, sinks: Tensor | None, rows: int
) -> Tensor:
    """Return what `attend` does, with so many queries of each key/value head at a time."""
    kv_heads, slots, columns = v.shape[1], v.shape[2], list[Tensor | None]()
    if sinks is not None:  # each row's own
        of_rows = ((q[..., :1] * 0).reshape(1, sinks.shape[1], -1, 1) + sinks).reshape(1, kv_heads, -1, 1)
        columns = [*torch.split(of_rows, rows, dim=2)]
    outputs: list[Tensor] = []
    pieces = torch.split(q, rows, dim=2)
    masks = torch.split(mask, rows, dim=2) if mask.shape[2] > 1 else [mask] * len(pieces)  # one for every query
    for place, (some, seen) in enumerate(zip(pieces, masks, strict=True)):
        scores = cap(torch.matmul(some, k.transpose(-1, -2)), limit) + seen
        column = columns[place] if columns else None
        shares = torch.softmax(scores if column is None else torch.cat([scores, column], dim=-1), dim=-1)
        outputs.append(torch.matmul(shares if column is None else shares[..., :slots], v))
    return torch.cat(outputs, dim=2)
