"""Programs that some tests need and few machines have."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

DEMANDED = "SHARDMILL_TESTS_DEMAND_PROGRAMS"  # set where `.ci/install-programs` must have installed them


def skip_or_fail(reason: str) -> NoReturn:
    """Skip a test that lacks a program; fail if the environment demands it, since nobody reads what CI skips."""
    if os.environ.get(DEMANDED):
        pytest.fail(f"{reason}; {DEMANDED} is set, so it must be there: .ci/install-programs")
    pytest.skip(reason)
