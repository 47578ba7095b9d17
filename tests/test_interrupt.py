"""Ctrl-C ends a process, whatever a library does about it, and lets it clean up where it can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from shardmill import interrupt

SCRIPT = """
import os, signal, sys, time
from shardmill import interrupt
interrupt.GRACE = {grace}
interrupt.ends_this_process("the end")
press = lambda: os.kill(os.getpid(), signal.SIGINT)
{body}
print("still here", flush=True)
"""
SWALLOWED = """
try:
    press()
except:
    print(interrupt.happened(), flush=True)
time.sleep(60)
"""
CLEANED = """
try:
    press()
finally:
    print("clean", flush=True)
"""
TWICE = """
try:
    press()
finally:
    press()
    time.sleep(60)
"""
CAUGHT = """
with interrupt.caught():
    try:
        press()
    except KeyboardInterrupt:
        print("caught", flush=True)
time.sleep(0.3)
"""


def ran(body: str, grace: float = 0.1) -> tuple[int, str, str]:
    """(exit code, stdout, last line of stderr)."""
    command = [sys.executable, "-c", SCRIPT.format(body=body, grace=grace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


def test_a_library_that_swallows_it_does_not_keep_the_process() -> None:
    assert ran(SWALLOWED) == (130, "True\n", "the end")


def test_there_is_time_to_clean_up() -> None:
    code, out, last = ran(CLEANED, grace=30)
    assert (code, out, last) == (-signal.SIGINT, "clean\n", "KeyboardInterrupt")


def test_asked_twice_it_ends_at_once() -> None:
    assert ran(TWICE, grace=30) == (130, "", "the end")


def test_a_program_that_wants_it_gets_it_and_goes_on() -> None:
    """As chat does at its prompt."""
    assert ran(CAUGHT) == (0, "caught\nstill here\n", "")


def test_catching_it_gives_the_handler_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt.caught(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert not interrupt.happened()
