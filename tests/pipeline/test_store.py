"""The store: work is done once, restored whole, checked before it is trusted, and never half there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from stored import Made, Outcome, entry, never, write_both

from shardmill.errors import ShardmillError
from shardmill.files import SEAL, dumps
from shardmill.pipeline.cache import entry as entries
from shardmill.pipeline.cache.store import Action, Store, key_differences


def test_a_hit_restores_everything_without_work(shop: Store, here: Outcome, there: Outcome) -> None:
    assert here.perform(shop) is True
    assert there.perform(shop, never) is False
    assert there.hashes() == here.hashes() == json.loads(there.receipt.read_text())["outputs"]
    assert here.receipt.read_bytes() == there.receipt.read_bytes()
    assert (there.outputs["folder"] / "deep" / "data.bin").samefile(here.outputs["folder"] / "deep" / "data.bin")


def test_a_file_is_a_builds_own(shop: Store, here: Outcome, there: Outcome) -> None:
    """Snakemake sets its time, which must not make another build look old, and wants to be able to write it."""
    here.perform(shop)
    there.perform(shop, never)
    before = here.outputs["file"].stat().st_mtime_ns
    os.utime(there.outputs["file"])
    assert here.outputs["file"].stat().st_mtime_ns == before
    assert here.outputs["file"].stat().st_mode & stat.S_IWUSR
    assert entries.stamps(entry(shop)) == json.loads((entry(shop) / entries.STAMPS).read_text())


@pytest.mark.parametrize("key", [{"inputs": {"a": "1"}}, {"params": {"a": 1}}, {"code": "1"}, {"packages": {"a": "1"}}])
def test_every_ingredient_decides(shop: Store, here: Outcome, key: dict[str, object]) -> None:
    here.perform(shop)
    assert here.perform(shop, **key) is True
    assert here.perform(shop, never) is False  # and back again costs nothing


def test_receipts_are_canonical_and_say_nothing_of_place_or_time(shop: Store, here: Outcome, tmp_path: Path) -> None:
    here.perform(shop, inputs={"z": "1", "a": "2"}, params={"n": 1})
    text = here.receipt.read_text()
    content = json.loads(text)
    assert text == dumps(content)
    assert set(content) == {"step", "inputs", "params", "code", "packages", "key", "outputs", "files", "paths", SEAL}
    assert content["paths"] == {"file": "a.json", "folder": "a.mlpackage"}
    assert content["files"] == {"folder": {"deep/data.bin": hashlib.sha256(b"\x00\x01").hexdigest()}}
    assert str(tmp_path) not in text
    other = Outcome(tmp_path / "elsewhere")
    other.perform(Store(tmp_path / "another store"), params={"n": 1}, inputs={"a": "2", "z": "1"})
    assert other.receipt.read_text() == text


def test_nobody_can_edit_shared_bytes_in_place(shop: Store, here: Outcome) -> None:
    here.perform(shop)
    shared = (here.outputs["folder"] / "deep" / "data.bin").stat()
    assert stat.S_IMODE(shared.st_mode) == 0o444
    assert shared.st_nlink > 1


def damage_output(folder: Path) -> None:
    file = folder / "folder.mlpackage" / "deep" / "data.bin"
    file.chmod(0o644)
    file.write_bytes(b"\x00\x02")


def put(at: Path, make: Callable[[Path], object]) -> None:
    """Something else in the place of a file or a folder."""
    shutil.rmtree(at) if at.is_dir() else at.unlink()
    make(at)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a changed byte": damage_output,
    "a truncated file": lambda e: os.truncate(e / "file.json", 0) if not (e / "file.json").chmod(0o644) else None,
    "a missing file": lambda e: (e / "file.json").unlink(),
    "a missing folder": lambda e: shutil.rmtree(e / "folder.mlpackage"),
    "a file more in a folder": lambda e: (e / "folder.mlpackage" / "more").write_text(""),
    "a pipe for a file": lambda e: put(e / "file.json", os.mkfifo),
    "a pipe for a folder": lambda e: put(e / "folder.mlpackage", os.mkfifo),
    "a pipe in a folder": lambda e: put(e / "folder.mlpackage" / "deep" / "data.bin", os.mkfifo),
    "a pipe for the entry": lambda e: put(e, os.mkfifo),
    "a link to nothing for the entry": lambda e: put(e, lambda at: at.symlink_to("nothing")),
    "a link to itself for the entry": lambda e: put(e, lambda at: at.symlink_to(at.name)),
    "no record": lambda e: (e / "entry.json").unlink(),
    "half a record": lambda e: (e / "entry.json").write_text("{"),
    "another record": lambda e: (e / "entry.json").write_text("[1]"),
    "a record without hashes": lambda e: (e / "entry.json").write_text('{"file": {}, "folder": {}}'),
    "a record of nothing": lambda e: (e / "entry.json").write_text("{}"),
    "a record of another hash within a folder": lambda e: (e / "entry.json").write_text(
        re.sub(r'(data.bin": ")[0-9a-f]{64}', r"\g<1>" + "0" * 64, (e / "entry.json").read_text())
    ),
    "a record of other hashes": lambda e: (e / "entry.json").write_text(
        re.sub(r"[0-9a-f]{64}", "0" * 64, (e / "entry.json").read_text())
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again(shop: Store, here: Outcome, there: Outcome, damage: str) -> None:
    here.perform(shop)
    whole = here.hashes()
    DAMAGES[damage](entry(shop))
    assert there.perform(shop) is True
    assert there.hashes() == whole
    assert there.perform(shop, never) is False
    assert not list(shop.root.glob("tmp-*"))


def test_work_is_done_beside_the_entries(shop: Store, here: Outcome) -> None:
    """So that an entry appears by a rename within one file system, which is atomic."""

    def look(made: Made) -> None:
        assert {path.parents[2] for path in made.values()} == {shop.root}
        write_both(made)

    here.perform(shop, look)


def test_failed_work_leaves_nothing(shop: Store, here: Outcome) -> None:
    def fail(made: Made) -> None:
        write_both(made)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        here.perform(shop, fail)
    assert here.names() == set()
    assert [path for path in shop.root.iterdir() if path.name not in (".lock", "hashes.sqlite", "users")] == []


def test_failed_work_leaves_the_last_outputs(shop: Store, here: Outcome) -> None:
    here.perform(shop)
    before = here.hashes()
    with pytest.raises(AssertionError):
        here.perform(shop, never, code="changed")
    assert here.hashes() == before


def test_the_reason_for_work_names_the_ingredient(shop: Store, here: Outcome, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="shardmill")
    here.perform(shop, params={"rope": {"scale": 1.0}}, packages={"torch": "1"})
    assert "not made before" in caplog.text
    caplog.clear()
    here.receipt.unlink()  # Snakemake removes a job's outputs before it runs
    here.perform(shop, params={"rope": {"scale": 2.0}}, packages={"torch": "2"})
    assert "packages.torch, params.rope.scale" in caplog.text


def test_differences_name_leaves() -> None:
    before = {"inputs": {"a": "1", "b": "2"}, "params": {"rope": {"scale": 1}}, "code": "x"}
    assert key_differences(before, before) == []
    assert key_differences(before, {**before, "code": "y"}) == ["code"]
    assert key_differences(before, {**before, "inputs": {"a": "1", "c": "2"}}) == ["inputs.b", "inputs.c"]
    assert key_differences(before, {**before, "params": {"rope": {"scale": 2}}}) == ["params.rope.scale"]


def rot(file: Path) -> None:
    """Flips a bit as a disk does: size and times of the file stay."""
    before = file.stat()
    file.chmod(0o644)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    file.chmod(before.st_mode)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("file", ["folder.mlpackage/deep/data.bin", "file.json", "entry.json"])
def test_what_rotted_in_the_store_is_not_shipped(shop: Store, here: Outcome, there: Outcome, file: str) -> None:
    """The builds share the stored bytes by hard links: the entry is dropped and made again, and so is the output."""
    here.perform(shop)
    whole = here.hashes()
    rot(entry(shop) / file)
    assert here.perform(shop) is True
    assert here.hashes() == whole == json.loads(here.receipt.read_text())["outputs"]
    assert there.perform(shop, never) is False
    assert there.hashes() == whole


def test_a_store_that_never_holds_what_was_written_ends_the_job(
    shop: Store, here: Outcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Working again and again would not help."""
    monkeypatch.setattr(
        entries, "tree_hashes", lambda path, real=entries.tree_hashes: (real(path)[0], {"x": str(path)})
    )
    with pytest.raises(ShardmillError, match="not what was just written"):
        here.perform(shop)
    assert here.names() == set()


