"""Lists: what a Python list would hold, in programs with and without loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from portable_coreml.errors import ExecutionError
from portable_coreml_extra.lists import list_gather, list_read, list_write, make_list

X = np.array([1.0, -2.0], np.float32)


def test_a_list_grows_and_keeps_what_was_written(build_program: Callable[..., Any]) -> None:
    """Reads before a write give zeros, a write behind the end fills the gap; interpreted and compiled alike."""
    from coremltools.converters.mil import Builder as mb

    def program(x: Any) -> Any:
        ls = mb.make_list(init_length=1, elem_shape=(2,))
        ls = mb.list_write(ls=ls, index=3, value=x)
        later = mb.list_scatter(ls=ls, indices=[0, 4], value=np.array([[5, 6], [7, 8]], np.float32))
        length = mb.cast(x=mb.list_length(ls=later), dtype="fp32")
        kept = mb.list_gather(ls=ls, indices=[0, 2, 3])  # the list as it was before the scatter
        return mb.add(x=mb.concat(values=[kept, mb.list_gather(ls=later, indices=[0, 4])], axis=0), y=length)

    model = build_program(program, {"x": (2,)})
    wanted = np.array([[0, 0], [0, 0], X, [5, 6], [7, 8]], np.float32) + 5
    for _ in range(2):
        np.testing.assert_array_equal(next(iter(model.predict({"x": X}).values())), wanted)


def test_a_loop_collects_as_many_elements_as_it_runs(build_program: Callable[..., Any]) -> None:
    """The list's length depends on data: another count on the second call, with the same input shapes."""
    from coremltools.converters.mil import Builder as mb

    def program(count: Any, x: Any) -> Any:
        limit = mb.cast(x=mb.squeeze(x=count), dtype="int32")

        def body(i: Any, n: Any, ls: Any) -> Any:
            value = mb.mul(x=x, y=mb.cast(x=i, dtype="fp32"))
            return mb.add(x=i, y=1), n, mb.list_write(ls=ls, index=i, value=value)

        ls = mb.make_list(init_length=1, elem_shape=(2,))
        found = mb.while_loop(_cond=lambda i, n, ls: mb.less(x=i, y=n), _body=body, loop_vars=(0, limit, ls))
        last = mb.list_read(ls=found[2], index=mb.sub(x=found[0], y=1))
        length = mb.expand_dims(x=mb.cast(x=mb.list_length(ls=found[2]), dtype="fp32"), axes=[0])
        return mb.concat(values=[last, length], axis=0)

    model = build_program(program, {"count": (1,), "x": (2,)})
    for count in (3, 7):
        out = next(iter(model.predict({"count": np.array([count], np.float32), "x": X}).values()))
        np.testing.assert_array_equal(out, [*(X * (count - 1)), count])


def test_impossible_elements_are_refused() -> None:
    """An index past the end, a negative one, and one that would take all memory."""
    (ls,) = make_list([2], 2)
    for call, arguments in (
        (list_read, (ls, 2)),
        (list_read, (ls, -1)),
        (list_write, (ls, 1 << 40, torch.zeros(2))),
        (list_gather, (ls, [0, 5])),
        (make_list, ([2], 1 << 40)),
    ):
        with pytest.raises(ExecutionError):
            call(*arguments)
