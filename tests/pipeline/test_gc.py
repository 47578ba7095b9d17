"""Garbage collection frees what no build refers to, and nothing that one does."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from stored import Made, Outcome, entry, write_both
from typer.testing import CliRunner
from unprivileged import unprivileged

from shardmill.cli import app
from shardmill.convert.template import sample
from shardmill.errors import ShardmillError
from shardmill.pipeline.cache import gc, lock
from shardmill.pipeline.cache.lock import register
from shardmill.pipeline.cache.store import TEMPLATES, Store


@pytest.fixture
def builds(tmp_path: Path) -> Path:
    """Two models that share an entry, and one entry that nobody refers to any more."""
    folder = tmp_path / "build"
    shop = Store(folder / ".store")
    for model in ("one", "two"):
        Outcome(folder / model).perform(shop)
    Outcome(folder / "one" / "packages").perform(shop, params={"topology": "old"})
    Outcome(folder / "one" / "packages").perform(shop, params={"topology": "new"})
    return folder


def kept(builds: Path, **key: object) -> bool:
    return entry(Store(builds / ".store"), **key).exists()


def test_only_what_no_receipt_names_goes(builds: Path) -> None:
    files = {path for path in builds.rglob("*") if ".store" not in path.parts and path.is_file()}
    found = gc.collect(builds)
    assert (found.entries, found.bytes > 0) == (1, True)
    assert (kept(builds), kept(builds, params={"topology": "new"})) == (True, True)
    assert not kept(builds, params={"topology": "old"})
    assert all(path.is_file() for path in files)
    assert gc.collect(builds).entries == 0


def test_receipts_behind_a_link_count(builds: Path, tmp_path: Path) -> None:
    """As where a disk is full and a folder of a build was moved to another; links round and round end."""
    old = Store(builds / ".store")
    Outcome(builds / "one/moved").perform(old, params={"topology": "moved"})
    (builds / "one/moved").rename(tmp_path / "elsewhere")
    (builds / "one/moved").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/round").symlink_to(builds / "one")
    gc.collect(builds)
    assert kept(builds, params={"topology": "moved"})


def test_bytes_that_a_build_still_links_to_do_not_count_as_freed(builds: Path) -> None:
    def write_much(made: Made) -> None:
        write_both(made)
        (made["folder"] / "much").write_bytes(bytes(100_000))

    outcome = Outcome(builds / "three")
    outcome.perform(Store(builds / ".store"), write_much, code="other")
    outcome.receipt.unlink()
    assert gc.collect(builds, dry=True).bytes < 100_000
    (outcome.outputs["folder"] / "much").unlink()
    assert gc.collect(builds).bytes > 100_000


def test_what_killed_runs_left_goes(builds: Path) -> None:
    left = [builds / ".store/tmp-abc", builds / "one/packages/.making-head_0.mlpackage.x", builds / "two/.making-y"]
    for folder in left:
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "half").write_bytes(bytes(1000))
    found = gc.collect(builds)
    assert (found.entries, [folder.exists() for folder in left]) == (4, [False] * 3)
    assert found.bytes >= 3000


def test_templates_of_these_tools_stay_and_those_of_others_go(builds: Path) -> None:
    """They belong to no build: whatever is converted next may need them."""
    folder = builds / ".store" / TEMPLATES
    (current,) = gc.current_templates()
    sample.shared(folder / current, {"kind": 1}, lambda: [b"sample"])
    (folder / "of other tools").mkdir()
    (folder / "of other tools" / "a.json").write_text("{}")
    (folder / "of an older layout.json").write_text("{}")
    assert gc.collect(builds).entries == 3
    assert [path.name for path in folder.iterdir()] == [current]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"key": []}', "[" * 100_000])
def test_a_damaged_receipt_stops_it(builds: Path, content: str) -> None:
    """What it refers to is not known, so nothing may go."""
    receipt = builds / "two/a.receipt.json"
    receipt.write_text(content)
    with pytest.raises(ShardmillError, match=f"{receipt}: damaged"):
        gc.collect(builds)
    assert kept(builds, params={"topology": "old"})


def test_what_macos_leaves_beside_a_receipt_is_none(builds: Path) -> None:
    (builds / "one/._head_0.receipt.json").write_bytes(b"\0\5\x16\7")
    assert gc.collect(builds).entries == 1


def test_a_folder_without_a_store_is_left_alone(tmp_path: Path) -> None:
    """Its scratch folders may be somebody else's."""
    (tmp_path / ".making-x").mkdir()
    said = CliRunner().invoke(app, ["gc", str(tmp_path)])
    assert (said.exit_code, "there is no store" in said.stderr) == (1, True)
    assert [path.name for path in tmp_path.iterdir()] == [".making-x"]


def run_gc(*arguments: str) -> str:
    """What the command says; as its process would, it lets go of the build's lock in the end."""
    said = CliRunner().invoke(app, ["gc", *arguments])
    while lock._held:
        lock._held.pop().close()
    assert said.exit_code == 0
    return said.stdout


def test_the_command_says_what_would_go_before_it_goes(builds: Path) -> None:
    assert run_gc(str(builds), "--dry-run").startswith("would remove 1 entries")
    assert kept(builds, params={"topology": "old"})
    assert run_gc(str(builds)).startswith("removed 1 entries")
    assert not kept(builds, params={"topology": "old"})


@pytest.fixture
def sharing(builds: Path, tmp_path: Path) -> Path:
    """Another checkout's builds, with the same store by a link, and an entry that only they use."""
    other = tmp_path / "other" / "build"
    other.mkdir(parents=True)
    (other.parent / "Snakefile").touch()
    (other / ".store").symlink_to(builds / ".store")
    Outcome(other / "three").perform(Store(other / ".store"), params={"only": "here"})
    return other