def test_to_foretell_a_build_reads_no_gigabytes(shop: Store, here: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    """`shardmill why` looks at every entry; what was hashed when it was made is believed there."""
    here.perform(shop)
    read: list[Path] = []
    monkeypatch.setattr(entries, "tree_hashes", read.append)
    assert entries.intact(entry(shop)) is True
    assert read == []


@pytest.mark.parametrize("record", ["entry.json", "stamps.json"])
def test_a_record_too_deep_to_parse_is_a_damaged_one(shop: Store, here: Outcome, record: str) -> None:
    here.perform(shop)
    (entry(shop) / record).chmod(0o644)
    (entry(shop) / record).write_text("[" * 100_000)
    assert here.perform(shop) is True
    shop.last(here.receipt).write_text("[" * 100_000)
    assert shop.reason(Action("step"), here.receipt) == "not made before"


@pytest.mark.parametrize("fault", ["rotten", "a file less", "gone"])
def test_work_on_what_is_not_what_was_made_is_refused(shop: Store, tmp_path: Path, fault: str) -> None:
    """Its result would be kept under the key of the sound one. Snakemake's mark in a folder is no fault."""
    package, receipt = tmp_path / "a.mlpackage", tmp_path / "a.receipt.json"
    bundle, compiled = tmp_path / "a.mlmodelc", tmp_path / "b.receipt.json"

    def convert(made: Made) -> None:
        made["package"].mkdir()
        (made["package"] / "weights").write_text("weights")
        (made["package"] / "model").write_text("model")

    def compiles(made: Made) -> None:
        made["bundle"].mkdir()
        shutil.copyfile(package / "weights", made["bundle"] / "weights")

    def run() -> bool:
        return shop.perform(Action("compile"), {"bundle": bundle}, compiled, compiles, {package: receipt})

    shop.perform(Action("convert"), {"package": package}, receipt, convert)
    (package / ".snakemake_timestamp").touch()
    if fault == "rotten":
        rot(package / "weights")
    else:
        (package / "model").unlink() if fault == "a file less" else shutil.rmtree(package)
    with pytest.raises(ShardmillError, match=r"a\.mlpackage: not the bytes that were made; remove it and build again"):
        run()
    assert not bundle.exists() and not compiled.exists()
    shutil.rmtree(package, ignore_errors=True)
    shop.perform(Action("convert"), {"package": package}, receipt, convert)
    assert run() is True
    assert (bundle / "weights").read_text() == "weights"


def test_who_must_know_is_told_before_an_output_changes_and_only_then(tmp_path: Path) -> None:
    """A finished build stands while its jobs find what they made before, and falls before anything else is there."""
    told: list[bool] = []
    here = Outcome(tmp_path / "here")
    shop = Store(tmp_path / "store", before_change=lambda: told.append(here.outputs["file"].exists()))
    here.perform(shop, params={"topology": "old"})
    assert told == [False]
    here.outputs["file"].unlink()  # as Snakemake does before a job
    here.receipt.unlink()
    here.perform(shop, params={"topology": "old"})
    assert told == [False]
    here.perform(shop, params={"topology": "new"})
    assert told == [False, True]
    here.perform(shop, params={"topology": "old"})  # from the store, but it is another output
    assert told == [False, True, True]
    shutil.rmtree(entry(shop, params={"topology": "old"}))
    here.perform(shop, params={"topology": "old"})
    assert told == [False, True, True, True]


def test_work_that_may_not_be_kept_leaves_nothing(tmp_path: Path) -> None:
    """Its code changed while it ran, say: under that key there must be no result of other code."""

    def refuse() -> None:
        raise ShardmillError("not the code that the key names")

    here, shop = Outcome(tmp_path / "here"), Store(tmp_path / "store", before_keeping=refuse)
    with pytest.raises(ShardmillError, match="not the code"):
        here.perform(shop)
    assert not entry(shop).exists()
    assert here.names() == set()
