"""Killed, overtaken, out of space: the store holds whole entries or none, and so does every output."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patience import PATIENCE
from stored import Made, Outcome, entry, never, write_both

from shardmill.checkpoint.hashing import tree_hash
from shardmill.files import write_json
from shardmill.pipeline.cache import store
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action

TESTS = Path(__file__).parents[1]
KILLED = """
import signal, sys
from pathlib import Path
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action
root = Path(sys.argv[1])
def work(made):
    made["file"].write_text("half")
    print("working", flush=True)
    signal.pause()
Store(root / "store").perform(Action("step"), {"file": root / "out" / "a.json"}, root / "out" / "a.receipt.json", work)
"""


def test_killed_work_leaves_no_entry_and_no_output(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "store" / Action("step").key).exists()
    outcome, shop = Outcome(tmp_path / "out"), Store(tmp_path / "store")
    assert outcome.perform(shop) is True
    assert outcome.perform(shop, never) is False


SAME_KEY = """
import sys, time
from pathlib import Path
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.task import Action
root, name = Path(sys.argv[1]), sys.argv[2]
def work(made):
    (root / f"{name} works").touch()
    while not ((root / "one works").exists() and (root / "two works").exists()):
        time.sleep(0.01)
    made["folder"].mkdir()
    for i in range(20):
        (made["folder"] / str(i)).write_text(str(i))
folder = root / name
Store(root / "store").perform(Action("step"), {"folder": folder / "a.mlpackage"}, folder / "a.receipt.json", work)
"""


def test_two_processes_at_the_same_work(tmp_path: Path) -> None:
    """Both work at the same time, both get the whole of it, and one entry remains."""
    commands = [[sys.executable, "-c", SAME_KEY, str(tmp_path), name] for name in ("one", "two")]
    processes = [subprocess.Popen(command) for command in commands]
    assert [process.wait(timeout=PATIENCE) for process in processes] == [0, 0]
    hashes = {tree_hash(tmp_path / name / "a.mlpackage") for name in ("one", "two")}
    assert len(hashes) == 1
    left = {path.name for path in (tmp_path / "store").iterdir()} - {".lock", "hashes.sqlite", "users"}
    assert left == {Action("step").key}


def test_an_intact_entry_made_meanwhile_is_kept(shop: Store, here: Outcome, there: Outcome) -> None:
    """Another process may be linking from it this very moment."""
    kept: list[int] = []

    def overtaken(made: Made) -> None:
        there.perform(shop)
        kept.append(entry(shop).stat().st_ino)
        write_both(made)

    assert here.perform(shop, overtaken) is True
    assert entry(shop).stat().st_ino == kept[0]
    assert here.hashes() == there.hashes()


def disk_full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_while_working(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Path, "write_text", disk_full)


def full_while_recording(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "write_json", disk_full)


def full_while_adopting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "rename", disk_full)
    patch.setattr(Path, "rename", disk_full)


def full_while_placing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "link", disk_full)
    patch.setattr(shutil, "copy2", disk_full)
    patch.setattr(shutil, "copyfile", disk_full)


MOMENTS = [full_while_working, full_while_recording, full_while_adopting, full_while_placing]


@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_full_disk_leaves_nothing_half_written(
    shop: Store, here: Outcome, monkeypatch: pytest.MonkeyPatch, moment: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with monkeypatch.context() as patch:
        moment(patch)
        with pytest.raises(OSError, match="No space left") as error:
            here.perform(shop)
    assert error.value.errno == errno.ENOSPC
    assert not here.receipt.exists()
    assert here.names() == set()
    assert not any(path.name.startswith("tmp-") for path in shop.root.iterdir())
    here.perform(shop)
    assert here.hashes() == json.loads(here.receipt.read_text())["outputs"]


RESTORED = """
import sys
from pathlib import Path
from pipeline.test_store_faults import restore
restore(Path(sys.argv[1]))
print(sorted(set(sys.modules) & {"torch", "coremltools", "transformers", "pydantic"}))
"""


def converting(folder: Path) -> tuple[Any, dict[str, Path], Path, Store]:
    """What the convert step says of a part, where its package and receipt go, and the store."""
    from shardmill.pipeline.job import describe
    from shardmill.pipeline.steps import convert
    from shardmill.pipeline.task import Artifact

    arguments = {
        "part": folder / "part.json",
        "record": folder / "source.receipt.json",
        "recipe": Artifact(folder / "precision.json", "recipe", {}),
        "codes": [],
    }
    store = Store(folder / "store")
    task = describe(convert.task, arguments, store, {"code": "c", "packages": {}})
    return task, {"package": folder / "head_0.mlpackage"}, folder / "head_0.receipt.json", store


def restore(folder: Path) -> None:
    """Runs the step."""
    from shardmill.pipeline.job import perform

    assert not perform(*converting(folder))


def test_restoring_a_package_imports_nothing_heavy(tmp_path: Path) -> None:
    """The convert step on a hit, in a process of its own."""
    from shardmill import plan
    from shardmill.models.architecture import Graph
    from shardmill.models.contract import GraphSpec

    graph = Graph(hidden=96, heads=3, kv_heads=1, head_dim=32, rope_dim=24, ffn=128, rms_norm_eps=1e-5)
    plan.write_part(tmp_path / "part.json", plan.Part("head_0", GraphSpec("head", graph, rows=1, tokens=4)))

    write_json(tmp_path / "precision.json", {"schema": 1, "default": "int8", "matrices": {}})

    def work(made: Made) -> None:
        made["package"].mkdir()
        (made["package"] / "Manifest.json").write_text("{}")

    task, outputs, receipt, store = converting(tmp_path)
    store.perform(task.action, outputs, receipt, work)
    before = receipt.read_text()
    shutil.rmtree(outputs["package"])
    receipt.unlink()
    command = [sys.executable, "-c", RESTORED, str(tmp_path)]
    tests = {"PYTHONPATH": os.pathsep.join(map(str, [TESTS, *filter(None, sys.path)]))}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | tests)
    assert done.stdout == "[]\n"
    assert (outputs["package"] / "Manifest.json").read_text() == "{}"
    assert receipt.read_text() == before
