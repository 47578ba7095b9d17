"""Number by number: activations with parameters, quantised values, and random numbers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from portable_coreml.run.ops.registry import Ints, kernel
from torch import Tensor


@kernel("clamped_relu")
def clamped_relu(x: Tensor, alpha: float, beta: float) -> Tensor:
    return torch.clamp(torch.where(x >= 0, x, x * alpha), max=beta)


@kernel("elu")
def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return F.elu(x, alpha)


@kernel("leaky_relu")
def leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    return F.leaky_relu(x, alpha)


@kernel("linear_activation")
def linear_activation(x: Tensor, alpha: float, beta: float = 0.0) -> Tensor:
    return x * alpha + beta


@kernel("prelu")
def prelu(x: Tensor, alpha: Tensor) -> Tensor:
    return F.prelu(x, alpha)


@kernel("scaled_tanh")
def scaled_tanh(x: Tensor, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    return alpha * torch.tanh(beta * x)


@kernel("sigmoid_hard")
def sigmoid_hard(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


@kernel("softplus_parametric")
def softplus_parametric(x: Tensor, alpha: Tensor, beta: Tensor) -> Tensor:
    shape = (1, -1) + (1,) * (x.dim() - 2)
    return alpha.view(shape) * F.softplus(beta.view(shape) * x)


@kernel("thresholded_relu")
def thresholded_relu(x: Tensor, alpha: float = 1.0) -> Tensor:
    return torch.where(x >= alpha, x, torch.zeros_like(x))


_RANGES = {"int8": (-128, 127, torch.int8), "uint8": (0, 255, torch.uint8)}


def _generator(seed: int) -> torch.Generator | None:
    return torch.Generator().manual_seed(seed) if seed >= 0 else None


@kernel("random_uniform", impure=True, grows=True)
def random_uniform(shape: Ints, low: float = 0.0, high: float = 1.0, seed: int = -1) -> Tensor:
    return low + (high - low) * torch.rand(list(shape), generator=_generator(seed))


@kernel("random_normal", impure=True, grows=True)
def random_normal(shape: Ints, mean: float = 0.0, stddev: float = 1.0, seed: int = -1) -> Tensor:
    return mean + stddev * torch.randn(list(shape), generator=_generator(seed))


@kernel("random_bernoulli", impure=True, grows=True)
def random_bernoulli(shape: Ints, prob: float = 0.5, seed: int = -1) -> Tensor:
    return (torch.rand(list(shape), generator=_generator(seed)) < prob).to(torch.float32)


@kernel("random_categorical", impure=True, grows=True)
def random_categorical(x: Tensor, mode: str = "logits", size: int = 1, seed: int = -1) -> Tensor:
    weights = x if mode == "probs" else torch.softmax(x, -1)
    flat = torch.multinomial(weights.reshape(-1, x.shape[-1]), size, replacement=True, generator=_generator(seed))
    return flat.reshape(*x.shape[:-1], size).to(torch.float32)


def _along(parameter: Tensor, x: Tensor, axis: int | None) -> Tensor:
    if parameter.dim() == 0:
        return parameter
    wanted = int(axis or 0) % x.dim()
    return parameter.reshape([-1 if d == wanted else 1 for d in range(x.dim())])


@kernel("quantize")
def quantize(
    input: Tensor, scale: Tensor, output_dtype: str, zero_point: Tensor | None = None, axis: int | None = None
) -> Tensor:
    low, high, kind = _RANGES[output_dtype]
    values = torch.round(input / _along(scale, input, axis))
    if zero_point is not None:
        values = values + _along(zero_point.to(torch.float32), input, axis)
    return values.clamp(low, high).to(kind)


@kernel("dequantize")
def dequantize(input: Tensor, scale: Tensor, zero_point: Tensor | None = None, axis: int | None = None) -> Tensor:
    values = input.to(torch.float32)
    if zero_point is not None:
        values = values - _along(zero_point.to(torch.float32), input, axis)
    return values * _along(scale, input, axis)
