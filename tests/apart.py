"""An engine whose widths round apart, as the widths of a device may: one token with fp16's rounding, more in fp32.

The engine is right, and rounds in one width only. The gates take the engine for Core ML, which has no fp32 and is held
to the limits of fp16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from portable_coreml import proxy

from shardmill.gates import disturbed, encoder, nonfinite, parity, stack

GATES = (disturbed, encoder, nonfinite, parity, stack)


PLAIN = proxy.MLModelProxy


class Apart(PLAIN):
    """A program that is loaded twice, at two precisions."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with proxy.loading_as("fp32"):
            self.wide = PLAIN(*args, **kwargs)
        with proxy.loading_as("fp16"):
            super().__init__(*args, **kwargs)

    def predict(self, data: Any, state: Any = None) -> Any:
        """Run a pass at the precision of its width; what states hold is always fp16."""
        if next(data[name] for name in ("x", "hidden") if name in data).shape[2] == 1:
            return super().predict(data, state)
        wide, states = self.wide, {} if state is None else self._own(state)
        values = wide._run(wide._signature.convert(data), states)
        for name, value in states.items():
            states[name] = value.to(torch.float16).to(value.dtype)
        return wide._signature.results(wide._executable.outputs, values, wide._types)


@contextmanager
def installed(judged_as_core_ml: bool = True) -> Iterator[None]:
    """Give programs that are loaded within widths that round apart."""
    import portable_coreml

    with ExitStack() as patches:
        patches.callback(lambda: portable_coreml.install(precision=proxy.precision()))  # last of all
        patches.enter_context(mock.patch.object(proxy, "MLModelProxy", Apart))
        for gate in GATES if judged_as_core_ml else ():
            patches.enter_context(mock.patch.object(gate, "is_portable", lambda: False))
        portable_coreml.install(precision=proxy.precision())
        yield
