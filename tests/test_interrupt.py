"""Ctrl-C and SIGTERM end a process, whatever a library does about it, and lets it clean up where it can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from shardmill import interrupt

SCRIPT = """
import os, signal, sys, time
from shardmill import interrupt
interrupt.GRACE = {grace}
interrupt.ends_this_process("the end")
press = lambda: os.kill(os.getpid(), signal.{name})
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


SCRATCH = """
from pathlib import Path
folder = Path({folder!r})
folder.mkdir()
with interrupt.scratch(folder):
    (folder / "half").touch()
    try:
        press()
    except:
        time.sleep(60)  # as a long computation does, which no exception reaches
"""


NATIVE = """
import ctypes, subprocess
libc = ctypes.PyDLL(None)  # keeps the interpreter's lock, as coremltools' native module does
with interrupt.at_once():
    if {blocked}:
        signal.pthread_sigmask(signal.SIG_BLOCK, interrupt.SIGNALS)
    subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -{name} {{os.getpid()}}"])
    libc.sleep(600)
    print("slept to the end", flush=True)
"""
DEFERRED = """
try:
    with interrupt.deferred():
        press()
        print("to the end", flush=True)
except KeyboardInterrupt:
    print("and then", flush=True)
    os._exit(0)
"""


def ran(body: str, grace: float = 0.1, name: str = "SIGINT") -> tuple[int, str, str]:
    """(exit code, stdout, last line of stderr)."""
    command = [sys.executable, "-c", SCRIPT.format(body=body, grace=grace, name=name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return done.returncode, done.stdout, done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_library_that_swallows_it_does_not_keep_the_process(name: str, code: int) -> None:
    assert ran(SWALLOWED, name=name) == (code, "True\n", "the end")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_what_was_half_made_goes_with_the_process(tmp_path: Path, name: str) -> None:
    """Also where nothing on the way out is run. A scheduler that takes nodes away would fill the disk otherwise."""
    ran(SCRATCH.format(folder=str(tmp_path / "tmp-1")), name=name)
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_folder_lasts_as_long_as_its_block(tmp_path: Path) -> None:
    folder = tmp_path / "tmp-1"
    folder.mkdir()
    with pytest.raises(ValueError, match="x"), interrupt.scratch(folder):
        assert folder.is_dir()
        raise ValueError("x")
    assert not folder.exists() and not interrupt._scratch


def test_there_is_time_to_clean_up() -> None:
    code, out, last = ran(CLEANED, grace=PATIENCE)
    assert (code, out, last) == (-signal.SIGINT, "clean\n", "KeyboardInterrupt")


def test_asked_twice_it_ends_at_once() -> None:
    assert ran(TWICE, grace=PATIENCE) == (130, "", "the end")


def test_a_program_that_wants_it_gets_it_and_goes_on() -> None:
    """As chat does at its prompt."""
    assert ran(CAUGHT) == (0, "caught\nstill here\n", "")


def test_catching_it_gives_the_handler_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt.caught(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert not interrupt.happened()


@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_the_system_ends_a_call_that_holds_the_interpreter_s_lock(name: str, blocked: bool) -> None:
    """Even one that blocks signals in its own thread."""
    code, out, _ = ran(NATIVE.format(blocked=blocked, name=name), name=f"SIG{name}")
    assert (code, out) == (-signal.Signals[f"SIG{name}"], "")


def test_what_must_not_be_cut_runs_to_its_end_before_a_signal_is_handled() -> None:
    assert ran(DEFERRED) == (0, "to the end\nand then\n", "")
