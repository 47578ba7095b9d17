"""Placement rules: a rule is data (identity, scope, confidence, sources) and one check over a function.

Severities: "error" makes the operation ineligible for the Neural Engine, or the whole program if the finding names no
operation; "warn" and "info" are reported and decide nothing. Confidence: A = Apple says it; B = measured by two
parties, or by one with method and data; C = one party, one machine; D = contradicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from portable_coreml.judge.placement.subject import Subject

SEVERITIES = ("error", "warn", "info")


@dataclass(frozen=True)
class Citation:
    """Where a statement is made: a repository or document, and the place in it."""

    origin: str
    place: str = ""


@dataclass(frozen=True)
class Scope:
    """Where a rule is said to hold."""

    os: str = "all"
    chips: str = "all"


@dataclass(frozen=True)
class Finding:
    """One breach. `output` is the first output of the operation, or "" for the program as a whole."""

    rule: str
    severity: str
    function: str
    output: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Breach:
    """What a check yields: where and why. `severity` overrides the rule's where the case is milder or worse."""

    output: str
    why: str
    severity: str | None = None


Check = Callable[[Subject], Iterator[Breach]]


@dataclass(frozen=True)
class Rule:
    """One statement about placement that can be checked without a device."""

    id: str
    severity: str
    title: str
    remedy: str
    check: Check
    confidence: str
    sources: tuple[Citation, ...]
    scope: Scope = Scope()
    contested: str = ""

    def findings(self, subject: Subject) -> Iterator[Finding]:
        """Yield every breach of this rule in one function."""
        for breach in self.check(subject):
            severity = breach.severity or self.severity
            yield Finding(self.id, severity, subject.function.name, breach.output, breach.why, self.remedy)
