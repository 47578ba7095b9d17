"""The gates' verdicts as in-toto test results (https://in-toto.io/attestation/test-result/v0.1).

Each says of which packages and bundles what was asked and what passed. A number that was not measured is in no list of
tests; it is named in the annotations with the reason, as is whether a gate measured or predicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardmill.attest.statement import TEST_RESULT, statement


def gate_statement(
    name: str, sha256: str, verdict: Mapping[str, Any], subjects: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """What one gate said.

    Args:
        name: the verdict's path in the build, without its ending: "parity/head_0".
        sha256: of the verdict's file.
        verdict: its content.
        subjects: (path, sha256) of the files that the gate judged.
    """
    rows = verdict["gate"]
    tests = {passed: [f"{name}.{row['name']}" for row in rows if row["passed"] is passed] for passed in (True, False)}
    notes: dict[str, Any] = {"evidence": verdict.get("evidence", "measured")}
    notes |= {key: verdict[key] for key in ("engine", "witness", "not_run") if verdict.get(key)}
    notes["thresholds"] = {row["name"]: row["threshold"] for row in rows}
    predicate: dict[str, Any] = {
        "result": "FAILED" if tests[False] else "PASSED",
        "configuration": [{"name": f"{name}.json", "digest": {"sha256": sha256}, "annotations": notes}],
        "passedTests": tests[True],
    }
    if tests[False]:
        predicate["failedTests"] = tests[False]
    return statement(TEST_RESULT, subjects, predicate)
