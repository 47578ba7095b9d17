"""One spelling of JSON, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from shardmill.errors import UnreadableError
from shardmill.files import digest, dumps, give_back, how_to_build, read_json, replacing, write_json, write_text
from shardmill.pipeline import code_digest


def test_equal_content_has_one_spelling() -> None:
    one, other = {"b": [1, 2.5], "a": "é"}, {"a": "é", "b": [1, 2.5]}
    assert dumps(one) == dumps(other) == '{\n "a": "é",\n "b": [\n  1,\n  2.5\n ]\n}\n'
    assert digest(one) == digest(other) != digest({"a": "e", "b": [1, 2.5]})


def test_what_json_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        dumps({"x": float("nan")})


def test_tuples_and_lists_are_the_same_content() -> None:
    assert digest((1, (2,))) == digest([1, [2]])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert json.loads(path.read_text()) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_the_place_of_one_that_is_not_empty(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "folder"
    for content in ("old", "new"):
        with replacing(path) as temporary:
            temporary.mkdir()
            (temporary / content).write_text(content)
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_is_not_lost_when_nothing_was_made_to_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "kept").write_text("kept")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert (path / "kept").read_text() == "kept"
    assert list(tmp_path.iterdir()) == [path]


def test_nobody_sees_a_file_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with replacing(path) as temporary:
        temporary.write_text("whole")
        assert not path.exists()
        assert temporary.stat().st_dev == path.parent.stat().st_dev  # a rename within one file system
    assert path.read_text() == "whole"


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000], ids=len)
def test_what_can_not_be_read_is_one_line_with_the_remedy(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(raw)
    with pytest.raises(UnreadableError) as caught:
        read_json(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: can't be read (damaged: ") and line.endswith("remove it and build again")
    assert "\n" not in line and len(line) < len(str(path)) + 300


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """A FIFO and a device have no end, a folder no content."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("fifo", "folder", "absent", "device"):
        with pytest.raises(UnreadableError, match=f"{name}: can't be read"):
            read_json(tmp_path / name)


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_a_file_takes_the_place_of_files_only(tmp_path: Path, kind: str) -> None:
    """A folder would be gone with all that is in it."""
    target = tmp_path / "target"
    if kind == "folder":
        target.mkdir()
        (target / "precious").touch()
    else:
        os.mkfifo(target)
    with pytest.raises(OSError, match="exists and is not a regular file"):
        write_text(target, "text")
    assert (target / "precious").exists() if kind == "folder" else target.is_fifo()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_wrote_for_somebody_is_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with all that is in it; where a link leads stays whose it is."""
    (tmp_path / "cache/compiled").mkdir(parents=True)
    (tmp_path / "others").touch()
    (tmp_path / "cache/link").symlink_to(tmp_path / "others")
    inside = ["cache", "cache/compiled", "cache/link"]
    give_back(tmp_path / "cache")
    assert {(tmp_path / name).lstat().st_uid for name in inside} == {0}
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "23456")
    give_back(tmp_path / "cache")
    give_back(tmp_path / "nowhere")
    assert {(tmp_path / name).lstat().st_uid for name in inside} == {12345}
    assert (tmp_path / "others").stat().st_uid == 0


def test_a_build_s_command_names_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/small.yaml").touch()
    command = "snakemake --cores 4 all"
    assert how_to_build(Path("build/demo")) == command
    assert how_to_build(Path("build/small")) == f"{command} --configfile configs/small.yaml"
    assert how_to_build(Path("build/other")) == f"{command} --configfile CONFIG"


@pytest.mark.parametrize("writes", [True, False])
def test_nothing_is_kept_beside_compiled_files_where_python_writes_none(writes: bool, tmp_path: Path) -> None:
    """Two modules keep something: the digests of modules, and what importing torch takes."""
    ask = "from shardmill.pipeline import code_digest, resources\nfor one in (code_digest, resources): print(one.KEPT)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"XDG_CACHE_HOME": str(tmp_path)} | ({} if writes else {"PYTHONDONTWRITEBYTECODE": "1"})
    command = [sys.executable, "-c", ask]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    found = [Path(line) for line in said.splitlines()]
    beside = Path(cache_from_source(code_digest.__file__)).parent
    assert [path.name.split(".")[0] for path in found] == ["code_digest", "resources"]
    assert {path.parent == beside for path in found} == {writes}
    assert {path.is_relative_to(tmp_path) for path in found} == {not writes}
