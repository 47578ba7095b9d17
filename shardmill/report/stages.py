"""The state of every step of the pipeline, artifact by artifact, as the build's files tell it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardmill.report.read import Build, Json
from shardmill.report.speed import described, groups, measured
from shardmill.report.wording import plural

# In the order in which the worst is looked for: a step is as good as its worst artifact.
STATES = {
    "failed": "failed",
    "missing": "missing",
    "not_run": "not run",
    "predicted": "predicted",
    "unverified": "unverified",
    "measured": "measured",
    "passed": "passed",
    "made": "made",
    "apart": "beside this page",
}


@dataclass(frozen=True)
class Step:
    """One rule of the pipeline."""

    name: str
    amount: str
    artifacts: tuple[tuple[str, str], ...]  # name, state

    @property
    def state(self) -> str:
        """The worst state among the artifacts."""
        found = {state for _, state in self.artifacts}
        return next((state for state in STATES if state in found), "missing")


def steps(build: Build) -> dict[str, Step]:
    """All steps by name."""
    parts = [piece.name for piece in build.pieces if piece.kind != "embedding"]
    source, gate = build.source["files"], "gate file"
    found = (
        Step("fetch", plural(len(source), "file"), tuple((name, "made") for name in sorted(source)) or none("source")),
        receipts("split", ["plan"], build, f"{len(build.pieces)} parts"),
        receipts("embedding", ["embedding"], build, "1 table"),
        receipts("reference", ["reference"], build, "in fp32"),
        receipts("convert", [f"packages/{part}" for part in parts], build, plural(len(parts), "program")),
        receipts("compile", [f"compiled/{part}" for part in parts], build, plural(len(parts), "bundle")),
        gates("parity", [*parts, "stack"], build.parity, gate),
        gates("residency", parts, build.residency, gate),
        benchmark(build),
        Step("model.json", "for a runtime", (("model.json", "made"),)),
        Step("report", "this page", (("report.html", "made"),)),
        Step("provenance", "for a machine", (("provenance.json", "apart"),)),
    )
    return {step.name: step for step in found}


def none(name: str) -> tuple[tuple[str, str], ...]:
    """What stands for artifacts that are not there."""
    return ((name, "missing"),)


def receipts(name: str, expected: Iterable[str], build: Build, amount: str) -> Step:
    """A step whose artifacts have receipts; a note in one is a reservation."""

    def state(path: str) -> str:
        receipt = build.receipts.get(path)
        return "missing" if receipt is None else "unverified" if receipt.get("note") else "made"

    return Step(name, amount, tuple((path.split("/")[-1], state(path)) for path in expected))


def gates(name: str, expected: Sequence[str], files: Iterable[Json], unit: str) -> Step:
    """A gate: failed, predicted to pass, or passed, part by part."""
    known = {file["part"]: file for file in files}

    def state(part: str) -> str:
        file = known.get(part)
        if file is None:
            return "missing"
        if not all(row["passed"] for row in file["gate"]):
            return "failed"
        return "predicted" if file.get("evidence") == "predicted" else "passed"

    return Step(name, plural(len(known), unit), tuple((part, state(part)) for part in expected))


def benchmark(build: Build) -> Step:
    """Prompt lengths and tasks that were measured, failed where drafts changed the output; or that nothing was."""
    found: dict[str, str] = {}
    for row in measured(build.speed):
        state = "measured" if row["exact"] == 1 else "failed"
        found[described(row)] = "failed" if "failed" in (state, found.get(described(row))) else "measured"
    lengths, tasks = len(groups(build.speed["sweep"])), len(groups(build.speed["tasks"]))
    amount = f"{plural(lengths, 'length')}, {plural(tasks, 'task')}"
    return Step("benchmark", amount, tuple(found.items()) or (("benchmark", "not_run"),))
