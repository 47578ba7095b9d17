"""One build at a time; what was killed holds nothing; a killed build's jobs do until they end."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import pytest
from patience import wait_until

from shardmill.errors import ShardmillError
from shardmill.pipeline import snakefile
from shardmill.pipeline.cache import lock

HELD = """
import signal, sys
from shardmill.pipeline.cache import lock
getattr(lock, sys.argv[1])(sys.argv[2])
print("held", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> list[TextIO]:
    """What a test locks, it lets go at its end, or when it clears this list; its mark is gone, too."""
    files: list[TextIO] = []
    monkeypatch.setattr(lock, "_held", files)
    monkeypatch.setenv(lock.RUN, "")
    return files


@contextmanager
def another(what: str, build: Path) -> Iterator[None]:
    """Another process that holds a lock until it is killed."""
    with subprocess.Popen([sys.executable, "-c", HELD, what, str(build)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


def wait_for_the_lock(build: Path) -> None:
    def held() -> bool:
        try:
            lock.hold_lock(str(build))
        except ShardmillError:
            return False
        return True

    wait_until(held, "the lock outlived its process")  # the kernel lets go as it buries a process


def test_one_build_at_a_time_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    build = tmp_path / "build"
    with another("hold_lock", build), pytest.raises(ShardmillError, match="build: another build is running there"):
        lock.hold_lock(str(build))
    wait_for_the_lock(build)


def test_a_build_waits_for_the_jobs_of_a_killed_one(tmp_path: Path) -> None:
    """SIGKILL ends a build, not its jobs: two of one step would write the same files."""
    running = pytest.raises(ShardmillError, match="jobs of a build that was killed are still running there")
    with another("join_build", tmp_path), another("join_build", tmp_path), running:
        lock.hold_lock(str(tmp_path))
    wait_for_the_lock(tmp_path)


def test_jobs_join_a_build_that_runs(tmp_path: Path) -> None:
    lock.hold_lock(str(tmp_path))
    with another("join_build", tmp_path):
        lock.join_build(str(tmp_path))


def test_a_job_that_waited_while_another_build_was_begun_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: list[TextIO]
) -> None:
    """It held no lock, so nobody waited for it. What it would remove and make is the other build's by now."""
    lock.hold_lock(str(tmp_path))
    mark = os.environ[lock.RUN]
    lock.join_build(str(tmp_path))
    held.clear()
    wait_for_the_lock(tmp_path)
    assert os.environ[lock.RUN] != mark
    lock.join_build(str(tmp_path))
    held.clear()
    monkeypatch.setenv(lock.RUN, mark)
    with pytest.raises(ShardmillError, match="this job is of a build that was killed, and another was begun since"):
        lock.join_build(str(tmp_path))
    held.clear()
    lock.hold_lock(str(tmp_path))  # it holds nothing


def test_a_job_without_a_mark_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that hands on no environment must not fail for that."""
    lock.hold_lock(str(tmp_path))
    monkeypatch.delenv(lock.RUN)
    lock.join_build(str(tmp_path))


def test_only_a_snakemake_that_does_a_job_joins_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock.hold_lock(str(tmp_path))
    monkeypatch.setenv(lock.RUN, "another")
    snakefile.only_its_jobs(str(tmp_path), SimpleNamespace(is_main_process=True))
    with pytest.raises(SystemExit, match="^shardmill: .*: this job is of a build that was killed"):
        snakefile.only_its_jobs(str(tmp_path), SimpleNamespace(is_main_process=False))


def test_locks_are_taken_as_nfs_grants_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux turns flock into byte-range locks there: EBADF for a mode that the file is not open in."""
    real, asked = fcntl.flock, set[int]()

    def flock(file: TextIO, kind: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        needed = {fcntl.LOCK_SH: os.O_RDONLY, fcntl.LOCK_EX: os.O_WRONLY}[kind & ~fcntl.LOCK_NB]
        if mode not in (needed, os.O_RDWR):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        asked.add(needed)
        real(file, kind)

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    lock.hold_lock(str(tmp_path))
    lock.join_build(str(tmp_path))
    assert asked == {os.O_RDONLY, os.O_WRONLY}


@pytest.mark.parametrize("take", [lock.hold_lock, lock.join_build])
def test_a_file_system_without_locks_is_named(
    take: Callable[[str], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre answers so unless it is mounted with -o flock."""

    def flock(file: TextIO, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(lock.fcntl, "flock", flock)
    with pytest.raises(ShardmillError, match=r"lock: its file system has no locks .* \(Lustre: -o flock\)"):
        take(str(tmp_path))


def test_what_is_no_file_locks_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".lock")
    with pytest.raises(ShardmillError, match=r"\.lock: not a regular file, so nothing can be locked by it; remove it"):
        lock.hold_lock(str(tmp_path))
