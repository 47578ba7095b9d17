"""Garbage collection frees what no build refers to, and nothing that one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from stored import Made, Outcome, entry, write_both
from typer.testing import CliRunner
from unprivileged import unprivileged

from shardmill.cli import app
from shardmill.convert.cache import cached
from shardmill.errors import ShardmillError
from shardmill.pipeline.cache import gc, lock
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
    cached(folder / current, {"kind": 1}, lambda: b"program")
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


def test_a_store_that_checkouts_have_shared_by_a_link_is_left_alone(builds: Path) -> None:
    """Older versions noted each of them there; what the others use can't be told any more."""
    notes = builds / ".store/users"
    notes.mkdir()
    (notes / "0").touch()
    assert gc.collect(builds, dry=True).entries == 1
    (notes / "1").touch()
    with pytest.raises(ShardmillError, match=r"have shared it by a link; .* as docs/sharing.md says; then remove"):
        gc.collect(builds)
    assert kept(builds, params={"topology": "old"})


def test_a_build_that_may_not_be_read_stops_it(builds: Path) -> None:
    (builds / "two").chmod(0)
    code = (
        "import sys; from pathlib import Path; from shardmill.pipeline.cache import gc; gc.collect(Path(sys.argv[1]))"
    )
    command = [*unprivileged(), sys.executable, "-c", code, str(builds)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (builds / "two").chmod(0o755)
    assert done.returncode == 1 and "so nothing is removed" in done.stderr
    assert kept(builds, params={"topology": "old"})


def test_a_link_in_the_store_goes_and_its_target_stays(builds: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "entry.json").write_text("{}")
    (builds / ".store" / ("0" * 64)).symlink_to(tmp_path / "mine")
    assert gc.collect(builds).entries == 2
    assert (tmp_path / "mine" / "entry.json").is_file()
    assert not (builds / ".store" / ("0" * 64)).is_symlink()
