"""Torch kernels by family. Importing this package fills `registry.KERNELS`."""

from . import (
    constexpr,
    elementwise,
    gather,
    image,
    linear,
    lists,
    normalization,
    pool,
    recurrent,
    reduction,
    sampling,
    shape,
    spatial,
)
from .registry import KERNELS, Kernel, Param

__all__ = [
    "KERNELS",
    "Kernel",
    "Param",
    "constexpr",
    "elementwise",
    "gather",
    "image",
    "linear",
    "lists",
    "normalization",
    "pool",
    "recurrent",
    "reduction",
    "sampling",
    "shape",
    "spatial",
]
