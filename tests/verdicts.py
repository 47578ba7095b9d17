"""The rows of a gate's verdict, judged in a test: all must pass, and how near rounding comes to its limits is noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import limits

# What only rounding to fp32 moves in a sound program.
ROUNDED = {
    *("program_error", "width_error", "width_state_error", "rejected_draft_error"),
    *("padding_error", "packing_error", "bucket_error"),
    *("witness_error", "witness_width_error", "witness_agreement"),
}


def all_pass(rows: Iterable[Mapping[str, Any]]) -> None:
    """Fail if a number is beyond its threshold."""
    __tracebackhide__ = True
    rows = list(rows)
    for row in rows:
        if row["name"] in ROUNDED:
            limit = float(row["threshold"].split()[-1])
            what = f"{row['name']} {row['detail']}".strip()
            limits.agrees(what, row["value"], limits.Limit(limit, f"{row['name']} of the gates"))
    missed = [f"{row['name']} is {row['value']}, must be {row['threshold']}" for row in rows if not row["passed"]]
    assert rows and not missed, "; ".join(missed) or "no rows"
