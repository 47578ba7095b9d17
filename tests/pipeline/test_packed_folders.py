"""A folder as one file: the same bytes wherever it was made, and nothing but that folder comes out of it."""

from __future__ import annotations

import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardmill.checkpoint.hashing import tree_hashes
from shardmill.errors import UnreadableError
from shardmill.pipeline.storage import pack, unpack

NAME = "p.mlpackage"


def folder(at: Path) -> Path:
    made = at / NAME
    (made / "Data/deep").mkdir(parents=True)
    for name, content in (("Manifest.json", b"{}"), ("Data/deep/weight.bin", bytes(70_000)), ("Data/ä", b"")):
        (made / name).write_bytes(content)
    return made


def packed(at: Path) -> Path:
    pack(folder(at), at / f"{NAME}.tar")
    return at / f"{NAME}.tar"


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    (tmp_path / "out").mkdir()
    unpack(archive, tmp_path / "out" / NAME)
    assert tree_hashes(tmp_path / "out" / NAME) == tree_hashes(tmp_path / NAME)


def test_files_of_the_same_bytes_are_one_file(tmp_path: Path) -> None:
    """The engine shares what it expands of a file, and a program's bundles were linked to one when they were packed."""
    made = folder(tmp_path)
    for name, content in (("again.bin", bytes(70_000)), ("other.bin", bytes(69_999) + b"1")):
        (made / name).write_bytes(content)
    pack(made, tmp_path / f"{NAME}.tar")
    (tmp_path / "out").mkdir()
    unpack(tmp_path / f"{NAME}.tar", tmp_path / "out" / NAME)
    assert tree_hashes(tmp_path / "out" / NAME) == tree_hashes(made)
    one, again, other = (tmp_path / "out" / NAME / name for name in ("Data/deep/weight.bin", "again.bin", "other.bin"))
    assert one.samefile(again) and not one.samefile(other)


def test_what_macos_leaves_in_folders_is_not_packed(tmp_path: Path) -> None:
    before = packed(tmp_path).read_bytes()
    hashes = tree_hashes(tmp_path / NAME)
    for name in (".DS_Store", "Data/.DS_Store", "Data/deep/._weight.bin"):
        (tmp_path / NAME / name).write_text("of a Mac")
    pack(tmp_path / NAME, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == before
    assert tree_hashes(tmp_path / NAME) == hashes


def test_a_person_has_the_folder_by_tar(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", tmp_path / "out"], check=True)
    assert tree_hashes(tmp_path / "out" / NAME) == tree_hashes(tmp_path / NAME)


def test_times_modes_links_and_order_leave_no_trace(tmp_path: Path) -> None:
    first = packed(tmp_path)
    (tmp_path / "b" / NAME / "Data/deep").mkdir(parents=True)
    for file in sorted((path for path in (tmp_path / NAME).rglob("*") if path.is_file()), reverse=True):
        os.link(file, tmp_path / "b" / NAME / file.relative_to(tmp_path / NAME))
    second = tmp_path / "b" / NAME
    (second / "Manifest.json").unlink()
    (second / "Manifest.json").symlink_to(tmp_path / NAME / "Manifest.json")
    (second / "Data/ä").chmod(0o600)
    os.utime(second / "Data/deep/weight.bin", (1, 1))
    pack(second, tmp_path / "b.tar")
    assert (tmp_path / "b.tar").read_bytes() == first.read_bytes()


def test_an_empty_folder_is_one(tmp_path: Path) -> None:
    (tmp_path / "plots").mkdir()
    pack(tmp_path / "plots", tmp_path / "plots.tar")
    (tmp_path / "out").mkdir()
    unpack(tmp_path / "plots.tar", tmp_path / "out/plots")
    assert [path.name for path in tmp_path.glob("out/*")] == ["plots"]


def entry(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", again: str = "") -> Callable[[Path], None]:
    """Writes an archive of one entry, or of another one after it."""

    def write(to: Path) -> None:
        with tarfile.open(to, "w") as archive:
            for each in filter(None, (name, again)):
                info = tarfile.TarInfo(each)
                info.type, info.linkname = kind, link
                archive.addfile(info)

    return write


HOSTILE: dict[str, Callable[[Path], None]] = {
    "cut short": lambda to: to.write_bytes(packed(to.parent / "a").read_bytes()[:3000]) and None,
    "no archive": lambda to: to.write_bytes(b"x" * 2000) and None,
    "another folder": entry("q.mlpackage/x"),
    "a way out": entry(f"{NAME}/../../x"),
    "the root": entry("/x"),
    "a link": entry(f"{NAME}/x", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link": entry(f"{NAME}/x", tarfile.LNKTYPE, "../../x"),
    "a file in place of the folder": entry(NAME),
    "a file in a file": entry(f"{NAME}/f", again=f"{NAME}/f/x"),
    "no name": entry(f"{NAME}//x"),
    "a device": entry(f"{NAME}/x", tarfile.CHRTYPE),
}


@pytest.mark.parametrize("damage", HOSTILE)
def test_what_is_no_archive_of_the_folder_is_refused(damage: str, tmp_path: Path) -> None:
    HOSTILE[damage](tmp_path / "in.tar")
    (tmp_path / "out").mkdir()
    with pytest.raises(UnreadableError, match=f"in.tar: no whole archive of {NAME}"):
        unpack(tmp_path / "in.tar", tmp_path / "out" / NAME)
    outside = [path for path in tmp_path.rglob("*") if path.name in ("x", "q.mlpackage")]
    assert not outside


def test_an_archive_that_breaks_off_or_is_damaged_between_its_entries_is_refused(tmp_path: Path) -> None:
    archive = packed(tmp_path)
    content = archive.read_bytes()
    with tarfile.open(archive) as found:
        places = [*(entry.offset for entry in found.getmembers()[1:]), found.offset]
    assert len(places) == 4
    for at in places:
        cuts = (content[: at + more] for more in (0, 100, 512))
        for damaged in (*cuts, content[:at] + b"?" + content[at + 1 :]):
            archive.write_bytes(damaged)
            with pytest.raises(UnreadableError, match=f"no whole archive of {NAME}"):
                unpack(archive, tmp_path / "out" / NAME)
