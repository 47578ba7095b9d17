"""Each switch of the simulated Mac does what docs/linux.md says."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import succeeded

from mac import driver
from mac.count import read, table

pytestmark = driver.LINUX_ONLY

KEPT, FRESH = 50, 3  # passes of switching.py
SLOW = {"MAC_LOAD_SECONDS": "0.01", "MAC_FIRST_PASS_SECONDS": "0.01"}
HOLD = """
import os, signal, sys, threading, time
from simulated_mac import waiting
ran, beats = [], []
signal.signal(signal.SIGALRM, lambda *_: ran.append(time.monotonic()))
sys.setswitchinterval(1000)  # a thread runs while another one waits, and at no other time
def beat():
    while True:
        beats.append(time.monotonic())
        time.sleep(0.02)
threading.Thread(target=beat, daemon=True).start()
alarm, start = 0.1, float("inf")
while not ran or ran[0] < start:  # again where the alarm came before the wait, as on a busy machine
    ran.clear()
    signal.setitimer(signal.ITIMER_REAL, alarm)
    beats.clear()
    start = time.monotonic()
    waiting.hold(alarm + 0.3)
    while not (ran and beats):
        time.sleep(0.02)
    alarm *= 2
print(ran[0] - start >= alarm / 2 + 0.3, beats[0] - start >= alarm / 2 + 0.3)
"""
KILLED = """
import signal
from simulated_mac import waiting
signal.setitimer(signal.ITIMER_REAL, 0.1)  # SIGALRM has no handler
waiting.hold(100)
"""
PASSES = """
import sys, coremltools as ct, small
for build in sys.argv[2:]:
    import os; os.environ["MAC_BUILD"] = build
    model = ct.models.CompiledMLModel(sys.argv[1], ct.ComputeUnit.CPU_AND_NE)
model.predict(small.passed(1), model.make_state())
"""


@dataclass(frozen=True)
class Switched:
    """What switching.py found, and what was logged meanwhile."""

    found: dict[str, Any]
    log: Path
    bundle: Path


@pytest.fixture(scope="module")
def switched(tmp_path_factory: pytest.TempPathFactory) -> Switched:
    """One process tries what can be tried in one."""
    folder = tmp_path_factory.mktemp("switches")
    bundle, log = folder / "small.mlmodelc", folder / "log"
    ran = driver.run(str(driver.HERE / "switching.py"), str(bundle), log=log, MAC_OWNERS="1", MAC_BUILD="24G84")
    succeeded(ran)
    return Switched(json.loads(ran.stdout), log, bundle)


def test_a_wait_keeps_the_lock_until_its_end() -> None:
    """Neither a thread nor a handler of Python's runs meanwhile."""
    assert driver.run("-c", HOLD).stdout == "True True\n"


def test_a_signal_without_a_handler_ends_a_wait_at_once() -> None:
    assert driver.run("-c", KILLED).returncode == -signal.SIGALRM


@pytest.mark.thorough
@pytest.mark.parametrize(("keeps", "passes"), [("loads", 0.01), ("all", 0.0)])
def test_the_systems_cache_outlives_a_process(switched: Switched, tmp_path: Path, keeps: str, passes: float) -> None:
    """An update of the system empties it."""
    for log, builds in (("first", ["24G84"]), ("second", ["24G84", "25A354", "25A354", "24G84"])):
        switches = {**SLOW, "MAC_CACHE": str(tmp_path / "cache"), "MAC_CACHE_KEEPS": keeps}
        driver.run("-c", PASSES, str(switched.bundle), *builds, log=tmp_path / log, **switches)
    assert [row["seconds"] for row in driver.events(tmp_path / "first", "load")] == [0.01]
    assert [row["seconds"] for row in driver.events(tmp_path / "second", "load")] == [0, 0.01, 0, 0]
    assert [row["seconds"] for row in driver.events(tmp_path / "second", "first_pass")] == [passes]


