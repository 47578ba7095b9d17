"""Fetching from a local folder: what is linked, what is copied, and what is refused."""

import os
import time
from pathlib import Path

import pytest
from safetensors.numpy import save

from shardmill.checkpoint import hashing
from shardmill.checkpoint.cache import RACY_NS, HashCache
from shardmill.checkpoint.fetch import fetch
from shardmill.checkpoint.headers import read_tensors
from shardmill.errors import CheckpointError

from .hub_server import COMMIT, REPO
from .samples import two_file_checkpoint


def local(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, content in two_file_checkpoint().items():
        (folder / name).write_bytes(content)
    return folder


def fetch_local(folder: Path, dest: Path) -> dict:
    return fetch(path=folder, repo=None, revision=None, dest=dest, cache=None)


def test_local_folder_is_linked(tmp_path: Path) -> None:
    """Local weights take no second place on the disk; the build keeps them when the original is replaced."""
    folder, dest = local(tmp_path), tmp_path / "build" / "source"
    record = fetch_local(folder, dest)
    name = "model-00001-of-00002.safetensors"
    assert record["commit"] == "local" and record["repo"] is None
    assert (dest / name).samefile(folder / name)
    assert not (dest / "config.json").samefile(folder / "config.json")
    (folder / name).unlink()
    assert len(read_tensors(dest)) == 3


def test_what_macos_leaves_in_a_folder_is_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    """On a disk of another system each file has a second one beside it, of the same ending."""
    folder = local(tmp_path)
    before = fetch_local(folder, tmp_path / "one")
    for name in (".DS_Store", "._config.json", "._model-00001-of-00002.safetensors"):
        (folder / name).write_bytes(b"\0\5\x16\7")
    assert fetch_local(folder, tmp_path / "two") == before


def test_the_template_for_tools_comes_along(tmp_path: Path) -> None:
    """transformers reads the same templates from the build's folder as from the checkpoint's."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoTokenizer

    folder = local(tmp_path)
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    for name in ("tool_use.jinja", "._tool_use.jinja", "notes.txt"):
        (folder / "additional_chat_templates" / name).write_text("with tools")
    files = fetch_local(folder, tmp_path / "build")["files"]
    assert [name for name in files if "/" in name] == ["additional_chat_templates/tool_use.jinja"]
    read = AutoTokenizer.from_pretrained(tmp_path / "build").chat_template
    assert read == {"default": "plain", "tool_use": "with tools"}


def test_linked_weights_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link that the build adds moves the file's ctime; gigabytes are not read again for that."""
    folder, cache = local(tmp_path), HashCache(tmp_path / "hashes.sqlite")
    now = time.time_ns() + 10 * RACY_NS
    monkeypatch.setattr(time, "time_ns", lambda: now)
    time.sleep(0.02)  # let ctime tick
    fetch(path=folder, repo=None, revision=None, dest=tmp_path / "one", cache=cache)
    read: list[Path] = []
    digest = hashing._digest_span
    monkeypatch.setattr(hashing, "_digest_span", lambda path, span: read.append(path) or digest(path, span))
    fetch(path=folder, repo=None, revision=None, dest=tmp_path / "two", cache=cache)
    fetch(path=folder, repo=None, revision=None, dest=tmp_path / "one", cache=cache)
    (folder / "config.json").write_text('{"changed": 1}')  # the build's folder is made anew, its old links go
    fetch(path=folder, repo=None, revision=None, dest=tmp_path / "one", cache=cache)
    hashing.hash_files((tmp_path / "one").glob("*.safetensors"), cache)
    assert not [path for path in read if path.name.endswith(".safetensors")]


def test_local_folder_on_another_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard links the build has symbolic ones, and reads through those it recorded itself."""

    def no_link(source: Path, target: Path) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    folder, dest = local(tmp_path), tmp_path / "build" / "source"
    fetch_local(folder, dest)
    link = dest / "model-00001-of-00002.safetensors"
    assert link.is_symlink()
    assert len(read_tensors(dest)) == 3
    link.resolve().write_bytes(save({}))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):  # no longer the file of the record
        read_tensors(dest)


def test_changed_local_folder_is_fetched_again(tmp_path: Path) -> None:
    folder, dest = local(tmp_path), tmp_path / "build" / "source"
    before = fetch_local(folder, dest)
    (folder / "config.json").write_text('{"changed": 1}')
    (folder / "vocab.json").unlink()
    after = fetch_local(folder, dest)
    assert before["files"]["config.json"] != after["files"]["config.json"]
    assert (dest / "config.json").read_text() == '{"changed": 1}' and not (dest / "vocab.json").exists()


def test_edited_build_folder_is_repaired(tmp_path: Path) -> None:
    """The record alone does not prove what lies beside it."""
    folder, dest = local(tmp_path), tmp_path / "build" / "source"
    fetch_local(folder, dest)
    (dest / "config.json").write_text("{}")
    fetch_local(folder, dest)
    assert (dest / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_local_faults(tmp_path: Path) -> None:
    """Folders that are no checkpoint, and places that are not ours to overwrite."""
    folder = tmp_path / "mine"
    with pytest.raises(CheckpointError, match="no such folder"):
        fetch_local(folder, tmp_path / "dest")
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        fetch_local(folder, tmp_path / "dest")
    (folder / "config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        fetch_local(folder, tmp_path / "dest")
    (folder / "model.safetensors").write_bytes(save({}))
    with pytest.raises(CheckpointError, match="not ours to replace"):
        fetch_local(folder, folder)
    with pytest.raises(CheckpointError, match="exactly one of path and repo"):
        fetch(path=folder, repo=REPO, revision=COMMIT, dest=tmp_path / "dest", cache=None)


def test_local_link_that_leaves_is_refused(tmp_path: Path) -> None:
    """A link in a checkpoint someone sent must not bring in another file of this machine."""
    folder = local(tmp_path)
    (tmp_path / "secret.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        fetch_local(folder, tmp_path / "dest")
    (folder / "source.json").write_text('{"files": {"tokenizer.json": {"size": 2}}}')  # nor by a forged record
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        fetch_local(folder, tmp_path / "dest")
