"""The rule book, by subject.

Folklore that is refuted (W4, ST8) or holds only for the private interface (S10) is no rule.
"""

from portable_coreml.judge.placement.rule import Rule
from portable_coreml.judge.placement.rules import dtypes, dynamic, numerics, operations, shapes, states, weights

RULES: tuple[Rule, ...] = (
    *shapes.RULES,
    *dtypes.RULES,
    *operations.RULES,
    *states.RULES,
    *dynamic.RULES,
    *weights.RULES,
    *numerics.RULES,
)
BY_ID = {rule.id: rule for rule in RULES}
