"""Each switch of the simulated Mac does what docs/simulated-mac.md says."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from mac import driver

pytestmark = driver.LINUX_ONLY

LOAD = """
import sys, coremltools as ct
model = ct.models.CompiledMLModel(sys.argv[1], ct.ComputeUnit.CPU_AND_NE)
"""
PASSES = """
import sys, coremltools as ct, small
model = ct.models.CompiledMLModel(sys.argv[1], ct.ComputeUnit.CPU_AND_NE)
for tokens in (1, 4):
    print(model.predict(small.passed(tokens), model.make_state())["hidden"].ravel()[0].hex())
"""
OWNED = """
import sys, coremltools as ct, numpy as np, small
model = ct.models.CompiledMLModel(sys.argv[1], ct.ComputeUnit.CPU_AND_NE)
state, kept = model.make_state(), small.passed(2)["x"]
for _ in range(50):
    model.predict({"x": kept}, state)
for _ in range(int(sys.argv[2])):
    model.predict(small.passed(2), state)
"""
CHANGED = """
import sys, coremltools as ct, small
model = ct.models.CompiledMLModel(sys.argv[1], ct.ComputeUnit.CPU_AND_NE)
given, inner = small.passed(2), model._proxy._narrow.predict
def meanwhile(inputs, state):
    given["x"][:] = 7
    return inner(inputs, state)
model._proxy._narrow.predict = meanwhile
model.predict(given, model.make_state())
"""
HOLD = """
import os, signal, sys, threading, time
from simulated_mac import waiting
ran, beats, start = [], [], time.monotonic()
signal.signal(signal.SIGALRM, lambda *_: ran.append(time.monotonic() - start))
def beat():
    while True:
        beats.append(time.monotonic() - start)
        time.sleep(0.02)
threading.Thread(target=beat, daemon=True).start()
time.sleep(0.1)
start = time.monotonic()
beats.clear()
signal.setitimer(signal.ITIMER_REAL, 0.1)
waiting.hold(0.8)
time.sleep(0.1)
print(min(ran) >= 0.8, min(beats) >= 0.7)
"""
KILLED = """
import signal
from simulated_mac import waiting
signal.setitimer(signal.ITIMER_REAL, 0.1)  # SIGALRM has no handler
waiting.hold(100)
"""
ABORTS = {
    "plan": "get_compute_plan('small.mlpackage', 'ALL')",
    "units": "('small.mlmodelc', 'CPU_AND_ANE', '', {}, None)",
    "hint": "('small.mlmodelc', 'ALL', '', {'reshapeFrequency': 'Seldom'}, None)",
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small program, compiled on the simulated Mac."""
    folder = tmp_path_factory.mktemp("switches")
    code = (
        "import sys, pathlib, small, coremltools as ct; package = small.make(pathlib.Path(sys.argv[1]));"
        "ct.models.utils.compile_model(str(package), sys.argv[1] + '/small.mlmodelc')"
    )
    made = driver.run("-c", code, str(folder))
    assert made.returncode == 0, made.stderr
    return folder / "small.mlmodelc"


def test_a_wait_keeps_the_lock_until_its_end() -> None:
    """Neither a thread nor a handler of Python's runs meanwhile."""
    assert driver.run("-c", HOLD).stdout == "True True\n"


def test_a_signal_without_a_handler_ends_a_wait_at_once() -> None:
    assert driver.run("-c", KILLED).returncode == -signal.SIGALRM


@pytest.mark.parametrize(("keeps", "passes"), [("loads", 0.01), ("all", 0.0)])
def test_the_systems_cache_outlives_a_process(bundle: Path, tmp_path: Path, keeps: str, passes: float) -> None:
    switches = {"MAC_LOAD_SECONDS": "0.01", "MAC_FIRST_PASS_SECONDS": "0.01", "MAC_CACHE": str(tmp_path / "cache")}
    for log in ("first", "second"):
        driver.run("-c", PASSES, str(bundle), log=tmp_path / log, MAC_CACHE_KEEPS=keeps, **switches)
    assert [row["seconds"] for row in driver.events(tmp_path / "first", "load")] == [0.01]
    assert [row["seconds"] for row in driver.events(tmp_path / "second", "load")] == [0]
    assert [row["seconds"] for row in driver.events(tmp_path / "second", "first_pass")] == [passes] * 2


