"""provenance: who was built from what, with which tools, as an in-toto statement with SLSA's build predicate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill.files import write_json
from shardmill.pipeline.provenance import statement
from shardmill.pipeline.task import Task


def task(record: Path, manifest: Path, receipts: list[Path]) -> Task:
    """provenance.json.

    Args:
        record: source.receipt.json.
        manifest: model.json.
        receipts: of all steps.
    """

    def work(made: Mapping[str, Path]) -> None:
        write_json(made["provenance"], statement(record, manifest, receipts))

    return Task(work)
