"""provenance: who was built from what, with which tools, as an in-toto statement with SLSA's build predicate."""

from __future__ import annotations

from pathlib import Path

from shardmill.files import write_json
from shardmill.pipeline.provenance import statement


def run(record: Path, manifest: Path, receipts: list[Path], made: Path) -> None:
    """Args: record source.json; manifest model.json; receipts of all steps; made provenance.json."""
    write_json(made, statement(record, manifest, receipts))