@pytest.mark.thorough
def test_loads_and_first_passes_take_their_time(switched: Switched) -> None:
    """A shape is specialised once for each process."""
    assert [row["seconds"] for row in driver.events(switched.log, "load")][:3] == [0.01] * 3
    assert [row["seconds"] for row in driver.events(switched.log, "first_pass")] == [0.01, 0.01, 0]


def test_a_bundle_of_another_system_is_noticed(switched: Switched) -> None:
    assert "with error code: -14." in switched.found["foreign"] and not switched.found["tolerated"]
    assert [row["compiled_by"] for row in driver.events(switched.log, "foreign_bundle")] == ["24G84"] * 2


def test_a_load_fails_as_error_14_does(switched: Switched) -> None:
    first, text, last = switched.found["fails"].split("\n")
    assert (first, last) == ("{", "}")
    assert text.startswith("    NSLocalizedDescription = ") and text.endswith('with error code: -14.";')
    assert not switched.found["other"]


def test_operations_are_kept_off_the_engine(switched: Switched) -> None:
    """By their whole names; the program takes a range of shapes."""
    mul, add = "ios18.mul", "ios18.add"
    assert switched.found["off"] == {"": [], "mul,add": [add, mul], "range:mul": [mul], "range:relu,m": []}


def test_widths_round_apart(switched: Switched) -> None:
    """One of the two is as without the switch."""
    plain, narrow, wide = (switched.found["widths"][way] for way in ("plain", "narrow", "wide"))
    assert narrow[0] == plain[0] and narrow[1] != plain[1]
    assert wide[0] != plain[0] and wide[1] == plain[1]


def test_inputs_that_nobody_else_owns_are_found(switched: Switched) -> None:
    sums = driver.events(switched.log, "owners")[-1]
    rounding, changing = 3 * 2, 1
    assert sums["passes"] == sums["inputs"] == KEPT + FRESH + rounding + changing
    assert sums["unsafe"] == FRESH + rounding, "only arrays that are kept are safe"
    assert [row["inputs"] for row in driver.events(switched.log, "unsafe_release")] == [["x"]] * sums["unsafe"]


def test_inputs_that_change_during_a_pass_are_found(switched: Switched) -> None:
    assert [row["inputs"] for row in driver.events(switched.log, "overwritten")] == [["x"]]


def test_assertions_end_the_process(switched: Switched) -> None:
    assert [switched.found[what] for what in ("plan", "units", "hint")] == [signal.SIGABRT] * 3
    assert switched.found["fine"] == 0
    assert len(driver.events(switched.log, "abort")) == 3


def test_forks_are_logged(switched: Switched) -> None:
    assert [row["native"] for row in driver.events(switched.log, "fork")] == [True] * 4


def test_xcrun_without_tools_opens_a_dialog(tmp_path: Path) -> None:
    driver.run("-c", "import subprocess; subprocess.run(['xcrun', '--find', 'coremlc'])", log=tmp_path / "log")
    assert [row["asked"] for row in driver.events(tmp_path / "log", "dialog")] == ["xcrun"]


def test_an_old_python_calls_macos_26_by_another_name() -> None:
    code = "import platform, subprocess; print(platform.mac_ver()[0], subprocess.getoutput('sw_vers -productVersion'))"
    assert driver.run("-c", code, MAC_VERSION="26.1", MAC_PYTHON_SAYS="16.0").stdout == "16.0 26.1\n"


def test_the_count_adds_up(switched: Switched) -> None:
    head, *jobs, total = table(read(switched.log))
    assert head[:3] == ["job", "processes", "loads"]
    assert sum(int(job[2]) for job in jobs) == int(total[2]) == len(driver.events(switched.log, "load"))
    assert total[-1] == "T=1: 1, T=2: 1, T=4: 1"
    printed = subprocess.check_output([sys.executable, str(driver.HERE / "count.py"), str(switched.log)], text=True)
    assert "overwritten: 1, the first: {" in printed
