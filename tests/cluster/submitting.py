"""Projects whose builds go through the test's Slurm, and the same builds without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.project import Project

from .slurm import Cluster

OPTIONS = {  # of a cluster without accounts and accounting, whose nodes share this machine's disk
    "--slurm-no-account": "",
    "--slurm-status-command": "squeue",
    "--slurm-init-seconds-before-status-checks": "5",
    "--latency-wait": "5",
}
MADE_BY_SNAKEMAKE = (".snakemake_timestamp",)


class Submitting(Project):
    """A project folder in which snakemake sends its jobs to a cluster."""

    def __init__(self, folder: Path, cluster: Cluster, *options: str) -> None:
        super().__init__(folder)
        self.cluster, self.options = cluster, options

    def command(self, *targets: str) -> list[str]:
        given = [word for option in OPTIONS.items() for word in option if word]
        return [sys.executable, "-m", "snakemake", *targets, "--configfile", "tiny.yaml", *given, *self.options]

    def environment(self) -> dict[str, str]:
        return super().environment() | {name: self.cluster.environment[name] for name in ("SLURM_CONF", "PATH")}

    def begin(self, *targets: str) -> subprocess.Popen[bytes]:
        """Snakemake in the background; what it says is in `said`."""
        with (self.folder / "said").open("wb") as stream:
            return subprocess.Popen(
                self.command(*targets),
                cwd=self.folder,
                env=self.environment(),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def said(self) -> str:
        return (self.folder / "said").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but logs and what is Snakemake's own."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name not in MADE_BY_SNAKEMAKE and "logs" not in file.relative_to(folder).parts
    }


def killed(process: subprocess.Popen[bytes]) -> None:
    """Ends a run of Snakemake, and nothing of what it sent away, with SIGKILL."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
