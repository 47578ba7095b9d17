"""A child is watched to its end, and one that does not end costs nothing that it has measured."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from shardmill.lane import watch

CHILD = """
import json, os, signal, sys

pipe, task = int(sys.argv[2]), json.load(sys.stdin)
record = {"status": "ok", "value": {"pid": os.getpid()}, "timing": {}, "detail": ""}
for key, following in (("a", "b"), ("b", "")):
    for message in ({"begin": key}, {"key": key, **record, "next": following}):
        os.write(pipe, (json.dumps(message) + "\\n").encode())
signal.pause()
"""


def test_a_child_that_does_not_end_is_ended_and_no_measurement_of_its(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where an engine hangs while it is taken down; it had all the time of one more measurement for that."""
    monkeypatch.setattr(watch, "ENDING", 0.1)
    (tmp_path / "measure.py").write_text(CHILD)
    begun: list[str] = []
    start = time.monotonic()
    watched = watch.watched(
        watch.Watch(tmp_path / "measure.py", tmp_path / "log.txt", limit=60.0), {"keys": ["a", "b"]}, begun.append
    )
    records = list(watched)
    assert [(record["key"], record["status"]) for record in records] == [("a", "ok"), ("b", "ok")]
    assert begun == ["a", "b"] and time.monotonic() - start < 60
    assert not psutil.pid_exists(records[0]["value"]["pid"])


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
    (tmp_path / "log.txt").write_text(f"of another child\n{printed}")
    assert watch._tail(tmp_path / "log.txt", len("of another child\n")) == tail
