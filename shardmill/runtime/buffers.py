"""Input arrays that belong to a program, because Core ML may still own them after a pass.

coremltools hands a numpy array to Core ML without a copy (coremlpython/CoreMLPythonArray.mm:53-66). Core ML releases
its reference about a second after the pass, on a separate queue that does not hold the interpreter's lock. If that
reference is the last one, the array is freed outside the lock and the process may crash (coremltools pull requests 2827
and 2829). So each input has one array for each shape. It is refilled before each pass, and is never freed while Core ML
may own it. The native module accepts such an array without conversion: fp32, in C order, writable.
"""

from __future__ import annotations

import time
import weakref
from collections import deque

import numpy as np
from numpy.typing import DTypeLike, NDArray

OWNED = 30.0  # seconds that an array outlives its program; Core ML has been seen to own inputs for one second

Arrays = dict[tuple[str, tuple[int, ...]], NDArray[np.generic]]
_retired: deque[tuple[float, Arrays]] = deque()  # arrays of programs that are gone, the oldest first


class Buffers:
    """The arrays of one program, by the input's name and shape."""

    def __init__(self) -> None:
        self._arrays: Arrays = {}
        free_retired()
        weakref.finalize(self, _retire, self._arrays)

    def filled(self, name: str, value: NDArray[np.floating]) -> NDArray[np.generic]:
        """Return the array of an input, in fp32, filled with the numbers of `value`."""
        array = self.array(name, value.shape, np.float32)
        np.copyto(array, value)
        return array

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Return the array of an input with its previous contents; zeros if the array is new."""
        found = self._arrays.get((name, shape))
        if found is None:
            found = self._arrays[name, shape] = np.zeros(shape, dtype)
        return found


def _retire(arrays: Arrays) -> None:
    _retired.append((time.monotonic(), arrays))


def free_retired() -> None:
    """Free the arrays of programs that have been gone for so long that Core ML no longer owns them."""
    while _retired and time.monotonic() - _retired[0][0] > OWNED:
        _retired.popleft()
