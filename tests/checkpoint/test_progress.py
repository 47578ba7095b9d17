"""A long download says how far it is, and stops saying so when it ends.

Only lines about this test's file are counted: a download that another test left behind still reports its own.
"""

from __future__ import annotations

import logging
import re
import time

import pytest
from patience import wait_until

from shardmill.checkpoint.hub import reporting


def test_it_reports_what_has_come_and_then_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    """The lines name what comes, what is there and what there will be, how fast it comes, and how long it takes yet."""
    caplog.set_level(logging.INFO)
    name, held = "acme/long", [0]
    with reporting(name, lambda: held[0], 4_000_000_000, seconds=0.01):
        wait_until(lambda: f"{name}: 0.00 of 4.00 GB, nothing comes" in caplog.text, "nothing was reported")
        held[0] = 20_000_000
        form = rf"{name}: 0\.02 of 4\.00 GB, (\S+) MB/s, about (\d+) s left"
        wait_until(lambda: re.search(form, caplog.text) is not None, "no rate was reported")
    said = caplog.text.count(name)
    for rate, left in re.findall(form, caplog.text):
        assert float(left) == pytest.approx(3980 / float(rate), rel=0.2, abs=1)
    time.sleep(0.05)
    assert caplog.text.count(name) == said
