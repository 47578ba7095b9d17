"""Portable Core ML: compiles, loads, runs and judges ML Programs on a machine without Core ML.

`install()` makes coremltools' own Python API work there: MLModel.predict, make_state, CompiledMLModel,
compile_model, MLComputePlan. On a Mac it does so within `emulated()` only. Values are computed on the CPU with torch,
in one of three precisions:
- fp32: everything is computed in float32. fp16 tensors and states of the program are held in float32, constants
  exactly as stored.
- fp16: the result of every operation declared fp16 is computed in float32 or wider and rounded once to fp16.
  A token's results do not depend on how many tokens are fed in the same pass.
- ane: fp16 with what others report of the Neural Engine's arithmetic (run/ane.py): a prediction.

The package does not depend on shardmill, the project for which it was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from portable_coreml.errors import ExecutionError, InputError, PortableError, ProgramError, UnsupportedOp
from portable_coreml.hook import emulated, native_present, put
from portable_coreml.run.observe import FirstNonFinite, NonFinite, trace

__version__ = "0.1.0"
__all__ = [
    "ExecutionError",
    "FirstNonFinite",
    "InputError",
    "NonFinite",
    "PortableError",
    "ProgramError",
    "UnsupportedOp",
    "emulated",
    "install",
    "loading_as",
    "precision",
    "trace",
]


def precision() -> str:
    """Return the precision of models loaded from now on: "fp32", or "fp16", in which Core ML itself computes."""
    if native_present():
        return "fp16"
    from portable_coreml import proxy

    return proxy.precision()


def install(precision: str = "fp32") -> bool:
    """Make coremltools predict with the portable engine, whether coremltools was imported before or not.

    Args:
        precision: "fp32", "fp16" or "ane", for models loaded from now on. Call it again to change it.

    Returns:
        Whether the engine is installed. Where Core ML is present, nothing is done and this is False.

    Raises:
        ValueError: the precision or one of its options is unknown.
    """
    if native_present():
        return False
    from portable_coreml import proxy

    proxy.set_precision(precision)
    put(proxy.module())
    return True


@contextmanager
def loading_as(precision: str) -> Iterator[None]:
    """Load models in `precision`, "fp32", "fp16" or "ane", inside the `with` block; other threads keep their precision.

    The engine is installed as by `install`. Where Core ML is present, nothing is done.

    Raises:
        ValueError: the precision or one of its options is unknown.
    """
    if native_present():
        yield
        return
    from portable_coreml import proxy

    put(proxy.module())
    with proxy.loading_as(precision):
        yield