def test_what_another_checkout_uses_stays(builds: Path, sharing: Path) -> None:
    """Whoever collects: the builds beside the store, or those that have it by a link."""
    for folder in (builds, sharing):
        gc.collect(folder)
        assert (kept(builds, params={"only": "here"}), kept(builds, params={"topology": "new"})) == (True, True)
    assert not kept(builds, params={"topology": "old"})


@pytest.mark.parametrize("end", ["gone", "another store"])
def test_a_checkout_that_no_longer_uses_the_store_keeps_nothing(builds: Path, sharing: Path, end: str) -> None:
    if end == "gone":
        shutil.rmtree(sharing)
    else:
        (sharing / ".store").unlink()
        (sharing / ".store").mkdir()
    note = noted(builds, sharing)
    gc.collect(builds, dry=True)
    assert note.exists()
    assert gc.collect(builds).entries == 2
    assert not kept(builds, params={"only": "here"})
    assert not note.exists()  # so that nothing is said of it again


def test_a_checkout_on_a_disk_that_is_not_there_is_not_forgotten(
    builds: Path, sharing: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty folder is in its place, as where a disk is mounted. One that was moved or removed is told."""
    disk = tmp_path / "disk"
    (disk / "checkout").mkdir(parents=True)
    moved = disk / "checkout/build"
    noted(builds, sharing).unlink()
    sharing.rename(moved)
    register(moved / ".store")
    aside = (disk / "checkout").rename(tmp_path / "aside")
    with pytest.raises(ShardmillError, match=rf"is gone with all that was in {disk}, where a disk may be missing"):
        gc.collect(builds)
    (disk / "another").mkdir()
    gc.collect(builds, dry=True)
    assert f"{moved} used this store and is gone; if it was moved, build or collect there first" in caplog.text
    aside.rename(disk / "checkout")
    gc.collect(builds)
    assert kept(builds, params={"only": "here"})


@pytest.mark.parametrize("content", [b"/a/b\0x\0host", b"/a/b\0\xff1\0host", b"/a/b\0001\0\xff\xfe"])
def test_a_note_that_is_damaged_stops_it(builds: Path, content: bytes) -> None:
    (builds / ".store/users").mkdir(exist_ok=True)
    (builds / ".store/users/0").write_bytes(content)
    with pytest.raises(ShardmillError, match="users/0: damaged, so which build it stands for is not known"):
        gc.collect(builds)


def noted(builds: Path, sharing: Path) -> Path:
    """The file by which the store knows of the other checkout."""
    (file,) = (file for file in (builds / ".store/users").iterdir() if os.fsencode(sharing) in file.read_bytes())
    return file


def test_a_checkout_of_another_machine_is_not_forgotten(
    builds: Path, sharing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder may be on a disk that only it has, where a folder of the same path is another one."""
    file = noted(builds, sharing)
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    assert gc.collect(builds, dry=True).entries == 1  # both folders can be seen from there, too
    aside = sharing.rename(sharing.with_name("aside"))
    unseen = f"is used by {sharing}, which of .* can't be seen from here; collect where it can be, or remove {file} if"
    for there in ("nothing", "another folder"):
        if there == "another folder":
            sharing.mkdir()
        with pytest.raises(ShardmillError, match=unseen):
            gc.collect(builds)
    assert kept(builds, params={"topology": "old"})
    file.unlink()
    shutil.rmtree(aside)
    assert gc.collect(builds).entries == 2


def test_a_build_that_may_not_be_read_stops_it(builds: Path, sharing: Path) -> None:
    (sharing / "three").chmod(0)
    code = (
        "import sys; from pathlib import Path; from shardmill.pipeline.cache import gc; gc.collect(Path(sys.argv[1]))"
    )
    command = [*unprivileged(), sys.executable, "-c", code, str(builds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (sharing / "three").chmod(0o755)
    assert done.returncode == 1 and "so nothing is removed" in done.stderr
    assert kept(builds, params={"topology": "old"})


def test_nothing_is_collected_while_a_job_of_another_checkout_works(builds: Path, sharing: Path) -> None:
    """Its scratch folder looks like one that a killed run left."""

    def collect_meanwhile(made: Made) -> None:
        said = CliRunner().invoke(app, ["gc", str(builds)])
        assert (said.exit_code, "a build is using this store" in said.stderr) == (1, True)
        while lock._held:
            lock._held.pop().close()
        write_both(made)

    assert Outcome(sharing / "four").perform(Store(sharing / ".store"), collect_meanwhile, code="new") is True
    assert run_gc(str(builds)).startswith("removed 1 entries")


def test_a_job_waits_for_a_collection(builds: Path) -> None:
    """What it finds in the store must not go while it links it."""
    lock.hold_store(builds / ".store")
    thread = threading.Thread(target=Outcome(builds / "five").perform, args=(Store(builds / ".store"),))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and not (builds / "five").exists()
    while lock._held:
        lock._held.pop().close()
    thread.join(20)
    assert (builds / "five/a.receipt.json").is_file()


def test_a_link_in_the_store_goes_and_its_target_stays(builds: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "entry.json").write_text("{}")
    (builds / ".store" / ("0" * 64)).symlink_to(tmp_path / "mine")
    assert gc.collect(builds).entries == 2
    assert (tmp_path / "mine" / "entry.json").is_file()
    assert not (builds / ".store" / ("0" * 64)).is_symlink()
