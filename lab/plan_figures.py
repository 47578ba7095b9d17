"""Builds configs, and compares what `shardmill plan` says that a build takes with what it took.

    python lab/plan_figures.py configs/demo.yaml [configs/NAME.yaml ...] [--scratch FOLDER]

Each is built in an empty folder, with the calibration and whatever earlier builds have taught this machine. Disk counts
each file once, however many names it has, and nothing of the checkpoint. Memory is that of the job that needs most: the
peak of its process, which its log has; or of its process as a whole, and of those that it started what they alone have,
looked at five times a second, where that is more. Time is by the
clock, and says more of the machine's other work than of the plan if there is any. Exit code 1 if disk is off by over 5
in 100, memory is less than was taken or over 1.5 times as much, or time is off by over a factor of two.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
LINKED = ("configs", "resources")
EVERY = 0.2  # seconds
DISK, MEMORY, TIME = 1.05, 1.5, 2.0  # how far off figures may be


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", type=Path, nargs="+")
    parser.add_argument("--scratch", type=Path, help="where to build; on the checkpoint's disk no weight is copied")
    args = parser.parse_args()
    right = [compare(file.resolve(), args.scratch) for file in args.configs]
    sys.exit(not all(right))


def compare(file: Path, scratch: Path | None) -> bool:
    """Print what was planned and what was taken; return whether the plan was right."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        for shared in LINKED:
            (folder / shared).symlink_to(ROOT / shared)
        here = file.parent if not file.is_relative_to(ROOT) else ROOT
        for entry in here.iterdir():  # paths in a config are relative to the folder that one builds in
            if not (folder / entry.name).exists() and entry.name not in ("build", ".snakemake"):
                (folder / entry.name).symlink_to(entry)
        planned = plan(folder, file)
        took = build(folder, file)
    rows = (
        ("disk, MB", planned["build"] / 1e6, took["disk"] / 1e6, 1 / DISK, DISK),
        ("memory, MB", planned["memory"], took["memory"] / 1e6, 1.0, MEMORY),
        ("time, s", planned["seconds"], took["seconds"], 1 / TIME, TIME),
    )
    print(f"{file.stem}: {planned['others']:.1f} processes beside it before, {took['beside']:.1f} after")
    for what, said, taken, least, most in rows:
        fits = least <= said / taken <= most
        print(f"  {what:11} planned {said:9.1f}  took {taken:9.1f}  {said / taken:5.2f}  {'' if fits else 'WRONG'}")
    return all(least <= said / taken <= most for _, said, taken, least, most in rows)


def plan(folder: Path, file: Path) -> dict[str, Any]:
    """Return the costs that the plan names."""
    command = [sys.executable, "-c", "from shardmill.cli import main; main()", "plan", str(file), "--json"]
    said = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout
    costs: dict[str, Any] = json.loads(said)["costs"]
    return costs


def build(folder: Path, file: Path) -> dict[str, float]:
    """Build all, and return bytes of disk, bytes of memory of the largest job, and seconds."""
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "--workflow-profile"]
    command += [str(ROOT / "profiles/default"), "--cores", "4", "all", "--configfile", str(file)]
    begun = time.monotonic()
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
        watch = Watch(process.pid)
        code = process.wait()
        seconds = time.monotonic() - begun
        watch.over.set()
    if code:
        sys.exit((folder / "said").read_text()[-2000:])
    sizes = {(stat.st_dev, stat.st_ino): stat.st_size for stat in map(os.lstat, files(folder / "build"))}
    logs = "".join(log.read_text() for log in folder.glob("build/*/logs/*"))
    peaks = [int(mb) * 1e6 for mb in re.findall(r"peak memory (\d+) MB", logs)]
    beside = os.getloadavg()[0]
    return {"disk": sum(sizes.values()), "memory": max(watch.most, *peaks), "seconds": seconds, "beside": beside}


def files(build: Path) -> list[Path]:
    """Return the files of builds and store, without the files of checkpoints."""
    paths = (Path(folder) / name for folder, _, names in os.walk(build) for name in names)
    return [file for file in paths if "source" not in file.relative_to(build).parts[1:2]]


class Watch(threading.Thread):
    """Looks at the memory of a run's jobs."""

    def __init__(self, run: int) -> None:
        super().__init__(daemon=True)
        self.run_process, self.most, self.over = psutil.Process(run), 0.0, threading.Event()
        self.start()

    def run(self) -> None:
        """Look until it is over."""
        while not self.over.wait(EVERY):
            with suppress(psutil.Error):
                for job in self.jobs():
                    with suppress(psutil.Error):
                        beneath = sum(child.memory_full_info().uss for child in job.children(recursive=True))
                        self.most = max(self.most, job.memory_info().rss + beneath)

    def jobs(self) -> list[psutil.Process]:
        """Return the processes that do a job: of a script, or a fork of the server that has the libraries."""
        processes = []
        for child in self.run_process.children():
            words = " ".join(child.cmdline())
            processes += child.children() if "fork_server" in words else [child]
        return processes


if __name__ == "__main__":
    main()
