"""whole_state_update drops a slice_update that replaces a whole buffer, and no other."""

from __future__ import annotations

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

from shardmill.convert.trace import WHOLE_STATE_UPDATE

SHAPE = (1, 2, 8, 32)
WHOLE = {"begin": [0, 0, 0, 0], "end": list(SHAPE)}
ALL = {"begin_mask": [True] * 4, "end_mask": [True] * 4}


def program(size: tuple[int, ...] = SHAPE, **bounds: Any) -> Any:
    """state[begin:end] = x."""

    @mb.program(
        input_specs=[mb.TensorSpec(size, types.fp16), mb.StateTensorSpec(SHAPE, types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def main(x: Any, cache: Any) -> Any:
        old = mb.read_state(input=cache)
        new = mb.slice_update(x=old, update=x, **{k: np.array(v) for k, v in bounds.items()})
        mb.coreml_update_state(state=cache, value=new)
        return mb.add(x=new, y=np.float16(1))

    return main


def passed(prog: Any) -> list[Any]:
    PASS_REGISTRY[WHOLE_STATE_UPDATE](prog)
    return list(prog.functions["main"].operations)


def test_a_whole_update_is_replaced_by_its_value() -> None:
    ops = passed(program(**WHOLE))
    assert "slice_update" not in [op.op_type for op in ops]
    (update,) = [op for op in ops if op.op_type == "coreml_update_state"]
    (add,) = [op for op in ops if op.op_type == "add"]
    assert update.value.name == add.x.name == "x"


@pytest.mark.parametrize(
    "bounds",
    [
        {"begin": [0] * 4, "end": [0] * 4, "end_mask": [True] * 4},
        {"begin": [0] * 4, "end": [0] * 4, "begin_mask": [True] * 4, "end_mask": [True] * 4},
        {**WHOLE, "stride": [1] * 4},
    ],
)
def test_however_it_is_spelled(bounds: dict[str, Any]) -> None:
    assert "slice_update" not in [op.op_type for op in passed(program(**bounds))]


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        ((1, 2, 7, 32), {"begin": [0, 0, 1, 0], "end": list(SHAPE)}),
        ((1, 2, 7, 32), {"begin": [0] * 4, "end": [1, 2, 7, 32]}),
        ((1, 1, 8, 32), {"begin": [0, 1, 0, 0], "end": list(SHAPE)}),
        ((1, 2, 4, 32), {**WHOLE, "stride": [1, 1, 2, 1]}),
        (SHAPE, {"begin": [0] * 4, "end": [0] * 4, **ALL, "stride": [1, 1, -1, 1]}),  # all of it, backwards
    ],
)
def test_an_update_of_a_part_stays(size: tuple[int, ...], bounds: dict[str, Any]) -> None:
    assert "slice_update" in [op.op_type for op in passed(program(size, **bounds))]
