"""A cluster for the tests of a file, where there can be one."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from programs import skip_or_fail

from . import slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    reason = slurm.missing()
    if reason:
        skip_or_fail(reason)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm.raised(Path(folder)) as up:
        yield up  # in a folder with a short name: that of a socket may have 107 bytes
