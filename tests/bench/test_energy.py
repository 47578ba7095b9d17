"""Energy is told where the platform tells it, and the reason where it does not."""

from __future__ import annotations

import os
import plistlib
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import wait_until

from shardmill.bench import energy


def package(root: Path, name: str, joules: float, span: float = 1000.0) -> Path:
    """A counter as the kernel shows it, in microjoules."""
    folder = root / name
    folder.mkdir()
    (folder / "max_energy_range_uj").write_text(f"{int(span * 1e6)}\n")
    count(folder, joules)
    return folder


def count(folder: Path, joules: float) -> None:
    (folder / "energy_uj").write_text(f"{int(joules * 1e6)}\n")


def test_packages_are_summed_from_the_start_on(tmp_path: Path) -> None:
    """Domains within a package are part of it and must not count twice."""
    first, second = package(tmp_path, "intel-rapl:0", 500), package(tmp_path, "intel-rapl:1", 10)
    inner = package(tmp_path, "intel-rapl:0:0", 7)
    joules = energy.rapl(tmp_path).joules
    assert joules is not None and joules() == 0
    count(first, 503.5)
    count(second, 11)
    count(inner, 9)
    assert joules() == pytest.approx(4.5)


def test_a_counter_that_starts_over_goes_on_counting(tmp_path: Path) -> None:
    folder = package(tmp_path, "intel-rapl:0", 998, span=1000)
    joules = energy.rapl(tmp_path).joules
    assert joules is not None
    count(folder, 3)
    assert joules() == pytest.approx(5)
    count(folder, 4)
    assert joules() == pytest.approx(6)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    meter = energy.rapl(tmp_path)
    assert meter.joules is None and "no energy counter" in meter.reason


def test_a_counter_for_root_only_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "intel-rapl:0", 1)

    def refused(file: Path) -> int:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(energy, "_number", refused)
    meter = energy.rapl(tmp_path)
    assert meter.joules is None and "run the same command as root" in meter.reason


@pytest.mark.parametrize(("user", "found"), [(501, "/usr/bin/powermetrics"), (0, None)])
def test_a_mac_tells_root_only(monkeypatch: pytest.MonkeyPatch, user: int, found: str | None) -> None:
    monkeypatch.setattr(energy.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(energy.shutil, "which", lambda _: found)
    with energy.start_meter() as meter:
        assert meter.joules is None and "powermetrics" in meter.reason


def sample(cpu: float, gpu: float, ane: float) -> dict[str, Any]:
    """What powermetrics says of one interval, in millijoules."""
    return {"elapsed_ns": 10**8, "processor": {"cpu_energy": cpu, "gpu_energy": gpu, "ane_energy": ane, "cpu_power": 9}}


def test_samples_of_powermetrics_are_summed(tmp_path: Path) -> None:
    """They come in pieces that end anywhere, each with a zero byte after it; the process ends with the block."""
    stream = b"".join(b"\n" + plistlib.dumps(sample(*values)) + b"\0" for values in [(100, 20, 3), (1000, 0, 500)])
    (tmp_path / "samples").write_bytes(stream)
    script = (
        "import sys, time\n"
        f"data = open({str(tmp_path / 'samples')!r}, 'rb').read()\n"
        "for i in range(0, len(data), 97):\n"
        "    sys.stdout.buffer.write(data[i:i + 97])\n"
        "    sys.stdout.buffer.flush()\n"
        "time.sleep(3600)\n"
    )
    with energy.powermetrics([sys.executable, "-c", script]) as joules:
        wait_until(lambda: joules() >= 1.6)
        assert joules() == pytest.approx(1.623)
