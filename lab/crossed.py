"""Counts the files of the repository in which a command runs a function.

    python lab/crossed.py run OUT COMMAND...     # writes OUT: one line a process and file
    python lab/crossed.py count OUT [WORDS]      # of the processes whose command has all WORDS

Each Python process of the command is followed, forks and threads too. What runs only because a module is imported
(decorators, class bodies, tables) does not count. `--while FILE` counts only while FILE exists: who creates it after
the first token and removes it before the last counts what one token crosses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Python runs a file of this name in each process that finds it on its path.
HOOK = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r}); import crossed; crossed.follow()"


def follow() -> None:
    """Note each file of $CROSSED_ROOT in $CROSSED_OUT when a function of it first runs in this process."""
    root, out, while_ = os.environ["CROSSED_ROOT"] + os.sep, os.environ["CROSSED_OUT"], os.environ.get("CROSSED_WHILE")
    seen: set[tuple[int, str]] = set()
    command = " ".join(Path("/proc/self/cmdline").read_bytes().decode().split("\0"))[:300].replace("\n", " ")

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(root) and "/.venv/" not in code.co_filename
        if event != "call" or not ours or code.co_name == "<module>":
            return
        key = (os.getpid(), code.co_filename)
        if key in seen or (while_ and not os.path.exists(while_)) or _of_an_import(frame):
            return
        seen.add(key)
        with open(out, "a") as file:  # appended in one write: processes share the file
            file.write(f"{key[0]}\t{command}\t{code.co_filename.removeprefix(root)}\n")

    threading.setprofile(note)
    sys.setprofile(note)


def _of_an_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def run(root: Path, out: Path, while_: Path | None, command: list[str]) -> int:
    """Return the exit code of `command`, whose files are in `out` then."""
    out.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
        names = {"CROSSED_ROOT": str(root), "CROSSED_OUT": str(out.resolve()), "PYTHONPATH": path}
        if while_ is not None:
            names["CROSSED_WHILE"] = str(while_.resolve())
        return subprocess.run(command, check=False, env={**os.environ, **names}).returncode


def files(out: Path, words: list[str]) -> list[str]:
    """Return the distinct files of the processes whose command has all `words`."""
    rows = [line.split("\t") for line in out.read_text().splitlines()]
    return sorted({file for _, command, file in rows if all(word in command for word in words)})


def main() -> int:
    """Run a command, or count what it crossed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run")
    running.add_argument("--root", type=Path, default=ROOT, help="whose files count (another commit's clone)")
    running.add_argument("--while", dest="while_", type=Path)
    running.add_argument("out", type=Path)
    running.add_argument("command", nargs=argparse.REMAINDER)
    counting = actions.add_parser("count")
    counting.add_argument("out", type=Path)
    counting.add_argument("words", nargs="*")
    args = parser.parse_args()
    if args.action == "run":
        return run(args.root, args.out, args.while_, args.command)
    names = files(args.out, args.words)
    print(*names, f"{len(names)} file{'s' * (len(names) != 1)}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
