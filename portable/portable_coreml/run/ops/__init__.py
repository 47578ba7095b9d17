"""Torch kernels by family. Importing this package fills `registry.KERNELS`."""

from portable_coreml.run.ops import (
    constexpr,
    elementwise,
    gather,
    image,
    linear,
    lists,
    pool,
    recurrent,
    reduction,
    shape,
)
from portable_coreml.run.ops.registry import KERNELS, Kernel, Param

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
