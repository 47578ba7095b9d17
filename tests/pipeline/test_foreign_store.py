"""A store that may only be read, as another user's: it serves what it has."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored import Outcome
from unprivileged import unprivileged

from shardmill.errors import ShardmillError
from shardmill.pipeline.cache.entry import restored
from shardmill.pipeline.cache.store import Store

AGAIN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from stored import Outcome
from shardmill.pipeline.cache.store import Store
folder, changes = Path(sys.argv[1]), []
def never(made):
    raise PermissionError(13, "Permission denied", "the work")
shop = Store(folder / "build/.store", lambda: changes.append("withdrawn"))
for _ in range(2):
    worked = Outcome(folder / "build/one").perform(shop, never, params=json.loads(sys.argv[3]))
    print(worked, changes)
"""


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[Path]:
    """A checkout whose store is a link to one that may only be read."""
    root = tmp_path / "theirs/build/.store"
    Outcome(tmp_path / "theirs/build/one").perform(Store(root))
    (tmp_path / "mine/build").mkdir(parents=True)
    (tmp_path / "mine/build/.store").symlink_to(root)
    paths = [root, *root.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield tmp_path / "mine"
    for path in paths:
        if path.is_dir():
            path.chmod(0o755)


def test_what_is_damaged_there_is_named_with_the_remedy(
    foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk rots without a new time of change, so only the bytes tell, after the entry was believed."""
    (damaged,) = (foreign / "build/.store").rglob("data.bin")
    damaged.chmod(0o644)
    damaged.write_bytes(b"rotten")
    store = foreign / "build/.store"
    key = damaged.relative_to(store).parts[0]

    def refused(path: Path, target: Path) -> Path:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "rename", refused)  # root, which may run the tests, may rename it
    with pytest.raises(ShardmillError, match=f"{key}: damaged, and this store may only be read; ask its owner"):
        restored(store / key, {"folder": tmp_path / "folder.mlpackage", "file": tmp_path / "file.json"})


def again(checkout: Path, **params: object) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[1]
    command = [*unprivileged(), sys.executable, "-c", AGAIN, str(checkout), str(tests), json.dumps(params)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_what_it_has_is_taken(foreign: Path) -> None:
    """The second time nothing is withdrawn either: what a build did last it remembers by itself."""
    done = again(foreign)
    assert done.stdout.splitlines() == ["False ['withdrawn']", "False ['withdrawn']"], done.stderr
    assert (foreign / "build/one/a.receipt.json").is_file()


def test_what_it_has_not_can_t_be_made_there(foreign: Path) -> None:
    done = again(foreign, other="work")
    assert done.returncode == 1 and "PermissionError" in done.stderr and "the work" not in done.stderr
