"""File systems of a network have one name on every machine that mounts them; others have this machine's number."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmill.checkpoint import cache
from shardmill.checkpoint.cache import file_state

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
61 22 0:{number} / /home rw,relatime shared:30 - nfs4 nas:/export/home\\040of\\040all rw,vers=4.2,addr=10.0.0.1
62 22 0:77 / /scratch rw - lustre 10.0.0.2@tcp:/scratch rw
63 22 0:78 / /tmp rw - tmpfs tmpfs rw
"""


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A system that lists its mounts, wherever the tests run; nothing is known of them yet."""
    monkeypatch.setattr(sys, "platform", "linux")
    cache._mounted.cache_clear()
    yield
    cache._mounted.cache_clear()


def named(monkeypatch: pytest.MonkeyPatch, mounts: Path, number: int, device: int) -> str:
    """What a machine that has numbered its mounts in its own way calls a device."""
    mounts.write_text(MOUNTS.format(number=number))
    monkeypatch.setattr(cache, "MOUNTS", mounts)
    cache._mounted.cache_clear()
    return cache.volume(device, mounts)


def test_two_clients_of_a_server_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one, two = (named(monkeypatch, tmp_path / "m", number, os.makedev(0, number)) for number in (51, 52))
    assert one == two == "nas:/export/home of all"
    assert named(monkeypatch, tmp_path / "m", 51, os.makedev(0, 77)) == "10.0.0.2@tcp:/scratch"


@pytest.mark.parametrize("device", [os.makedev(8, 1), os.makedev(0, 78), os.makedev(0, 99)])
def test_what_is_of_one_machine_keeps_its_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: int) -> None:
    assert named(monkeypatch, tmp_path / "m", 51, device) == str(device)


def test_a_system_that_lists_no_mounts_has_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "MOUNTS", tmp_path / "missing")
    assert cache.volume(5, tmp_path) == "5"


def test_what_is_remembered_of_a_file_goes_by_that_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"1")
    device = os.stat(tmp_path / "weights").st_dev
    mounts = f"1 1 {os.major(device)}:{os.minor(device)} / / rw - nfs4 nas:/models rw\n"
    (tmp_path / "m").write_text(mounts)
    monkeypatch.setattr(cache, "MOUNTS", tmp_path / "m")
    state = file_state(tmp_path / "weights")
    assert state.file == f"nas:/models:{state.inode}"


class Disk:
    """What a Mac says of files below a folder, which is where a volume is mounted."""

    def __init__(self, root: Path) -> None:
        self.root, self.device, self.born = root, 7, 1_700_000_000.25
        self._stat = os.stat

    def stat(self, path: os.PathLike[str], **options: Any) -> Any:
        true = self._stat(path, **options)
        inside = Path(path).is_relative_to(self.root)
        device = self.device if inside else 1
        others = ("st_mode", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns")
        kept = {name: getattr(true, name) for name in others}
        return SimpleNamespace(**kept, st_dev=device, st_birthtime=self.born if Path(path) == self.root else 5.5)


def test_a_mac_s_volume_is_known_after_its_number_has_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A restart may number volumes anew; gigabytes are not hashed again for that. Another disk there is another."""
    disk = Disk(tmp_path / "disk")
    for name in ("a/one", "b/two"):
        (disk.root / name).parent.mkdir(parents=True)
        (disk.root / name).write_bytes(b"1")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(os, "stat", disk.stat)
    before, beside = file_state(disk.root / "a/one").file, file_state(disk.root / "b/two").file
    assert before.rpartition(":")[0] == beside.rpartition(":")[0] == f"{disk.root} 1700000000.25"
    disk.device = 8
    assert file_state(disk.root / "a/one").file == before
    disk.born += 1
    assert file_state(disk.root / "a/one").file != before
