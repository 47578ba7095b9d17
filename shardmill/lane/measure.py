"""Measures the programs of this kit on this machine: python3 measure.py. `--help` lists the options."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from shardmill.lane.main import main

    sys.exit(main(Path(__file__).resolve()))
