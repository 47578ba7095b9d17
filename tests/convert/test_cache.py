"""Programs are made once, whoever asks for them and however many at a time, and are whole or made again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from shardmill.convert.cache import cached

KIND = {"kind": "layers", "tokens": 4}
PROGRAM = b"one\x00"


def never() -> bytes:
    raise AssertionError("this program is kept")


def test_a_program_is_made_once_for_each_kind(tmp_path: Path) -> None:
    assert cached(tmp_path, KIND, lambda: PROGRAM) == PROGRAM
    assert cached(tmp_path, dict(reversed(KIND.items())), never) == PROGRAM
    assert cached(tmp_path, KIND | {"tokens": 1}, lambda: b"other") == b"other"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace("b25lAA==", "b25lAQ=="),
        lambda text: json.dumps(json.loads(text) | {"sha256": "0" * 64}),
    ],
    ids=["cut short", "empty", "something else", "another program", "another sha256"],
)
def test_a_damaged_program_is_made_again(damage: object, tmp_path: Path) -> None:
    cached(tmp_path, KIND, lambda: PROGRAM)
    (file,) = tmp_path.rglob("*.json")
    whole = file.read_text()
    file.write_text(damage(whole))  # type: ignore[operator]
    assert file.read_text() != whole
    made: list[int] = []
    assert cached(tmp_path, KIND, lambda: made.append(1) or PROGRAM) == PROGRAM  # type: ignore[func-returns-value]
    assert (made, file.read_text()) == ([1], whole)


AT_ONCE = """
import fcntl, sys
from pathlib import Path
from shardmill.convert.cache import cached
folder, name, lock = Path(sys.argv[1]), sys.argv[2], fcntl.flock
def locking(*given):
    print("at the lock", flush=True)
    lock(*given)
def make():
    (folder / f"made by {name}").touch()
    print("making", flush=True)
    sys.stdin.readline()
    return name.encode()
fcntl.flock = locking
print(cached(folder / "cache", {"kind": 1}, make), flush=True)
"""  # whoever makes it waits for a line


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A process that asks for a program, once it is at the lock."""
    command = [sys.executable, "-c", AT_ONCE, str(folder), name]
    process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"at the lock\n"
    return process


@pytest.mark.thorough
def test_of_several_processes_one_makes_and_the_others_wait(tmp_path: Path) -> None:
    processes = [start(tmp_path, str(i)) for i in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"\n")
    said = [process.communicate(timeout=PATIENCE)[0].splitlines() for process in processes]
    assert sorted(map(len, said)) == [1, 1, 2] and len({lines[-1] for lines in said}) == 1, said
    assert len(list(tmp_path.glob("made by *"))) == 1


@pytest.mark.thorough
def test_whoever_waits_for_a_killed_process_makes_it(tmp_path: Path) -> None:
    with start(tmp_path, "killed") as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline() == b"making\n"
        with start(tmp_path, "waiting") as waiting:
            killed.send_signal(signal.SIGKILL)
            output, _ = waiting.communicate(b"\n", timeout=PATIENCE)
    assert output == b"making\nb'waiting'\n"
