"""measure.py beside files and options that are not what they should be: one line, and nothing measured is lost."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from kit_runner import child
from kit_runner.job import MeasurementJob

from .measuring import HERE, command, environment, measured

pytestmark = pytest.mark.slow


def run(kit: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(kit, *options), check=False, env=environment(kit, HERE / "fake"), capture_output=True, text=True
    )


def refused(kit: Path, *options: str) -> str:
    """What it says, in one line."""
    done = run(kit, *options)
    assert done.returncode == 1 and done.stderr.startswith("measure.py: ") and done.stderr.count("\n") == 1, done
    return done.stderr


@pytest.mark.parametrize("damage", [b"x", b'{"key": 7}\n', b"null\n", b'{"key": "a", "value": NaN}\n', b"{}\n"])
def test_a_damaged_line_is_measured_again_and_no_other(measured_kit: Path, damage: bytes) -> None:
    file = measured_kit / "results.jsonl"
    before = file.read_bytes().splitlines(keepends=True)
    line = damage + before[4] if damage == b"x" else damage
    file.write_bytes(b"".join([*before[:4], line, *before[5:]]))
    done = run(measured_kit)
    assert (
        done.returncode == 0 and "results.jsonl: damaged in line 5; what stood there is measured again" in done.stdout
    )
    after = file.read_bytes().splitlines(keepends=True)
    assert after[: len(before)] == [*before[:4], line, *before[5:]]
    again = [raw for raw in after[len(before) :] if b'"not_run"' not in raw]
    assert len(again) == 1 and before[4].split(b'"key": ')[1].split(b",")[0] in again[0]


@pytest.mark.parametrize("content", ["my notes\n", "\x00\x01\n", '{"kit": "another"}\n'])
def test_a_file_of_somebody_else_is_left_as_it_is(kit: Path, content: str) -> None:
    (kit / "results.jsonl").write_text(content)
    assert "is of another kit, engine or system; move it away and start again" in refused(kit)
    assert (kit / "results.jsonl").read_text() == content


def test_two_runs_do_not_share_a_file(kit: Path) -> None:
    """Each would measure its speeds beside the other's."""
    with (kit / "results.jsonl").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is writing to" in refused(kit)
    assert measured(kit, "--only", "compile")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_sudo_measured_is_the_user_s(kit: Path) -> None:
    """Who measures energy with sudo goes on without it."""
    measured(kit, "--only", "compile", SUDO_UID="12345", SUDO_GID="23456")
    for name in ("results.jsonl", "result.json", "work"):
        state = (kit / name).stat()
        assert (state.st_uid, state.st_gid) == (12345, 23456), name
    assert (kit / "kit.json").stat().st_uid == 0


@pytest.mark.parametrize("option", ["--passes=0", "--passes=x", "--timeout=0", "--timeout=nan", "--timeout=1e12"])
def test_options_that_make_no_sense_measure_nothing(kit: Path, option: str) -> None:
    done = run(kit, option)
    assert done.returncode == 2 and f"argument {option.partition('=')[0]}: " in done.stderr
    assert not (kit / "results.jsonl").exists()


@pytest.mark.parametrize("content", ['{"format": 1}', '{"format": 1, "files": {}, "variants": 3}', "[]", "[" * 100_000])
def test_a_kit_that_names_nothing_is_told(kit: Path, content: str) -> None:
    (kit / "kit.json").write_text(content)
    assert "kit.json" in refused(kit) and "unpack the kit again" in refused(kit)


def test_places_where_nothing_can_be_written_are_told(kit: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file: " in refused(kit, "--out", str(tmp_path / "file"))
    (kit / "results.jsonl").mkdir()
    assert "results.jsonl: Is a directory; name another folder with --out" in refused(kit)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        shutil.Error([("a", "b", f"[Errno 28] {os.strerror(errno.ENOSPC)}")]),
        RuntimeError(f"could not write: {os.strerror(errno.EDQUOT)}"),
    ],
)
def test_a_full_disk_is_no_refusal_of_core_ml(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not run is tried again by the next run; what was refused is not."""

    def fail(*_: Any) -> Any:
        raise error

    job = cast(MeasurementJob, SimpleNamespace(stage_name="compile", work=tmp_path / "later"))
    monkeypatch.setitem(child.MEASURES, "compile", fail)
    assert child.measure_one(job, "a/compile")["status"] == "not_run"
    error = RuntimeError("no")
    assert child.measure_one(job, "a/compile")["status"] == "refused"
