"""The folder of a build's evidence. Every job of a build uses it, so no module that reads evidence is imported."""

from __future__ import annotations

from pathlib import Path

FOLDER = "evidence"
LIMITS = "device-limits.json"  # in the working folder: what devices answered about the limits of their systems


def evidence_files(build: Path) -> list[Path]:
    """Return files of evidence in a build's folder, in the order of their names."""
    return sorted((build / FOLDER).glob("[!.]*.json"))


def heed_limits() -> None:
    """Let this process go by what devices answered about limits, if the working folder has answers.

    Raises:
        ShardmillError: the file can't be read.
    """
    if Path(LIMITS).exists():
        from shardmill.evidence.limits import heed_answers

        heed_answers(Path(LIMITS))
