"""How long a test waits for what never comes: for an event, never for a number of seconds that it should take."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0  # seconds; it ends what hangs, and no machine is so busy that it ends anything else
BUILDING = 6 * PATIENCE  # for a whole build


def wait_until(condition: Callable[[], object], otherwise: str = "it never came to hold") -> None:
    """Looks again and again until the condition holds. Args: otherwise: what the failure says."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)
