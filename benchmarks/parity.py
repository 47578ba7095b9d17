"""The gates of a built model against transformers, run again by the pipeline: wall time and peak memory.

    snakemake --cores 4 all --configfile configs/phi-4-mini-synthetic.yaml
    python benchmarks/parity.py configs/phi-4-mini-synthetic.yaml --scratch FOLDER --mem-mb 6000

Snakemake runs the reference, parity of every part and of the stack as it does in a build, in a folder of its own whose
packages and programs are links to the build's, and with an empty store. Memory is sampled: of a step what its process
holds resident, mapped weights included; of all together each page once, however many processes map it (Linux).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from shardmill import config
from shardmill.machine import machine

ROOT = Path(__file__).parent.parent
GATES = ("reference.", "parity", "benchmark", "model.json", "provenance.json", "report.html", "logs")
INTERVAL = 0.25  # seconds between samples
MB = 1_000_000


@dataclass
class Step:
    """One job, by its log's name."""

    name: str
    began: float
    ended: float
    peak_mb: float = 0.0


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configfile", type=Path)
    parser.add_argument("--scratch", type=Path, help="where to work; on the disk of the build, which is linked there")
    parser.add_argument("--project", type=Path, default=ROOT, help="folder that holds build/ (default: this clone)")
    parser.add_argument("--cores", type=int, default=4)
    parser.add_argument("--mem-mb", type=int, default=6000)
    parser.add_argument("--json", type=Path, help="write the figures there")
    args = parser.parse_args()
    chosen = config.load(args.configfile.resolve(), ROOT)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        link_project(Path(folder), args.project / "build" / chosen.model)
        figures = measure(Path(folder), chosen, args.configfile.resolve(), args.cores, args.mem_mb)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def link_project(folder: Path, build: Path) -> None:
    """Copy the project to `folder`, without the gates' results and what follows from them."""
    for entry in ROOT.iterdir():
        if entry.name not in ("build", ".snakemake"):
            (folder / entry.name).symlink_to(entry)
    for file in sorted(build.rglob("*")):
        place = file.relative_to(build)
        if file.is_file() and not place.parts[0].startswith(GATES):
            target = folder / "build" / build.name / place
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(file.resolve(), target)


def measure(folder: Path, chosen: config.Config, configfile: Path, cores: int, mem_mb: int) -> dict[str, Any]:
    """Run the gates under Snakemake; figures of every step and of all together."""
    targets = [f"build/{chosen.model}/parity/{name}.json" for name in (*chosen.parts, "stack")]
    words = ["snakemake", "--snakefile", ROOT / "Snakefile", "--directory", folder, "--configfile", configfile]
    words += ["--cores", cores, "--resources", f"mem_mb={mem_mb}", "--rerun-triggers", "mtime", "--", *targets]
    began = time.perf_counter()
    process = subprocess.Popen(list(map(str, words)), cwd=ROOT, stderr=subprocess.PIPE, text=True)
    watch = Watch(process.pid)
    _, messages = process.communicate()
    watch.stop()
    if process.returncode:
        sys.exit(f"the gates failed:\n{messages[-3000:]}")
    steps = sorted(watch.steps.values(), key=lambda step: step.began)
    return {
        "machine": machine(),
        "load": os.getloadavg()[0],
        "seconds": time.perf_counter() - began,
        "peak_mb": watch.peak_mb,
        "steps": [{"name": s.name, "seconds": s.ended - s.began, "peak_mb": s.peak_mb} for s in steps],
    }


class Watch:
    """Samples the processes below one until it is told to stop."""

    def __init__(self, pid: int) -> None:
        self.root = psutil.Process(pid)
        self.steps: dict[int, Step] = {}
        self.peak_mb = 0.0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def stop(self) -> None:
        """Take the last sample."""
        self.done.set()
        self.thread.join()

    def run(self) -> None:
        """Take samples."""
        while not self.done.wait(INTERVAL):
            try:
                below = self.root.children(recursive=True)
            except psutil.NoSuchProcess:
                return
            self.peak_mb = max(self.peak_mb, sum(self.sample(process) for process in (self.root, *below)))

    def sample(self, process: psutil.Process) -> float:
        """Return MB of one process, its share of what others hold too."""
        try:
            memory = process.memory_full_info()
            if process.pid not in self.steps and (name := step_name(process)):
                self.steps[process.pid] = Step(name, process.create_time(), 0.0)
        except psutil.Error:  # it has ended
            return 0.0
        if process.pid in self.steps:
            step = self.steps[process.pid]
            step.ended, step.peak_mb = time.time(), max(step.peak_mb, memory.rss / MB)
        return float(getattr(memory, "pss", memory.rss)) / MB


def step_name(process: psutil.Process) -> str | None:
    """Return the log that a job's process writes to tells which it is."""
    logs = [Path(file.path) for file in process.open_files() if Path(file.path).parent.name == "logs"]
    return logs[0].stem if logs else None


def show(figures: dict[str, Any]) -> None:
    """Print the figures as a table."""
    console = Console()
    console.print(
        " ".join(f"{key}={value}" for key, value in figures["machine"].items()), f"load={figures['load']:.1f}"
    )
    table = Table("step", "s", "peak MB")
    for step in figures["steps"]:
        table.add_row(step["name"], f"{step['seconds']:.1f}", f"{step['peak_mb']:.0f}")
    table.add_row("all", f"{figures['seconds']:.1f}", f"{figures['peak_mb']:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
