"""A gate's verdict: the step's output where it passed; where it missed, a file beside it, for a person to look at."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import GateError
from shardmill.files import write_json


def failed(verdict: Path) -> Path:
    """Where a verdict that missed a threshold is kept: Snakemake removes the outputs of a job that fails."""
    return verdict.with_suffix(".failed.json")


def settle(gate: str, content: Mapping[str, Any], made: Path, verdict: Path) -> None:
    """Writes a verdict, whose `gate` are rows of thresholds.compare.

    Args: made, the path to write to; verdict, the path at which it will appear.
    Raises GateError where a number missed its threshold, once every number is in the file beside `verdict`.
    """
    from shardmill.gates import thresholds

    try:
        thresholds.demand(gate, content["gate"])
    except GateError as error:
        rows = [row | {"value": row["value"] if math.isfinite(row["value"]) else str(row["value"])}
                for row in content["gate"]]  # fmt: skip
        write_json(failed(verdict), {**content, "gate": rows})
        raise GateError(f"{error}; all numbers: {failed(verdict)}") from None
    write_json(made, content)
