"""Inputs that Core ML may still own: one array for each input and shape, which lives longer than its program."""

from __future__ import annotations

import gc
import time
import weakref

import numpy as np
import pytest

from shardmill.runtime import functions
from shardmill.runtime.functions import OWNED, Buffers, free_retired


def test_an_input_has_one_array_for_each_shape_and_is_filled_anew() -> None:
    kept = Buffers()
    first = kept.filled("x", np.ones((1, 3, 4, 1), np.float32).transpose(0, 3, 1, 2))
    again = kept.filled("x", np.full((1, 1, 3, 4), 2.0, np.float64))
    assert again is first and (first == 2).all()
    assert kept.filled("x", np.ones((1, 1, 3, 1))) is not first and kept.filled("y", again) is not first


def test_the_native_module_takes_each_array_as_it_is() -> None:
    """fp32, in C order, writable: whatever was given."""
    given = np.arange(24, dtype=np.float16).reshape(1, 4, 6).T
    given.flags.writeable = False
    found = Buffers().filled("x", given)
    assert found.dtype == np.float32 and found.flags.c_contiguous and found.flags.writeable
    np.testing.assert_array_equal(found, given)


def test_the_arrays_outlive_their_program_for_as_long_as_core_ml_may_own_them(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    now = [start]
    monkeypatch.setattr(functions.time, "monotonic", lambda: now[0])
    kept = Buffers()
    array = weakref.ref(kept.filled("x", np.ones(3)))
    del kept
    gc.collect()
    now[0] = start + OWNED / 2
    free_retired()
    assert array() is not None
    now[0] = start + OWNED * 1.1
    free_retired()
    assert array() is None
