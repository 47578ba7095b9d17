"""What the machine runs programs with: asked of it once, and chosen for a while, not for good."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import portable_coreml
import pytest
import torch
from kit_runner import main as kit_runner

from shardmill import machine
from shardmill.commands import doctor
from shardmill.errors import ShardmillError
from shardmill.runtime import threads

ANSWERS = {
    ("sw_vers", "-productVersion"): "26.1",
    ("sw_vers", "-buildVersion"): "25B78",
    ("sysctl", "-n", "machdep.cpu.brand_string"): "Apple M4",
}


@pytest.mark.skipif(not machine.is_portable(), reason="Core ML has one precision")
@pytest.mark.parametrize("outer", ["fp16", "fp32"])
def test_the_earlier_precision_comes_back(outer: str) -> None:
    first = portable_coreml.precision()
    with machine.load_programs_as(outer):
        with machine.load_programs_as("fp16"), machine.load_programs_as("fp32"):
            assert portable_coreml.precision() == "fp32"
        assert portable_coreml.precision() == outer
        with pytest.raises(ValueError, match="fails"), machine.load_programs_as("fp16"):
            raise ValueError("fails")
        assert portable_coreml.precision() == outer
    assert portable_coreml.precision() == first


@pytest.mark.skipif(not machine.is_portable(), reason="Core ML has one precision")
def test_another_thread_keeps_its_precision() -> None:
    """A gate holds its precision open while it hands out results, and another thread may load a program meanwhile."""
    before = portable_coreml.precision()
    changed = "fp16" if before == "fp32" else "fp32"
    with machine.load_programs_as(changed), ThreadPoolExecutor(1) as other:
        assert other.submit(portable_coreml.precision).result() == before
        assert portable_coreml.precision() == changed


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A Mac with Core ML; the programs that are started to learn about it."""
    started = list[str]()

    def answer(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command[0])
        return subprocess.CompletedProcess(command, 0, ANSWERS[command] + "\n")

    def forget() -> None:
        machine.is_portable.cache_clear()
        machine.ask.cache_clear()

    forget()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("16.0", ("", "", ""), "arm64"))  # of a Python with an older SDK
    monkeypatch.setattr(machine, "native_present", lambda: True)
    monkeypatch.setattr(machine.subprocess, "run", answer)
    yield started
    forget()


def test_a_mac_is_known_without_starting_a_program(mac: list[str]) -> None:
    """Gates ask at every turn."""
    assert [machine.is_portable() for _ in range(3)] == [False] * 3
    assert mac == []


def test_a_mac_is_asked_for_its_chip_and_build_once(mac: list[str]) -> None:
    expected = {"name": "coreml", "macos": "26.1", "build": "25B78", "chip": "Apple M4"}
    assert [machine.engine() for _ in range(3)] == [expected] * 3
    assert machine.machine()["processor"] == "Apple M4"
    assert sorted(mac) == ["sw_vers", "sw_vers", "sysctl"]


