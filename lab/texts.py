"""Texts of code and prose for lab/precision-measured.md, from the standard library of the Python that runs this.

    python lab/texts.py calibration wikitext-2/valid.txt > mixed.txt
    python lab/texts.py held > code.txt

`calibration` takes pieces of some modules and of a text of prose in turn; `held` is other modules, which nothing was
calibrated or searched with. Other versions of Python have other texts.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

CALIBRATION = (
    "argparse", "difflib", "fractions", "inspect", "statistics", "textwrap", "tarfile", "zipfile", "turtle", "typing",
)  # fmt: skip
HELD = ("heapq", "queue", "sched", "shlex", "csv", "calendar", "copy")
PIECE = 1500  # characters, and up to the end of a line


def code(names: tuple[str, ...]) -> str:
    """Return the source of modules of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [library / f"{name}.py" for name in names]
    return "".join((file if file.is_file() else file.with_suffix("") / "__init__.py").read_text() for file in files)


def pieces(text: str) -> Iterator[str]:
    """Yield whole lines, PIECE characters or a little more at a time."""
    piece = ""
    for line in text.splitlines(keepends=True):
        piece += line
        if len(piece) >= PIECE:
            yield piece
            piece = ""


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["calibration", "held"])
    parser.add_argument("prose", type=Path, nargs="?", help="for the calibration")
    args = parser.parse_args()
    if args.what == "held":
        sys.stdout.write(code(HELD))
    elif args.prose is None:
        parser.error("calibration: name a text of prose")
    else:
        both = zip(pieces(code(CALIBRATION)), pieces(args.prose.read_text(encoding="utf-8")), strict=False)
        sys.stdout.write("".join(first + second for first, second in both))


if __name__ == "__main__":
    main()
