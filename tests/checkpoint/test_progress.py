"""A long download says how far it is, and stops saying so when it ends."""

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
    partial = tmp_path / "weights"
    with reporting("weights", partial, 4_000_000_000, seconds=0.01):
        partial.write_bytes(bytes(20_000_000))
        wait_until(lambda: "weights: 0.02 of 4.00 GB" in caplog.text, "nothing was reported")
    said = len(caplog.records)
    time.sleep(0.05)
    assert len(caplog.records) == said
