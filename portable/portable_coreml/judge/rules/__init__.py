"""The rule book, by subject. Importing this package fills `judge.rule.RULES`.

Folklore that is refuted (W4, ST8) or holds only for the private interface (S10) is no rule.
"""

from portable_coreml.judge.rule import RULES
from portable_coreml.judge.rules import dtypes, dynamic, operations, shapes, states, weights

__all__ = ["RULES", "dtypes", "dynamic", "operations", "shapes", "states", "weights"]
