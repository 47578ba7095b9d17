"""A model in another process: the same numbers, errors as they are, and an end at any time."""

from __future__ import annotations

import gc
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
import tiny
from bench.folder import build_folder
from drafted_decoding import Engine as Protocol
from patience import PATIENCE

from shardmill.errors import ShardmillError
from shardmill.runtime import engine, process
from shardmill.runtime.bundles import on_program_load, report_load
from shardmill.runtime.manifest import read_manifest
from shardmill.runtime.process import Remote, start_engine


@pytest.fixture(scope="module")
def folder(built: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build."""
    return build_folder(built, tmp_path_factory.mktemp("process"))


@pytest.fixture(scope="module")
def running(folder: Path) -> Remote:
    return start_engine(folder, "fp32")


def fed(model: Protocol, tokens: list[int], width: int) -> Any:
    """The logits of a text in passes of a width."""
    model.reset()
    spans = [list(range(i, min(i + width, len(tokens)))) for i in range(0, len(tokens), width)]
    return np.concatenate([model.forward([tokens[i] for i in span], span, span) for span in spans])


def test_it_gives_what_the_model_gives_in_this_process(built: tiny.Build, folder: Path, running: Remote) -> None:
    here, text = engine.load(folder, "fp32"), list(built.text[:12])
    assert (running.slots, running.vocab, running.widths) == (here.slots, here.vocab, here.widths)
    assert running.verify == here.verify
    for width in (1, 4):
        limit = limits.model(tiny.LAYERS, tiny.FFN)  # the other process may have another number of threads
        limits.rows_agree(f"passes of {width}", fed(running, text, width), fed(here, text, width), limit)
    assert running.rewindable(3) == here.rewindable(3) and running.undoable(3) == here.undoable(3)


def test_logits_stay_as_they_were_when_the_next_pass_runs(built: tiny.Build, running: Remote) -> None:
    running.reset()
    first = running.forward([built.text[0]], [0], [0])
    before = first.copy()
    running.forward([built.text[1]], [1], [1])
    np.testing.assert_array_equal(first, before)


def test_it_has_every_member_of_the_protocol_and_no_other(running: Remote) -> None:
    """A name that the model lacks is refused here, and so is what begins with an underscore."""
    members = {name for name in vars(Protocol) if not name.startswith("_")}
    assert len(members) > 20 and [name for name in members if not hasattr(running, name)] == []
    for name in ("forwards", "table", "programs", "_move"):
        with pytest.raises(AttributeError, match=f"Engine has no method {name}"):
            getattr(running, name)


def test_an_array_of_any_shape_comes_as_it_is(built: tiny.Build, folder: Path, running: Remote) -> None:
    """Through shared memory, as far as that has room for it."""
    fed = (list(built.text[:3]), [0, 1, 2], [0, 1, 2])
    here = engine.load(folder, "fp32")
    assert here.hidden(*fed).ndim == 4 and here.hidden(*fed).nbytes <= len(running.process.memory)
    limit = limits.model(tiny.LAYERS, tiny.FFN)
    found, expected = (model.hidden(*fed)[0, :, :, 0].T for model in (running, here))
    limits.rows_agree("hidden", found, expected, limit)
    every = list(range(here.vocab))
    assert here.table[every].nbytes > len(running.process.memory)
    np.testing.assert_array_equal(running.process.call("table.__getitem__", every), here.table[every])


def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next(running: Remote) -> None:
    """As after Ctrl-C in a chat."""
    running.reset()
    running.process._calls += 1
    running.process.connection.send(("reset", ()))
    assert running.process.call("rewindable", 0) is True


def test_an_error_of_the_model_comes_with_where_it_arose_and_the_next_call_works(running: Remote) -> None:
    with pytest.raises(AttributeError) as raised:
        running.process.call("nothing")
    assert any("_answer" in note for note in raised.value.__notes__)
    running.reset()


@pytest.mark.thorough
def test_each_program_is_told_of_when_its_load_begins(folder: Path) -> None:
    names: list[str] = []
    with on_program_load(names.append):
        start_engine(folder, "fp32").process.close()
    assert names == [part["name"] for part in read_manifest(folder)["parts"]]


def test_what_can_not_be_loaded_is_told_in_the_words_of_the_load(tmp_path: Path) -> None:
    with pytest.raises(ShardmillError, match="build the model first"):
        start_engine(tmp_path, "fp32")


def test_what_may_be_damaged_is_to_be_verified(folder: Path, tmp_path: Path) -> None:
    build = shutil.copytree(folder, tmp_path / "build", symlinks=True)
    table = build / read_manifest(folder)["embedding"]["path"]
    table.unlink()
    table.write_bytes(b"cut short")
    with pytest.raises(ShardmillError, match=rf"embedding table \(.*\); `shardmill verify {build}` tells whether"):
        start_engine(build, "fp32")


@pytest.mark.thorough
def test_a_child_that_dies_is_told_of_by_its_signal(folder: Path) -> None:
    model = start_engine(folder, "fp32")
    waiting = threading.Timer(0.2, model.process.child.send_signal, [signal.SIGSEGV])
    waiting.start()
    with pytest.raises(ShardmillError, match=r"ended with SIGSEGV; start the command again"):
        while True:
            model.reset()
    with pytest.raises(ShardmillError, match="SIGSEGV"):
        model.reset()


@pytest.mark.thorough
def test_a_child_that_dies_while_nobody_calls_it_is_told_of(folder: Path) -> None:
    """By the same words. To be told of it keeps nothing alive."""
    told: queue.Queue[Exception] = queue.Queue()
    remote = start_engine(folder, "fp32")
    remote.process.when_gone(told.put)
    child = remote.process.child
    assert child.poll() is None and told.empty()
    child.kill()
    assert f"the programs of {folder} ended with SIGKILL" in str(told.get(timeout=PATIENCE))
    other = start_engine(folder, "fp32")
    other.process.when_gone(told.put)
    child = other.process.child
    del other
    gc.collect()
    assert child.poll() is not None


def test_it_ends_when_it_is_no_longer_needed(folder: Path) -> None:
    model = start_engine(folder, "fp32")
    child = model.process.child
    del model
    gc.collect()
    assert child.returncode is not None


@pytest.mark.thorough
def test_it_ends_with_a_parent_that_is_killed(folder: Path) -> None:
    """Its socket closes then."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom shardmill.runtime.process import start_engine\n"
        "model = start_engine(Path(sys.argv[1]), 'fp32')\nprint(model.process.child.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        handle = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        parent.kill()
    if handle is None:
        pytest.skip("this system has no file descriptors of processes, by which to wait for a grandchild")
    assert select.select([handle], [], [], PATIENCE)[0]  # readable once the process has ended


def test_a_terminal_shows_how_far_a_load_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens around it, as a server that is asked for its health, hears it too."""
    shown: list[str] = []
    heard: list[str] = []
    parts = [part["name"] for part in read_manifest(folder)["parts"]]
    clock = iter([100.0, 130.0, 160.0, 190.0, 220.0])

    def loading(*_: object) -> None:
        for name in (*parts, "draft_layers"):
            report_load(name)

    monkeypatch.setattr(process, "start_engine", loading)
    monkeypatch.setattr("rich.status.Status.update", lambda _, text: shown.append(text))
    monkeypatch.setattr(process.bundles, "program_bytes", lambda build, part: 10 if part["name"] == parts[0] else 5)
    monkeypatch.setattr("shardmill.runtime.process.time.perf_counter", lambda: next(clock))
    with on_program_load(heard.append):
        process.load_engine(folder, "fp32")
    assert len(parts) == 5 and heard == [*parts, "draft_layers"]
    assert [line.removeprefix(f"loading {folder}: ") for line in shown] == [
        f"[1/5] {parts[0]}",
        f"[2/5] {parts[1]}, about 60 s left",
        f"[3/5] {parts[2]}, about 60 s left",
        f"[4/5] {parts[3]}, about 45 s left",
        f"[5/5] {parts[4]}, about 24 s left",
    ]
