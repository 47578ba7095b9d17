"""The folder of a build's evidence. Every job of a build uses it, so no module that reads evidence is imported."""

from __future__ import annotations

from pathlib import Path

FOLDER = "evidence"


def evidence_files(build: Path) -> list[Path]:
    """Return files of evidence in a build's folder, in the order of their names."""
    return sorted((build / FOLDER).glob("[!.]*.json"))
