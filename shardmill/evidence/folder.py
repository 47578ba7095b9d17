"""Where the evidence of a build lies. Every job of a build asks, so this imports none of what reads it."""

from __future__ import annotations

from pathlib import Path

FOLDER = "evidence"


def evidence_files(build: Path) -> list[Path]:
    """Return files of evidence in a build's folder, in the order of their names."""
    return sorted((build / FOLDER).glob("[!.]*.json"))
