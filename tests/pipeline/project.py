"""A project folder of its own with a tiny model, in which the real Snakemake runs on a copy of the library."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import templates
import tiny
import yaml
from patience import BUILDING
from processes import succeeded

from shardmill.pipeline.cache.store import TEMPLATES

ROOT = Path(__file__).parents[2]
PACKAGES = tuple(ROOT / name for name in ("decoding", "kit", "portable"))  # the folders of those beside shardmill
COPIED = ("Snakefile", "rules", "scripts", "profiles", "envs", "report", "configs", "shardmill", "constraints.txt")
TARGETS = ("build/tiny/model.json", "build/tiny/provenance.json")
CONFIG = tiny.settings(
    "checkpoint",
    topology=[[0, 1], [1, 2]],
    head={"slices": 1},
    parity={"text": "text.txt", "positions": 16, "perplexity_positions": 48},
    benchmark={"text": "text.txt", "prompt_tokens": [8], "tasks": [], "new_tokens": 8, "repetitions": 1},
)


def steps_that(did: str, output: str) -> set[str]:
    """The steps of which a job "worked" in a verbose run, or left something "unchanged"."""
    return set(re.findall(rf"^shardmill (\w+).*: {did}\b", output, re.MULTILINE))


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH with folders put first. The rest stays, since it makes the simulated Mac."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def share_templates(root: Path) -> None:
    """Lets the store of a folder's builds keep its templates where all tests do."""
    store = root / "build/.store"
    store.mkdir(parents=True, exist_ok=True)
    if not (store / TEMPLATES).exists():
        (store / TEMPLATES).symlink_to(templates.FOLDER)


class Project:
    """A folder in which snakemake builds the model `tiny`."""

    def __init__(self, folder: Path, hash_seed: int = 0) -> None:
        self.folder, self.build, self.hash_seed = folder, folder / "build" / "tiny", hash_seed

    def create(self, checkpoint: Path) -> Project:
        self.folder.mkdir(parents=True)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
            copy(ROOT / name, self.folder / name)
        shutil.copytree(checkpoint, self.folder / "checkpoint")
        (self.folder / "text.txt").write_text(tiny.sample_text(), encoding="utf-8")
        share_templates(self.folder)
        self.configure()
        return self

    def configure(self, **changes: object) -> None:
        (self.folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG | changes))

    def take_demo(self) -> None:
        """From now on it builds the demo, under the name of `tiny`."""
        shutil.copytree(ROOT / "resources", self.folder / "resources")
        demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())
        (self.folder / "tiny.yaml").write_text(yaml.safe_dump(demo | {"model": "tiny"}))

    def content(self) -> dict[str, Any]:
        """Of its config."""
        found: dict[str, Any] = yaml.safe_load((self.folder / "tiny.yaml").read_text())
        return found

    def command(self, *targets: str) -> list[str]:
        return [sys.executable, "-m", "snakemake", "--cores", "2", *(targets or TARGETS), "--configfile", "tiny.yaml"]

    def environment(self) -> dict[str, str]:
        code = python_path(self.folder, *PACKAGES)
        own = {"PYTHONPATH": code, "PYTHONHASHSEED": str(self.hash_seed), "OMP_NUM_THREADS": "1"}
        return os.environ | own | {"XDG_CACHE_HOME": str(self.folder / ".cache")}

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        """Snakemake as the leader of a process group."""
        with log.open("wb") as stream:
            return subprocess.Popen(
                self.command(),
                cwd=self.folder,
                env=self.environment(),
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def run(self, *targets: str, under: Sequence[str] = (), verbose: bool = False) -> subprocess.CompletedProcess[str]:
        """To its end, whatever that is; everything it says is in `stdout`.

        Args: under a command that starts it; verbose, so that jobs and Snakemake say what they do themselves.
        """
        return subprocess.run(
            [*under, *self.command(*targets), *(["--verbose"] if verbose else [])],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=BUILDING,
        )

    def why(self) -> str:
        """What `shardmill why` says."""
        command = [sys.executable, "-c", "from shardmill.cli import main; main()", "why", "build/tiny"]
        return subprocess.run(
            [*command, "--configfile", "tiny.yaml"],
            cwd=self.folder,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    def finish(self, verbose: bool = False) -> str:
        """Runs to success and returns what was said."""
        done = self.run(verbose=verbose)
        succeeded(done)
        return done.stdout

    def kill_when(self, reached: Callable[[Path], bool]) -> None:
        """Starts a build and kills all of it with SIGKILL as soon as `reached` holds of build/tiny."""
        log = self.folder / "killed.log"
        process = self.start(log)
        while not reached(self.build):
            assert process.poll() is None, log.read_text()
            time.sleep(0.01)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        os.killpg(process.pid, signal.SIGKILL)
        for member in family:  # what had left the process group
            if member.is_running() and member.status() != psutil.STATUS_ZOMBIE:
                member.kill()
        assert process.wait() == -signal.SIGKILL

    def records(self) -> dict[str, bytes]:
        """Every receipt, model.json and provenance.json."""
        files = [*self.build.rglob("*.receipt.json"), *(self.folder / target for target in TARGETS)]
        return {file.relative_to(self.build).as_posix(): file.read_bytes() for file in files}

    def replace(self, file: str, old: str, new: str) -> None:
        """Edits the library or the workflow."""
        path = self.folder / file
        text = path.read_text()
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new))
