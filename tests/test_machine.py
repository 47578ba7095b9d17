"""What the machine runs programs with: asked of it once, and chosen for a while, not for good."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from importlib.metadata import version

import portable_coreml
import pytest

from shardmill import doctor, machine
from shardmill.errors import ShardmillError

ANSWERS = {"sw_vers": "24A335", "sysctl": "Apple M4"}


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


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A Mac with Core ML; the programs that are started to learn about it."""
    started = list[str]()

    def answer(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command[0])
        return subprocess.CompletedProcess(command, 0, ANSWERS[command[0]] + "\n")

    def forget() -> None:
        machine.is_portable.cache_clear()
        machine._ask.cache_clear()

    forget()
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.0", ("", "", ""), "arm64"))
    monkeypatch.setattr(machine, "native_present", lambda: True)
    monkeypatch.setattr(machine.subprocess, "run", answer)
    yield started
    forget()


def test_a_mac_is_known_without_starting_a_program(mac: list[str]) -> None:
    """Gates ask at every turn."""
    assert [machine.is_portable() for _ in range(3)] == [False] * 3
    assert mac == []


def test_a_mac_is_asked_for_its_chip_and_build_once(mac: list[str]) -> None:
    expected = {"name": "coreml", "macos": "15.0", "build": "24A335", "chip": "Apple M4"}
    assert [machine.engine() for _ in range(3)] == [expected] * 3
    assert machine.machine()["processor"] == "Apple M4"
    assert sorted(mac) == ["sw_vers", "sysctl"]


def test_a_mac_without_the_native_module_says_what_doctor_says(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no Core ML to run on, and the portable engine never takes its place there."""
    monkeypatch.setattr(machine, "native_present", lambda: False)
    (finding,) = doctor.engine(True, False, "15.0")
    for asked in (machine.is_portable, machine.engine):
        with pytest.raises(ShardmillError) as error:
            asked()
        assert str(error.value) == finding.meaning


def test_another_system_runs_the_portable_engine(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever coremltools carries there."""
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert machine.engine() == {"name": "portable"}
    assert mac == []


def test_package_versions_are_the_installed_ones() -> None:
    found = machine.package_versions(("torch", "numpy"))
    assert found == {"numpy": version("numpy"), "torch": version("torch")}
    assert list(found) == ["numpy", "torch"]
