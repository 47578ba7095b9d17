"""Predicts where Core ML would place each operation, from rules with sources.

Nothing here was measured on a device.
"""

from portable_coreml.judge.placement.judge import OpVerdict, Verdicts, judge_model, judge_package
from portable_coreml.judge.placement.rule import Citation, Finding, Rule, Scope
from portable_coreml.judge.placement.rules import BY_ID, RULES
from portable_coreml.judge.placement.subject import Target

__all__ = [
    "BY_ID",
    "RULES",
    "Finding",
    "OpVerdict",
    "Rule",
    "Scope",
    "Citation",
    "Target",
    "Verdicts",
    "judge_model",
    "judge_package",
]