def test_the_system_is_called_what_it_calls_itself(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python with an older SDK says 16.0 of macOS 26: each Python of a Mac would be another engine."""
    assert machine.macos() == "26.1"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "uname", lambda: ("Darwin", "", "", "", "arm64"))
    found = kit_runner.system_identity()
    assert (found["system"], found["build"], found["chip"]) == ("26.1", "25B78", "Apple M4")


@pytest.mark.parametrize("path", [None, "", "/nowhere"])
def test_programs_of_the_system_are_found_whatever_path_names(
    path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under cron and sudo PATH may lack /usr/sbin, where sysctl is; an older name of the system is not asked for."""
    monkeypatch.setenv("SYSTEM_VERSION_COMPAT", "1")
    if path is None:
        monkeypatch.delenv("PATH")
    else:
        monkeypatch.setenv("PATH", path)
    for ask in (machine.ask.__wrapped__, kit_runner._ask):
        asked = ask("env").splitlines()
        assert "SYSTEM_VERSION_COMPAT=0" in asked
        (searched,) = (line.removeprefix("PATH=") for line in asked if line.startswith("PATH="))
        assert {"/usr/bin", "/usr/sbin"} <= set(searched.split(":"))


def test_a_mac_without_the_native_module_says_what_doctor_says(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no Core ML to run on, and the portable engine never takes its place there."""
    monkeypatch.setattr(machine, "native_present", lambda: False)
    (finding,) = doctor.engine_finding(True, False, "15.0")
    for asked in (machine.is_portable, machine.engine):
        with pytest.raises(ShardmillError) as error:
            asked()
        assert str(error.value) == finding.meaning


def test_another_system_runs_the_portable_engine(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever coremltools carries there."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert machine.engine() == {"name": "portable"}
    assert mac == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="macOS gives every process all cores")
def test_cores_are_those_that_a_job_was_given() -> None:
    """Slurm's cgroups and `taskset` bind a job to some of the machine's; with more threads than those it is slower."""
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from shardmill import machine; "
    code += "from shardmill.runtime import threads; threads.is_portable = lambda: True; asked = []; "
    code += "threads.fastest = lambda measure, most, choose: asked.append(most) or 1; "
    code += "threads.fastest_threads(float); print(machine.cores(), asked, machine.machine()['cores'])"
    environment = {name: value for name, value in os.environ.items() if name != threads.CHOSEN_BY_HAND}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "1 [1] 1\n"


@pytest.mark.parametrize("known", [("process_cpu_count", "sched_getaffinity"), ("sched_getaffinity",), ()])
def test_cores_are_told_by_what_python_has(monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...]) -> None:
    tells = {"process_cpu_count": lambda: 3, "sched_getaffinity": lambda _: {0, 1}}
    for name, answer in tells.items():
        monkeypatch.delattr(os, name, raising=False)
        if name in known:
            monkeypatch.setattr(os, name, answer, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cores() == {2: 3, 1: 2, 0: 1}[len(known)]


@pytest.mark.parametrize(("given", "asked"), [("2", 2), ("64", 4), ("", 4), ("0", 4), ("all", 4)])
def test_where_slurm_binds_nothing_a_variable_tells(monkeypatch: pytest.MonkeyPatch, given: str, asked: int) -> None:
    monkeypatch.setattr(machine, "_reachable_cores", lambda: 4)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", given)
    assert machine.cores() == asked


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, 64),
        ("0::/", {"cpu.max": "max 100000"}, 64),
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "1000 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("3:cpu,cpuacct:/job\n0::/", {"cpu/job/cpu.cfs_quota_us": "200000", "cpu/job/cpu.cfs_period_us": "50000"}, 4),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "200000"}, 64),
        ("3:memory:/", {"cpu/cpu.cfs_quota_us": "1", "cpu/cpu.cfs_period_us": "1"}, 64),
        (None, {"cpu.max": "1 1"}, 64),
    ],
)
def test_cores_are_what_a_container_was_given(
    own: str | None, limits: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota limits CPU time and hides no core: with a thread for each of 64, a pod of 4 CPUs stands still."""
    control_groups(own, limits, tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "_reachable_cores", lambda: 64)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert machine.cores() == expected


def control_groups(own: str | None, limits: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process control groups: /proc/self/cgroup and the files of the groups."""
    if own is not None:
        (tmp_path / "own").write_text(f"{own}\n")
    for name, limit in limits.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(f"{limit}\n")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "groups")


ALL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("own", "limits", "expected"),
    [
        ("0::/", {}, ALL),
        ("0::/", {"memory.max": "max"}, ALL),
        ("0::/", {"memory.max": "5000000"}, 5_000_000),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": "4000000"}, 4_000_000),
        ("0::/a/b", {"a/b/memory.max": "3000000", "a/memory.max": "4000000"}, 3_000_000),
        ("4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ("4:memory:/not/seen", {"memory/memory.limit_in_bytes": "1000000"}, 1_000_000),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, ALL),
        ("2:cpu:/job", {"memory/job/memory.limit_in_bytes": "7"}, ALL),
        (None, {"memory.max": "7"}, ALL),
    ],
)
def test_memory_is_what_a_container_was_given(
    own: str | None, limits: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control_groups(own, limits, tmp_path, monkeypatch)
    assert machine.memory_bytes() == expected


def test_package_versions_are_the_installed_ones() -> None:
    found = machine.package_versions(("torch", "numpy"))
    assert found == {"numpy": version("numpy"), "torch": torch.__version__}  # which a wheel's metadata may cut short
    assert list(found) == ["numpy", "torch"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [("__version__ = '9.1+cu130'", "9.1+cu130"), ('__version__ = "9.1"', "9.1"), ("cuda = None", version("torch"))],
)
def test_the_build_of_torch_is_read_where_torch_has_it(
    written: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise AssertionError('was imported, which takes a second')")
    (tmp_path / "torch/version.py").write_text(f"debug = False\n{written}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    assert machine.torch_build.__wrapped__() == expected


def test_nothing_is_searched_for_at_the_end_of_a_process() -> None:
    """The interpreter's last searches pass over frozen objects. What is registered first runs last."""
    code = (
        "import atexit, gc; from shardmill.machine import collect_rarely; "
        "atexit.register(lambda: print(gc.get_freeze_count() > 0, len(gc.get_objects()))); collect_rarely()"
    )
    frozen, left = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert frozen == "True" and int(left) < 100
