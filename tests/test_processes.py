"""A process that fails in a test is told of in the first line."""

from __future__ import annotations

import subprocess
import sys

import pytest
from processes import succeeded, told

SAYS = "import sys; print('going on'); print('shardmill: no room\\nbye', file=sys.stderr); sys.exit(3)"


def test_the_first_line_names_the_command_its_end_and_the_reason() -> None:
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, check=False)
    with pytest.raises(AssertionError) as told:
        succeeded(done)
    first, *rest = str(told.value).splitlines()
    assert first.startswith("python") and first.endswith(" ended with 3: shardmill: no room")
    assert rest[:3] == ["going on", "shardmill: no room", "bye"]


def test_so_is_one_that_was_to_be_checked() -> None:
    """By subprocess, whose error names the command alone."""
    with pytest.raises(AssertionError, match=r"^python\S* .* ended with 3: shardmill: no room\n"), told():
        subprocess.run([sys.executable, "-c", SAYS], capture_output=True, check=True)
