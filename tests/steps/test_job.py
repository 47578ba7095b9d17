"""A step as a job: what it is given, what a person reads, and where the rest goes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.errors import GateError
from shardmill.steps.job import as_paths, one_line

SCRIPT = """
import json, logging, sys
from pathlib import Path
from types import SimpleNamespace
from shardmill.errors import GateError
from shardmill.steps.job import execute

def step(part, packages, receipt, store):
    logging.getLogger("shardmill.steps").info("half way")
    print("chatter of a library")
    Path("given.json").write_text(json.dumps([str(part), [str(p) for p in packages], str(receipt), store]))
    assert isinstance(part, Path) and all(isinstance(p, Path) for p in packages)
    {body}

class Wildcards(list):
    model = "tiny"

job = SimpleNamespace(
    input={{"part": "a.json", "packages": ["b", "c"]}},
    output={{"receipt": "d.json"}},
    params={{"store": "build/.store", "tools": "abc"}},
    log=["logs/step.log"], rule="convert", wildcards=Wildcards(["head_0"]), threads=1,
)
execute(step, job)
"""


def run(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT.format(body=body)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_step_gets_paths_and_parameters_and_says_what_it_does(tmp_path: Path) -> None:
    done = run(tmp_path, "pass")
    assert done.returncode == 0
    assert json.loads((tmp_path / "given.json").read_text()) == ["a.json", ["b", "c"], "d.json", "build/.store"]
    assert (done.stdout, done.stderr) == ("", "shardmill convert head_0: half way\n")
    assert "chatter of a library" in (tmp_path / "logs/step.log").read_text()


def test_a_failure_is_one_line_and_the_log_has_the_traceback(tmp_path: Path) -> None:
    done = run(tmp_path, 'raise GateError("parity head_0: kl is 1, must be <= 0.02")')
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["shardmill convert head_0: parity head_0: kl is 1, must be <= 0.02"]
    log = (tmp_path / "logs/step.log").read_text()
    assert "Traceback" in log
    assert "GateError" in log


def test_errors_become_one_line() -> None:
    log = Path("logs/a.log")
    assert one_line(GateError("the number"), log) == "the number"
    full = OSError(errno.ENOSPC, "No space left on device", "build/x")
    assert one_line(full, log) == "build/x: the disk is full; free some space and run the same command again"
    assert one_line(ValueError("first\nsecond"), log) == "unexpected ValueError: first (traceback in logs/a.log)"
    assert one_line(KeyError(), log) == "unexpected KeyError: KeyError (traceback in logs/a.log)"


@pytest.mark.parametrize(("value", "expected"), [("a", Path("a")), (["a", "b"], [Path("a"), Path("b")]), ([], [])])
def test_names_become_paths(value: str | list[str], expected: object) -> None:
    assert as_paths(value) == expected
