"""Scratch folders of the store: each is somebody's, or is removed by whoever comes next."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardmill.pipeline.cache.entry import aside, scratch_folder

AT_WORK = """
import signal, sys
from pathlib import Path
from shardmill.pipeline.cache.entry import scratch_folder
with scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"half")
    print(folder, flush=True)
    signal.pause()
"""


@contextmanager
def another(store: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Another process at work, and its scratch folder."""
    with subprocess.Popen([sys.executable, "-c", AT_WORK, str(store)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().rstrip()), process
        process.kill()


def test_nothing_is_left_of_what_became_no_entry(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_folder(tmp_path / "store") as folder:
        (folder / "weights").write_bytes(b"half")
        raise RuntimeError
    assert list((tmp_path / "store").iterdir()) == []


def test_what_became_an_entry_stays(tmp_path: Path) -> None:
    with scratch_folder(tmp_path) as folder:
        folder.rename(tmp_path / "entry")
    assert list(tmp_path.iterdir()) == [tmp_path / "entry"]


def test_a_killed_process_leaves_what_the_next_one_removes(tmp_path: Path) -> None:
    with another(tmp_path) as (left, process):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (left / "weights").exists()
    with scratch_folder(tmp_path) as folder:
        assert {path for path in tmp_path.iterdir() if path.is_dir()} == {folder.parent}
    assert list(tmp_path.iterdir()) == []


def test_nobody_elses_folder_is_touched_while_it_is_in_use(tmp_path: Path) -> None:
    gone = aside(tmp_path)
    gone.mkdir()  # an entry that somebody just dropped; it has no lock
    with another(tmp_path) as (used, process), scratch_folder(tmp_path) as folder:
        assert (used / "weights").exists() and process.poll() is None
        assert {path for path in tmp_path.iterdir() if path.is_dir()} == {folder.parent, used.parent, gone}
