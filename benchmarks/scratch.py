"""A build in a folder of its own, up to the verdicts of some gates."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def gate_rows(home: Path, settings: Mapping[str, Any], verdicts: Sequence[str]) -> list[dict[str, Any]]:
    """Return what gates measured, whether or not they passed. Ends the process where one measured nothing.

    Args:
        home: the folder; it holds what the settings name.
        settings: the config.
        verdicts: under the build, without their suffix.
    """
    (home / "config.json").write_text(json.dumps(settings))
    if not (home / "resources").exists():
        (home / "resources").symlink_to(ROOT / "resources")
    build = Path("build") / settings["model"]
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--directory", str(home)]
    targets = [str(build / f"{name}.json") for name in verdicts]
    done = subprocess.run(
        [*command, *targets, "--cores", "2", "--keep-going", "--configfile", str(home / "config.json")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    rows: list[dict[str, Any]] = []
    for name in verdicts:
        found = (home / build / f"{name}{suffix}.json" for suffix in ("", ".failed"))
        file = next((file for file in found if file.is_file()), None)
        if file is None:
            sys.exit(f"{settings['model']}: {done.stdout[-3000:]}")
        rows += json.loads(file.read_text())["gate"]
    return rows
