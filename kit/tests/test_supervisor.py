"""A child is watched to its end, and one that does not end costs nothing that it has measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from kit_runner import supervisor

PATIENCE = 600.0  # seconds; it ends what hangs, and no machine is so busy that it ends anything else
CHILD = """
import json, os, signal, sys

pipe, task = int(sys.argv[2]), json.load(sys.stdin)
record = {"status": "ok", "value": {"pid": os.getpid()}, "timing": {}, "detail": ""}
for key, following in (("a", "b"), ("b", "")):
    for message in ({"begin": key}, {"key": key, **record, "next": following}):
        os.write(pipe, (json.dumps(message) + "\\n").encode())
signal.pause()
"""


DYING = """
import sys

print(sys.stdin.read() and {printed!r}, end="")
sys.exit(1)
"""


def test_a_child_that_does_not_end_is_ended_and_no_measurement_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine hangs while it is taken down; it had all the time of one more measurement for that."""
    monkeypatch.setattr(supervisor, "ENDING", 0.1)
    begun: list[str] = []
    records = list(supervised(tmp_path, CHILD, begun))
    assert [(record["key"], record["status"]) for record in records] == [("a", "ok"), ("b", "ok")]
    assert begun == ["a", "b"]
    assert not psutil.pid_exists(records[0]["value"]["pid"])


def test_a_measurement_that_does_not_end_is_ended(tmp_path: Path) -> None:
    (record,) = supervised(tmp_path, "import signal; signal.pause()", [], limit=0.1)
    assert (record["key"], record["status"]) == ("a", "timeout")
    assert record["detail"] == "no end of start of the process within 0.1 s"


def supervised(folder: Path, child: str, begun: list[str], limit: float = PATIENCE) -> Iterator[dict[str, Any]]:
    (folder / "measure.py").write_text(child)
    task = {"keys": ["a", "b"]}
    return supervisor.supervise(folder / "measure.py", task, folder / "log.txt", limit, begun.append)


@pytest.mark.parametrize(
    ("printed", "tail"),
    [
        ("", ""),
        ("one\ntwo\n", ": two"),
        (
            'Traceback\nRuntimeError: {\n    NSLocalizedDescription = "no room";\n    b =     {\n    };\n}\n',
            ": RuntimeError: no room",
        ),
        ("a }\nb }\n", ": b }"),
    ],
)
def test_a_child_that_died_has_its_last_words_told(printed: str, tail: str, tmp_path: Path) -> None:
    """What Core ML raises where nothing catches it ends in a line with a brace."""
    (tmp_path / "log.txt").write_text("of another child\n")
    (record,) = supervised(tmp_path, DYING.format(printed=printed), [])
    assert (record["key"], record["status"]) == ("a", "crashed")
    assert record["detail"] == f"ended with exit code 1 in start of the process{tail}"
