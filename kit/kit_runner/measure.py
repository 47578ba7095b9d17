"""Measures the programs of this kit on this machine: .venv/bin/python measure.py. `--help` lists the options."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 (Apple's python3 is 3.9, and no older one can read what is imported)
        python = f"{sys.executable} is Python {sys.version.split()[0]}"
        sys.exit(f"measure.py: {python}, and 3.10 to 3.13 is needed; README.txt says where to get it")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from kit_runner.main import main

    sys.exit(main(Path(__file__).resolve()))
