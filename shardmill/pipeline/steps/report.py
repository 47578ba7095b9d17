"""report: one page for a person, from the files of a build and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.files import write_text
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
    settings: Mapping[str, Any],
) -> None:
    """Writes report.html (`page`).

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
