"""A gate's verdict: the step's output if the gate passed; otherwise a file beside the output, for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.errors import GateError
from shardmill.files import write_json
from shardmill.runtime.judged import FAILED


class Missed(GateError):
    """A threshold was missed.

    Attributes:
        content: the whole verdict.
    """

    def __init__(self, message: str, content: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.content = content


def failed(verdict: Path) -> Path:
    """Return where a verdict that missed a threshold is kept: Snakemake removes the outputs of a job that fails."""
    return verdict.with_suffix(FAILED)


def write_verdict(gate: str, content: Mapping[str, Any], made: Path) -> None:
    """Write a verdict.

    Args:
        gate: the gate's name, for the error line.
        content: the verdict; its `gate` has the rows of measurement.compare.
        made: the path to write to.

    Raises:
        Missed: a number missed its threshold.
    """
    from shardmill.gates import measurement

    try:
        measurement.demand(gate, content["gate"])
    except GateError as error:
        rows = [row | {"value": row["value"] if math.isfinite(row["value"]) else str(row["value"])}
                for row in content["gate"]]  # fmt: skip
        raise Missed(str(error), {**content, "gate": rows}) from None
    write_json(made, content)
