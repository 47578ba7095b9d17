"""report: one page for a person, from the files of a build and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.files import sealed, write_json, write_text
from shardmill.pipeline.store import paths_from
from shardmill.report.read import Build, read_json, read_pieces, read_receipts


def run(
    manifest: Path,
    summary: Path,
    record: Path,
    parts: list[Path],
    packages: list[Path],
    table: Path,
    residency: list[Path],
    parity: list[Path],
    speed: Path,
    receipts: list[Path],
    page: Path,
    receipt: Path,
    settings: Mapping[str, Any],
) -> None:
    """Writes report.html (`page`), and a receipt that holds its hash and that of the figures in it.

    Args: manifest model.json; summary plan.json; record source.receipt.json; parts parts/*.json; packages and table
    for their sizes; residency and parity the gates' files; speed benchmark/speed.json; receipts of all steps;
    settings the config as plain data.
    """
    from shardmill.report.page import render

    plan = read_json(summary)
    build = Build(
        model=read_json(manifest),
        plan=plan,
        source=read_json(record),
        pieces=read_pieces(plan, parts, packages, table),
        residency=tuple(read_json(path) for path in residency),
        parity=tuple(read_json(path) for path in parity),
        speed=read_json(speed),
        receipts=read_receipts(receipts, manifest.parent),
        settings=settings,
    )
    write_text(page, render(build))
    files = {"page": page, "speed": speed}
    hashes = {name: hash_file(path) for name, path in files.items()}
    write_json(receipt, sealed({"step": "report", "outputs": hashes, "paths": paths_from(receipt, files)}))
