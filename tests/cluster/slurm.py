"""A Slurm of two nodes on this machine's loopback, up in seconds and gone without a trace.

Debian's slurmd is built to run several times on one host. Everything lies in one folder: configuration, munge's key and
socket, spools, logs; no file of the system is touched, and the ports are free ones. Jobs go to the node with the least
to do, so both get some, and one that is requeued waits for 5 seconds in place of 120 (`cred_expire`).

To try something by hand: `cd tests && python -m cluster.slurm FOLDER` raises it, says how to reach it, and takes it
down on Ctrl-C.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from .configuration import NODES, configuration

T = TypeVar("T")

DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "squeue", "scancel", "scontrol", "sinfo")
SECONDS = 30.0  # that raising it may take


def missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    programs = [program for program in (*DAEMONS, *CLIENTS) if _program(program) is None]
    if programs:
        return f"no {', '.join(programs)} here: apt-get install slurm-wlm munge"
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        return "no snakemake-executor-plugin-slurm here: pip install -c constraints.txt -e '.[slurm]'"
    return None


@dataclass(frozen=True)
class Job:
    """What Slurm says of one job.

    Attributes:
        number: its id.
        state: "RUNNING", "COMPLETED" and so on.
        node: where it runs; empty before.
        comment: the rules that the Slurm plugin submitted it for.
    """

    number: str
    state: str
    node: str
    comment: str


@dataclass(frozen=True)
class Cluster:
    """A Slurm that is up.

    Attributes:
        folder: where all of it lies.
        environment: by which its clients find it.
        daemons: the processes by name.
    """

    folder: Path
    environment: Mapping[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def ask(self, *command: str) -> str:
        """What one of Slurm's own commands prints."""
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def jobs(self) -> list[Job]:
        """Every job that there has been."""
        lines = self.ask("squeue", "--noheader", "--states=all", "--sort=i", "--format=%i|%T|%N|%k").splitlines()
        return [Job(*line.split("|", 3)) for line in lines]

    def one(self, states: str, of: str = "") -> Job | None:
        """The first job in one of `states` whose comment has `of` in it."""
        return next((job for job in self.jobs() if job.state in states.split() and of in job.comment), None)


@contextmanager
def raised(folder: Path) -> Iterator[Cluster]:
    """Inside, there is a cluster."""
    for name in ("state", "log", "munge", "bin", *(f"spool.{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    (folder / "slurm.conf").write_text(configuration(folder))
    environment = _environment(folder, folder / "slurm.conf")
    with ExitStack() as stack:
        cluster = Cluster(folder, environment)
        stack.callback(_take_down, cluster)
        _start(cluster, "munged", *_munged(folder / "munge"))
        waited_for((folder / "munge/socket").exists, "munged made no socket")
        _start(cluster, "slurmctld", _found("slurmctld"), "-D", "-f", str(folder / "slurm.conf"))
        for node in NODES:
            _start_node(cluster, node)
        waited_for(lambda: _idle(cluster) == len(NODES), f"the nodes did not come up; see {folder}/log")
        yield cluster


def _start_node(cluster: Cluster, node: str) -> None:
    """Starts a node's daemon."""
    _start(cluster, node, _found("slurmd"), "-D", "-N", node, "-f", str(cluster.folder / "slurm.conf"))


def kill_tasks(cluster: Cluster, job: Job) -> None:
    """Ends a job's own processes with SIGKILL, as a node that is out of memory would; Slurm sees them fail."""
    _kill([task for step in _steps(cluster, job.number, ".0]") for task in step.children(recursive=True)])


def waited_for(holds: Callable[[], T], otherwise: str | Callable[[], str], seconds: float = SECONDS) -> T:
    """What `holds()` returns once that is true; an AssertionError that says `otherwise` where it takes too long."""
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, otherwise if isinstance(otherwise, str) else otherwise()
        time.sleep(0.05)
    return found


def _environment(folder: Path, conf: Path) -> dict[str, str]:
    """A shell's variables with this cluster's.

    A job's Snakemake drops every SLURM_ variable before it calls srun, which would then look for /etc/slurm/slurm.conf.
    So the srun that is found first says where the configuration is.
    """
    srun = folder / "bin/srun"
    srun.write_text(f'#!/bin/sh\nSLURM_CONF={conf} exec {_found("srun")} "$@"\n')
    srun.chmod(0o755)
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return ours | {"SLURM_CONF": str(conf), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}:/usr/sbin"}


def _munged(folder: Path) -> list[str]:
    """The command that serves a key of this cluster's own."""
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    folder.chmod(0o755)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    return [_found("munged"), "--foreground", "--force", *options]


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


def _found(name: str) -> str:
    path = _program(name)
    assert path, name
    return path


def _start(cluster: Cluster, name: str, *command: str) -> None:
    goes_with_us = ["setpriv", "--pdeathsig", "KILL"]  # however this process ends
    with (cluster.folder / "log" / f"{name}.out").open("ab") as out:
        cluster.daemons[name] = subprocess.Popen(
            [*goes_with_us, *command],
            env=cluster.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


def _idle(cluster: Cluster) -> int:
    found = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=work", "--format=%t"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.split().count("idle")


def _take_down(cluster: Cluster) -> None:
    """Ends what runs, and the daemons, by their ids."""
    _kill(_steps(cluster))
    for daemon in cluster.daemons.values():
        daemon.terminate()
    for daemon in cluster.daemons.values():
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _steps(cluster: Cluster, job: str = "", ends: str = "]") -> list[psutil.Process]:
    """The processes by which this cluster's nodes hold a job, or all jobs: "slurmstepd: [7.batch]" and "[7.0]"."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            title = " ".join(process.cmdline()).strip()
            # psutil can't read the environment of a process whose title grew into it
            ours = f"SLURM_CONF={cluster.folder}/".encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
            if ours and title.startswith(f"slurmstepd: [{job}{'.' if job else ''}") and title.endswith(ends):
                found.append(process)
    return found


def _kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL for processes, and then for all that they started: nobody is left to report on those."""
    heads, started = list(processes), list[psutil.Process]()
    for process in heads:
        with suppress(psutil.NoSuchProcess):
            started += process.children(recursive=True)
    for process in (*heads, *started):
        with suppress(psutil.NoSuchProcess):
            process.kill()


if __name__ == "__main__":
    with raised(Path(sys.argv[1]).resolve()) as up:
        print(f"export SLURM_CONF={up.folder}/slurm.conf PATH={up.folder}/bin:$PATH", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
