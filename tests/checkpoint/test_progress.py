"""A long download says how far it is, and stops saying so when it ends.

Only lines about this test's file are counted: a download that another test left behind still reports its own.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from patience import wait_until

from shardmill.checkpoint.hub import reporting


def test_it_reports_what_the_file_holds_and_then_falls_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The lines name the file, what is there and what there will be."""
    caplog.set_level(logging.INFO)
    name, partial = "long.safetensors", tmp_path / "partial"
    with reporting(name, partial, 4_000_000_000, seconds=0.01):
        partial.write_bytes(bytes(20_000_000))
        wait_until(lambda: f"{name}: 0.02 of 4.00 GB" in caplog.text, "nothing was reported")
    said = caplog.text.count(name)
    time.sleep(0.05)
    assert caplog.text.count(name) == said
