"""A small program that keeps a state, for those who try the simulated Mac."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

WIDTH, MOST = 4, 4


def make(folder: Path) -> Path:
    """Write a package whose state adds up what it was given; hidden is a third of x, plus the sum.

    Returns:
        The package; its input x is fp16 [1, WIDTH, T, 1] with T from 1 to MOST, its state `kept` [1, WIDTH, 1, 1].
    """
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol, types

    specs = [
        mb.TensorSpec((1, WIDTH, get_new_symbol(), 1), dtype=types.fp16),
        mb.StateTensorSpec((1, WIDTH, 1, 1), dtype=types.fp16),
    ]

    @mb.program(input_specs=specs, opset_version=ct.target.iOS18)
    def program(x: Any, kept: Any) -> Any:
        added = mb.add(x=mb.read_state(input=kept), y=mb.reduce_sum(x=x, axes=[2], keep_dims=True))
        written = mb.coreml_update_state(state=kept, value=added)
        return mb.add(x=mb.mul(x=x, y=np.float16(1 / 3)), y=written, name="hidden")

    shape = (1, WIDTH, ct.RangeDim(1, MOST, default=1), 1)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        inputs=[ct.TensorType("x", shape, np.float16)],
        minimum_deployment_target=ct.target.iOS18,
        skip_model_load=True,
    )
    package = folder / "small.mlpackage"
    model.save(str(package))
    return package


def passed(tokens: int, value: float = 0.3) -> dict[str, np.ndarray]:
    """Return the inputs of a pass."""
    return {"x": np.full((1, WIDTH, tokens, 1), value, np.float32)}
