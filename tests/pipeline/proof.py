"""What `verify` finds in a build that was really made."""

from __future__ import annotations

from pathlib import Path

from shardmill.files import read_json
from shardmill.records.attest import read_provenance
from shardmill.records.finished import demand, read_records
from shardmill.release.verify import prove


def faults(build: Path) -> list[tuple[str, str]]:
    """Its faults; and the numbers that its gates measured and nobody would miss (gates/required.py)."""
    found = list(prove(build, []).wrong)
    records = read_records(build, read_provenance(build / "provenance.json"))
    for step in records.verdicts:
        verdict = read_json(build / f"{step}.json")
        missed = {number.name for number in demand(records, step, verdict.get("findings", ())).numbers}
        found += [(step, row["name"]) for row in verdict["gate"] if row["name"] not in missed]
    return found
