"""Torch kernels by family. Importing this package fills `registry.KERNELS`."""

from portable_coreml.run.ops import constexpr, elementwise, gather, linear, reduction, shape
from portable_coreml.run.ops.registry import KERNELS, Kernel, Param, extra_package, find_kernel

__all__ = [
    "KERNELS",
    "Kernel",
    "Param",
    "constexpr",
    "elementwise",
    "extra_package",
    "find_kernel",
    "gather",
    "linear",
    "reduction",
    "shape",
]
