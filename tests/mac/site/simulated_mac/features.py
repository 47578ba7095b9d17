"""What Core ML takes from Python and gives back, as CoreMLPythonUtils.mm and CoreMLPythonArray.mm convert it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simulated_mac import log
from simulated_mac.native_calls import ns_error

# CoreMLPythonArray.mm:10-29; int8 needs a wheel that was built with the SDK of macOS 26, which 9.0's was.
ARRAYS = frozenset((("i", 4), ("i", 1), ("f", 4), ("f", 8)))
TOKENS = {"x": 2, "hidden": 2}  # inputs of this project's programs, and the axis on which their tokens lie


def convert(value: Any) -> Any:
    """Return one value as Core ML gets it, in the order of convertValueToObjC (CoreMLPythonUtils.mm, before :409).

    Returns:
        A number, a text, a dictionary or an array as it is; None for a list or tuple, since convertValueToSequence
        returns nil, which leaves the input out.

    Raises:
        RuntimeError: there is no such feature (CoreMLPythonUtils.mm:409).
    """
    if isinstance(value, int | float | np.integer | str | bytes | dict):  # True is the number 1
        return value
    if isinstance(value, list | tuple):
        return None
    array = _as_array(value)
    if array is not None and not _refusal(array):
        return array
    if array is not None:
        log.write("rejected", why=_refusal(array), dtype=str(array.dtype), shape=array.shape, strides=array.strides)
    else:
        log.write("rejected", why=f"a {type(value).__name__}")
    print("Error: value type not convertible:")
    print(value)
    raise RuntimeError("value type not convertible")


def _as_array(value: Any) -> Any:
    """Return the array of whatever has a buffer, without a copy; None of anything else."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(memoryview(value))
    except TypeError:
        return None


def _refusal(array: Any) -> str:
    """Return why an array is no MLMultiArray; "" if it is one."""
    if array.ndim == 0:
        return "no shape"  # convertValueToArray: buf.shape() == nullptr
    if (array.dtype.kind, array.dtype.itemsize) not in ARRAYS:
        return "dtype"
    if not array.flags.writeable:
        return "read-only"  # CoreMLPythonArray.mm:55, mutable_data()
    if any(stride < 0 or stride % array.itemsize for stride in array.strides):
        return "strides"  # CoreMLPythonArray.mm:41-52: whole elements, without a sign
    return ""


def features(given: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the features of a dictionary (CoreMLPythonUtils.mm, dictToFeatures). Raises RuntimeError."""
    if not all(isinstance(name, str | bytes) for name in given):
        raise RuntimeError("Unable to cast Python instance to C++ type")
    converted = {str(name): convert(value) for name, value in given.items()}
    return {name: value for name, value in converted.items() if value is not None}


def arrays(given: Mapping[str, Any], wanted: Mapping[str, bool]) -> dict[str, Any]:
    """Return the arrays that a function takes; features that it does not name are ignored.

    Args:
        given: the features.
        wanted: the function's inputs, and whether each may be left out.

    Raises:
        RuntimeError: one is missing, or is no array.
    """
    found = {}
    for name, optional in wanted.items():
        if name not in given:
            if not optional:
                raise ns_error(f"Feature {name} is required but not specified.")
            continue
        if not isinstance(given[name], np.ndarray):
            kind = type(given[name]).__name__
            raise ns_error(f"The model expects input feature {name} to be an array, but the input is of type {kind}.")
        found[name] = given[name]
    return found


def returned(value: Any) -> Any:
    """Return an output or a state as Python gets it: fp16 becomes float32 (CoreMLPythonUtils.mm:449-453)."""
    if isinstance(value, np.ndarray):
        return np.array(value, np.float32 if value.dtype == np.float16 else value.dtype, order="C")
    return value


def tokens(given: Mapping[str, Any]) -> int:
    """Return how many tokens a pass has; 0 if the program is not this project's."""
    return next((given[n].shape[axis] for n, axis in TOKENS.items() if n in given and given[n].ndim > axis), 0)
