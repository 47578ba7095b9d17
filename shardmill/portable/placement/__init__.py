"""Predicts where Core ML would place each operation, from rules with sources. Nothing here was measured on a
device.
"""

from .judge import OpVerdict, Verdicts, judge_model, judge_package
from .rule import Finding, Rule, Scope, Source
from .rules import BY_ID, RULES
from .subject import Target

__all__ = [
    "BY_ID",
    "RULES",
    "Finding",
    "OpVerdict",
    "Rule",
    "Scope",
    "Source",
    "Target",
    "Verdicts",
    "judge_model",
    "judge_package",
]