def test_an_update_of_the_system_empties_its_cache(bundle: Path, tmp_path: Path) -> None:
    switches = {"MAC_LOAD_SECONDS": "0.01", "MAC_CACHE": str(tmp_path / "cache")}
    for build in ("24G84", "25A354", "25A354"):
        driver.run("-c", LOAD, str(bundle), log=tmp_path / "log", MAC_BUILD=build, **switches)
    assert [row["seconds"] for row in driver.events(tmp_path / "log", "load")] == [0.01, 0.01, 0]


def test_a_bundle_of_another_system_is_noticed(bundle: Path, tmp_path: Path) -> None:
    found = driver.run("-c", LOAD, str(bundle), log=tmp_path / "log", MAC_BUILD="25A354", MAC_FOREIGN="refuse")
    assert "with error code: -14." in found.stderr
    assert [row["compiled_by"] for row in driver.events(tmp_path / "log", "foreign_bundle")] == ["24G84"]


def test_a_load_fails_as_error_14_does(bundle: Path) -> None:
    found = driver.run("-c", LOAD, str(bundle), MAC_FAIL_LOAD="small")
    assert "RuntimeError: {\n    NSLocalizedDescription = " in found.stderr
    assert "with error code: -14." in found.stderr


def test_widths_round_apart(bundle: Path) -> None:
    """By turns one of them is as without the switch."""
    plain, narrow, wide = (
        driver.run("-c", PASSES, str(bundle), MAC_WIDTHS=way).stdout.split() for way in ("", "narrow", "wide")
    )
    assert narrow[0] == plain[0] and narrow[1] != plain[1]
    assert wide[0] != plain[0] and wide[1] == plain[1]


@pytest.mark.parametrize("fresh", [0, 3])
def test_inputs_that_nobody_else_owns_are_found(bundle: Path, tmp_path: Path, fresh: int) -> None:
    driver.run("-c", OWNED, str(bundle), str(fresh), log=tmp_path / "log", MAC_OWNERS="1")
    (sums,) = driver.events(tmp_path / "log", "owners")
    assert (sums["passes"], sums["inputs"], sums["unsafe"]) == (50 + fresh, 50 + fresh, fresh)
    assert [row["inputs"] for row in driver.events(tmp_path / "log", "unsafe_release")] == [["x"]] * fresh


def test_inputs_that_change_during_a_pass_are_found(bundle: Path, tmp_path: Path) -> None:
    driver.run("-c", CHANGED, str(bundle), log=tmp_path / "log", MAC_OWNERS="1")
    assert [row["inputs"] for row in driver.events(tmp_path / "log", "overwritten")] == [["x"]]


@pytest.mark.parametrize("what", ABORTS)
def test_what_an_assertion_ends(what: str, bundle: Path, tmp_path: Path) -> None:
    code = f"import os, coremltools as ct; os.chdir({str(bundle.parent)!r}); p = ct.libcoremlpython._MLModelProxy; p"
    dot = "." if ABORTS[what].startswith("get") else ""
    found = driver.run("-c", f"{code}{dot}{ABORTS[what]}", log=tmp_path / "log")
    assert found.returncode == -signal.SIGABRT, found.stderr
    assert len(driver.events(tmp_path / "log", "abort")) == 1


def test_an_old_python_calls_macos_26_by_another_name() -> None:
    code = "import platform, subprocess; print(platform.mac_ver()[0], subprocess.getoutput('sw_vers -productVersion'))"
    assert driver.run("-c", code, MAC_VERSION="26.1", MAC_PYTHON_SAYS="16.0").stdout == "16.0 26.1\n"


def test_forks_and_dialogs_are_logged(tmp_path: Path) -> None:
    code = "import os, subprocess, coremltools; os.fork() or os._exit(0); subprocess.run(['xcrun', '--find', 'x'])"
    driver.run("-c", code, log=tmp_path / "log")
    assert [row["native"] for row in driver.events(tmp_path / "log", "fork")] == [True]
    assert [row["asked"] for row in driver.events(tmp_path / "log", "dialog")] == ["xcrun"]


def test_the_count_tells_jobs_apart(bundle: Path, tmp_path: Path) -> None:
    driver.run("-c", PASSES, str(bundle), log=tmp_path / "log")
    counted = subprocess.check_output(["python", str(driver.HERE / "count.py"), str(tmp_path / "log")], text=True)
    head, job, total = counted.splitlines()[:3]
    assert head.split()[:2] == ["job", "processes"]
    assert job.split()[-9:] == total.split()[-9:]
    assert total.split() == ["sum", "1", "1", "0", "0", "2", "T=1:", "1,", "T=4:", "1"]
