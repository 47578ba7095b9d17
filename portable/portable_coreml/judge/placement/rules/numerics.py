"""Rules on fp16 arithmetic that look like placement problems when they strike."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from portable_coreml.judge.placement.rule import Breach, Citation, Rule
from portable_coreml.judge.placement.rules.shapes import APPLE_RULES
from portable_coreml.judge.placement.subject import Subject, label


def _infinite_mask(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        for argument in ("x", "y", "a", "b") if op.kind in ("add", "select", "mul") else ():
            value = subject.literal(op, argument)
            if value is not None and value.dtype.kind == "f" and bool(np.isinf(value).any()):
                yield Breach(label(op), "it adds or selects an infinite constant")
                break


RULES = (
    Rule(
        "N4",
        "warn",
        "infinite mask value",
        "mask with -1e4 (or -4e4): the engine's softmax does not handle infinities",
        _infinite_mask,
        "A",
        (APPLE_RULES, Citation("apple/ml-ane-transformers", "transformer.py")),
    ),
)
