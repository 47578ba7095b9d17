"""provenance: the inputs and tools of a build, and the results of the gates, as in-toto statements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.files import write_json, write_text
from shardmill.pipeline.task import Task


def task(
    record: Path,
    manifest: Path,
    receipts: list[Path],
    verdicts: list[Path],
    text: Path,
    calibration: list[Path],
    recipe: list[Path],
    settings: Mapping[str, Any],
) -> Task:
    """Describe provenance.json and test-results.jsonl.

    Args:
        record: source.receipt.json.
        manifest: model.json.
        receipts: the receipts of all steps.
        verdicts: the verdicts of all gates.
        text: the input text of the parity gates.
        calibration: the calibration text, if there is one.
        recipe: the file with the form of each matrix, if the config names a file.
        settings: the config as plain data.
    """

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.pipeline.provenance import (
            CALIBRATION_TEXT,
            PARITY_TEXT,
            RECIPE,
            Records,
            gate_statements,
            provenance,
        )

        lists = {PARITY_TEXT: [text], CALIBRATION_TEXT: calibration, RECIPE: recipe}
        named = {key: file for key, files in lists.items() for file in files}
        records = Records(record, manifest, receipts, verdicts, named, settings)
        results = gate_statements(manifest.parent, verdicts)
        lines = [json.dumps(result, sort_keys=True, ensure_ascii=False) for result in results]
        write_text(made["results"], "".join(f"{line}\n" for line in lines))
        write_json(made["provenance"], provenance(records, made["results"]))

    return Task(work)
