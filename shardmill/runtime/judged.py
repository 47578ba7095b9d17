"""What the gates have said of a build: each passed, missed a threshold, or has judged nothing of what is there now.

A build without model.json has no other record of it. Receipts say which package and which bundle a gate judged, so that
what it said of earlier ones does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardmill.files import json_object
from shardmill.models.interface import LABELS

GATES = ("residency", "parity", "witness")  # a gate's folder in a build
STACK = "stack"  # what the parity gate calls all parts together
FAILED = ".failed.json"  # ends the name of a verdict that missed a threshold
ERROR = "ERROR "  # the beginning of the line in a job's log that says why the job failed
INTERRUPTED = "interrupted"  # what stands there after Ctrl-C, which is no error
PASSED, MISSED, OPEN = "passed", "missed a threshold", "has not judged"


@dataclass(frozen=True)
class Judgement:
    """What one gate says of one part.

    Attributes:
        gate: one of GATES.
        part: the part's name, or "stack".
        state: PASSED, MISSED, or OPEN if it has judged nothing or another package.
        said: what missed, in one line; of an open gate, the error that ended its last job, or "".
        log: the log of its job.
        verdict: where the verdict is.
        content: of the verdict that missed; otherwise empty.
    """

    gate: str
    part: str
    state: str
    said: str
    log: Path
    verdict: Path
    content: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Return what to say of a gate that has not passed."""
        name = f"{self.gate} {self.part}"
        return self.said if self.said.startswith(f"{name}: ") else f"{name}: {self.said or 'not judged'}"


def judged(build: Path) -> list[Judgement]:
    """Return what each gate says of each part of a build, then of all parts together; empty without a plan."""
    names = [row["name"] for row in json_object(build / "plan.json").get("parts", ()) if row["kind"] != "embedding"]
    made = {name: _hashes(build, name) for name in names}
    whole = {sha for name, hashes in made.items() if name != LABELS for sha in hashes}
    gates = [gate for gate in GATES if gate != "witness" or (build / gate).is_dir()]
    rows = [(gate, name, made[name]) for name in names for gate in gates]
    return [_judgement(build, *row) for row in (*rows, *([("parity", STACK, whole)] if names else []))]


def failed_gates(build: Path) -> list[Judgement]:
    """Return the judgements of a build's gates that have missed a threshold, or ended with an error."""
    return [one for one in judged(build) if one.state == MISSED or (one.state == OPEN and one.said)]


def _judgement(build: Path, gate: str, part: str, made: set[str]) -> Judgement:
    """Return a gate's judgement; `made` has the hashes of the packages and the bundles that are there."""
    verdict, log = build / gate / f"{part}.json", build / "logs" / f"{gate}_{part}.log"
    receipt, failed = json_object(build / gate / f"{part}.receipt.json"), json_object(verdict.with_suffix(FAILED))
    if made and made <= {*receipt.get("inputs", {}).values()} and verdict.is_file():
        return Judgement(gate, part, PASSED, "", log, verdict)
    # An earlier version did not write down what was judged.
    if failed and ("inputs" not in failed or made <= {*failed["inputs"].values()}):
        said = failed.get("missed") or f"missed {', '.join(_names(failed))}"
        return Judgement(gate, part, MISSED, said, log, verdict.with_suffix(FAILED), failed)
    said = error_in(log)
    return Judgement(gate, part, OPEN, "" if said == INTERRUPTED else said, log, verdict)


def _names(failed: Mapping[str, Any]) -> Iterator[str]:
    """Yield the numbers that missed, of a verdict by a version that wrote no line."""
    yield from (row["name"] for row in failed["gate"] if not row["passed"])


def _hashes(build: Path, part: str) -> set[str]:
    """Return the hashes of a part's package and bundle; of what is not made, none."""
    receipts = (json_object(build / folder / f"{part}.receipt.json") for folder in ("packages", "compiled"))
    return {sha for receipt in receipts for sha in receipt.get("outputs", {}).values()}


def error_in(log: Path) -> str:
    """Return the error in the log of a job; "" if there is none."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.removeprefix(ERROR) for line in reversed(lines) if line.startswith(ERROR)), "")
