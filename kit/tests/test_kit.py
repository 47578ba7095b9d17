"""What a measurement wrote is on the disk itself before the next one begins; what a system is said not to take."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from kit_runner.kit import Kit, Results, write_durably
from kit_runner.main import over_the_limit

FULL = 51  # F_FULLFSYNC of macOS
HEADER = {"kit": "a"}


def write(folder: Path) -> None:
    """Both ways to write."""
    Results(folder / "lines", HEADER)
    write_durably(folder / "text", "b")


def test_on_a_mac_the_disk_itself_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There fsync leaves the bytes in the disk's own cache; a disk of a network may know fsync only."""
    asked = list[tuple[str, bytes]]()

    def fcntl_of_a_mac(file: Any, command: int) -> int:
        asked.append(("full" if command == FULL else "other", Path(file.name).read_bytes()))
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", fcntl_of_a_mac)
    monkeypatch.setattr(os, "fsync", lambda _: asked.append(("fsync", b"")))
    write(tmp_path)
    assert asked == [("full", b'{"kit": "a"}\n'), ("full", b"b")]


@pytest.mark.parametrize("known", [True, False])
def test_elsewhere_the_system_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """Also where macOS knows the call and the disk does not."""

    def refuse(file: Any, command: int) -> int:
        raise OSError("not supported")

    synced = list[int]()
    if known:
        monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    else:
        monkeypatch.delattr(fcntl, "F_FULLFSYNC", raising=False)
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    write(tmp_path)
    assert len(synced) == 2


@pytest.mark.parametrize(
    ("platform", "version", "said"),
    [
        ("macOS", "26.1", []),
        ("macOS", "27.0.1", ["a/large: 1.50 GiB of weights, macOS 27 is said to take 1.00; expect it on the CPU"]),
        ("macOS", "28.0", ["a/large: 1.50 GiB of weights, macOS 28 is said to take 1.00; expect it on the CPU"]),
        ("Linux", "6.1.0", []),
        ("macOS", "14.7", []),
        ("macOS", "", []),
    ],
)
def test_a_program_over_the_limit_of_this_system_is_named_before_it_is_measured(
    platform: str, version: str, said: list[str]
) -> None:
    """By the limits that the kit brings; a system that is newer than the kit is taken for the newest it knows."""
    gib = 1 << 30
    parts = [
        {"name": name, "programs": [{"weights": size}]} for name, size in (("large", 3 * gib // 2), ("small", gib))
    ]
    limits = {"macOS 15": 2 * gib, "macOS 26": 2 * gib, "macOS 27": gib, "iOS 18": gib}
    content = {"limits": {"weight_bytes": limits}, "variants": [{"name": "a", "parts": parts}]}
    assert list(over_the_limit(Kit(Path(), "", content), platform, version)) == said
    assert list(over_the_limit(Kit(Path(), "", content | {"limits": {}}), platform, version)) == []
