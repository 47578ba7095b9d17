"""The state of every step of the pipeline, artifact by artifact, read from the build's files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.report.read import Build, Json
from shardmill.report.speed import close_calls, described, measured_speed, speed_groups
from shardmill.report.wording import plural

RECEIPT = ".receipt.json"
# From the worst state to the best: a step has the state of its worst artifact.
STATES = {
    "failed": "failed",
    "missing": "missing",
    "not_run": "not run",
    "predicted": "predicted",
    "unverified": "unverified",
    "close": "close call",
    "measured": "measured",
    "passed": "passed",
    "made": "made",
    "apart": "beside this page",
}


@dataclass(frozen=True)
class StepState:
    """One rule of the pipeline."""

    name: str
    amount: str
    artifacts: tuple[tuple[str, str], ...]  # name, state

    @property
    def counts(self) -> dict[str, int]:
        """Return how many artifacts are in each state."""
        return dict(Counter(state for _, state in self.artifacts))

    @property
    def state(self) -> str:
        """Return the worst state among the artifacts."""
        states = {state for _, state in self.artifacts}
        return next((state for state in STATES if state in states), "missing")


# The text beside the name of each step, in the order of the list; "# program" counts the step's files.
AMOUNTS = {
    "fetch": "",
    "split": "# part",
    "calibration": "in fp32",
    "codes": "# file of codes",
    "sensitivity": "# list of costs",
    "search": "forms",
    "original": "in fp32",
    "measured": "# point",
    "precision": "a form each",
    "reference": "in fp32",
    "embedding": "# table",
    "convert": "# program",
    "expected": "for a check",
    "compile": "# bundle",
    "residency": "# gate file",
    "parity": "# gate file",
    "witness": "# gate file",
    "predicted": "never a gate",
    "model.json": "for a runtime",
    "benchmark": "",
    "provenance": "for a machine",
    "report": "this page",
}
SHOWN = {"parity_stack": "parity", "manifest": "model.json"}  # steps that the list has under another name


def step_states(build: Build) -> dict[str, StepState]:
    """Return all steps by name; steps of a workflow that has others come last."""
    rows: dict[str, dict[str, Any]] = {}
    for step in build.pipeline:
        name: str = step["name"]
        row = rows.setdefault(SHOWN.get(name, name), {"gate": step["gate"], "files": []})
        row["files"] += step["files"]
    names = [*(name for name in AMOUNTS if name in rows), *(name for name in rows if name not in AMOUNTS)]
    return {name: _step_state(name, rows[name], build) for name in names}


def _step_state(name: str, row: Json, build: Build) -> StepState:
    """Return the state of one row of the pipeline.

    The states of `fetch` and `benchmark` are read from the files that these steps write.
    """
    if name in OF_THEIR_OWN:
        return OF_THEIR_OWN[name](build)
    words = AMOUNTS.get(name, "")
    amount = words.removeprefix("# ")
    if amount != words:
        amount = plural(len(build.plan["parts"]) if name == "split" else len(row["files"]), amount)
    if row["gate"]:
        return _gate_states(name, row["files"], build, amount)
    if row["files"][0].endswith(RECEIPT):
        return _receipt_states(name, row["files"], build, amount)
    return StepState(name, amount, tuple((path, "apart" if name == "provenance" else "made") for path in row["files"]))


def _fetch_state(build: Build) -> StepState:
    """Return the state of `fetch`, with the checkpoint's files as artifacts."""
    files = build.source["files"]
    artifacts = tuple((name, "made") for name in sorted(files)) or (("source", "missing"),)
    return StepState("fetch", plural(len(files), "file"), artifacts)


def _receipt_states(name: str, expected: Iterable[str], build: Build, amount: str) -> StepState:
    """Return the state of a step whose artifacts have receipts; a note in a receipt is a reservation."""

    def state(path: str) -> str:
        receipt = build.receipts.get(path)
        return "missing" if receipt is None else "unverified" if receipt.get("note") else "made"

    names = [path.removesuffix(RECEIPT) for path in expected]
    return StepState(name, amount, tuple((path.split("/")[-1], state(path)) for path in names))


def _gate_states(name: str, expected: Sequence[str], build: Build, amount: str) -> StepState:
    """Return the state of a gate, part by part: failed, predicted to pass, or passed."""
    names = [path.removesuffix(RECEIPT).split("/") for path in expected]
    known = {(folder, file["part"]): file for folder, files in build.verdicts.items() for file in files}

    def state(folder: str, part: str) -> str:
        file = known.get((folder, part))
        if file is None:
            return "missing"
        if not all(row["passed"] for row in file["gate"]):
            return "failed"
        return "predicted" if file.get("evidence") == "predicted" else "passed"

    return StepState(name, amount, tuple((part, state("/".join(folder), part)) for *folder, part in names))


def _benchmark_state(build: Build) -> StepState:
    """Return the state of each prompt length and task: measured, or failed if drafts changed the output."""
    if build.speed is None:
        return StepState("benchmark", "", (("benchmark", "not_run"),))
    if build.encodes:
        rows = build.speed["passes"]
        return StepState("benchmark", plural(len(rows), "bucket"), tuple((str(r["bucket"]), "measured") for r in rows))
    states: dict[str, str] = {}
    for row in measured_speed(build.speed):
        state = "measured" if row["exact"] == 1 or close_calls(row, build.turned) else "failed"
        states[described(row)] = "failed" if "failed" in (state, states.get(described(row))) else "measured"
    lengths, tasks = len(speed_groups(build.speed["sweep"])), len(speed_groups(build.speed["tasks"]))
    amount = f"{plural(lengths, 'length')}, {plural(tasks, 'task')}"
    return StepState("benchmark", amount, tuple(states.items()) or (("benchmark", "not_run"),))


OF_THEIR_OWN = {"fetch": _fetch_state, "benchmark": _benchmark_state}
