"""Element-wise kernels: arithmetic, comparison, logic, rounding, activations, casts.

Integer division truncates towards minus infinity for `floor_div` and `mod`, towards zero for `real_div`, as numpy
and C do.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.run.ops.registry import elementwise, kernel

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)

elementwise(
    {
        "add": torch.add,
        "sub": torch.sub,
        "mul": torch.mul,
        "floor_div": torch.floor_divide,
        "mod": torch.remainder,
        "pow": torch.pow,
        "equal": torch.eq,
        "not_equal": torch.ne,
        "greater": torch.gt,
        "greater_equal": torch.ge,
        "less": torch.lt,
        "less_equal": torch.le,
        "logical_and": torch.logical_and,
        "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
    },
    "x",
    "y",
)
elementwise({"maximum": torch.maximum, "minimum": torch.minimum}, "x", "y", exact=True)
elementwise(
    {
        "abs": torch.abs,
        "acos": torch.acos,
        "asin": torch.asin,
        "atan": torch.atan,
        "atanh": torch.atanh,
        "ceil": torch.ceil,
        "cos": torch.cos,
        "cosh": torch.cosh,
        "erf": torch.erf,
        "exp": torch.exp,
        "exp2": torch.exp2,
        "floor": torch.floor,
        "logical_not": torch.logical_not,
        "round": torch.round,
        "sign": torch.sign,
        "sin": torch.sin,
        "sinh": torch.sinh,
        "sqrt": torch.sqrt,
        "square": torch.square,
        "tan": torch.tan,
        "tanh": torch.tanh,
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "silu": F.silu,
        "softsign": F.softsign,
        "softplus": F.softplus,
    },
    "x",
)
elementwise({"relu6": F.relu6}, "x")


@kernel("identity", exact=True)
def identity(x: Tensor) -> Tensor:
    return x


@kernel("real_div")
def real_div(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype in _INTEGERS and y.dtype in _INTEGERS:
        return torch.div(x, y, rounding_mode="trunc")
    return torch.div(x, y)


@kernel("inverse")
def inverse(x: Tensor, epsilon: float = 1e-4) -> Tensor:
    return torch.reciprocal(x + epsilon)


@kernel("log")
def log(x: Tensor, epsilon: float = 1e-45) -> Tensor:
    return torch.log(x + epsilon) if epsilon else torch.log(x)


@kernel("rsqrt")
def rsqrt(x: Tensor, epsilon: float = 1e-12) -> Tensor:
    return torch.rsqrt(x + epsilon) if epsilon else torch.rsqrt(x)


@kernel("clip")
def clip(x: Tensor, alpha: float = -math.inf, beta: float = math.inf) -> Tensor:
    return torch.clamp(x, alpha, beta)


@kernel("threshold")
def threshold(x: Tensor, alpha: float) -> Tensor:
    return torch.clamp(x, min=alpha)


@kernel("cast")
def cast(x: Tensor, dtype: str) -> Tensor:
    target = BY_NAME[dtype].torch
    if dtype in ("int8", "uint8", "int16", "uint16") and x.is_floating_point():
        return x.to(torch.int64).to(target)
    return x.to(target)


@kernel("select", exact=True)
def select(cond: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(cond.to(torch.bool), a, b)


@kernel("gelu")
def gelu(x: Tensor, mode: str = "EXACT") -> Tensor:
    if mode == "SIGMOID_APPROXIMATION":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")
