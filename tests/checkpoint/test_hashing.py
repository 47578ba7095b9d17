"""Hashes are those of hashlib, every weight that is not finite is found, and memory stays bounded."""

import errno
import hashlib
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from shardmill.checkpoint import hashing
from shardmill.checkpoint.cache import RACY_NS, ByteSpan, HashCache, file_state
from shardmill.checkpoint.hashing import hash_file, scan_checkpoint, tree_hash
from shardmill.checkpoint.headers import read_header, read_tensors
from shardmill.errors import CheckpointError

from .samples import two_file_checkpoint


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few hundred bytes span several chunks."""
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 64)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_scan_equals_hashlib(tmp_path: Path) -> None:
    for name, content in two_file_checkpoint().items():
        (tmp_path / name).write_bytes(content)
    tensors = read_tensors(tmp_path)
    scan = scan_checkpoint(tmp_path, tensors)
    content = two_file_checkpoint()
    assert scan.files == {name: sha(content[name]) for name in content if name.endswith(".safetensors")}
    assert scan.tensors == {n: sha(content[t.file][t.start : t.end]) for n, t in tensors.items()}


LIMITS = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}


def with_header(folder: Path, dtype: str, bits: np.ndarray) -> Path:
    text = f'{{"odd":{{"dtype":"{dtype}","shape":[{bits.size}],"data_offsets":[0,{bits.nbytes}]}}}}'.encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bits.tobytes())
    return folder


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("sign", [0, 1])
def test_every_exponent_boundary(tmp_path: Path, dtype: str, sign: int) -> None:
    """The largest finite numbers pass; Inf and the NaN next to it are found, at either sign and any position."""
    kind, infinity = LIMITS[dtype]
    top = sign << (8 * np.dtype(kind).itemsize - 1)
    finite = np.array([0, 1, infinity - 1, top, top | (infinity - 1)] * 40, kind)
    assert scan_checkpoint(with_header(tmp_path, dtype, finite), read_tensors(tmp_path)).tensors
    for position, (bits, name) in ((0, (infinity, "Inf")), (137, (infinity + 1, "NaN")), (199, (infinity, "Inf"))):
        bad = finite.copy()
        bad[position] = top | bits
        with_header(tmp_path, dtype, bad)
        with pytest.raises(CheckpointError, match=f"odd \\({name} at element {position}\\)"):
            scan_checkpoint(tmp_path, read_tensors(tmp_path))


def test_many_bad_tensors_are_counted(tmp_path: Path) -> None:
    content = save({f"w{i}": np.full(3, np.nan, np.float32) for i in range(5)} | {"good": np.ones(3, np.float32)})
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"w0 \(NaN at element 0\), w1 .*, w2 .* and 2 more") as caught:
        scan_checkpoint(tmp_path, read_tensors(tmp_path))
    assert "good" not in str(caught.value)


def test_bad_tensor_is_found_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache must not remember a tensor that failed the check as one that was seen."""
    (tmp_path / "model.safetensors").write_bytes(save({"w": np.full(3, np.nan, np.float32)}))
    now = time.time_ns() + 10 * RACY_NS
    monkeypatch.setattr(time, "time_ns", lambda: now)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="w \\(NaN at element 0\\)"):
            scan_checkpoint(tmp_path, read_tensors(tmp_path), HashCache(tmp_path / "hashes.sqlite"))


def test_integers_are_hashed_but_not_called_nan(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(save({"ids": np.full(9, -1, np.int16)}))
    assert scan_checkpoint(tmp_path, read_tensors(tmp_path)).tensors.keys() == {"ids"}


def test_file_cut_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({"w": np.ones(1000, np.float32)}))
    tensors = read_tensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends at byte"):
        scan_checkpoint(tmp_path, tensors)


def test_file_written_while_it_is_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash of half-old, half-new bytes is no hash."""
    path = tmp_path / "file"
    path.write_bytes(b"before")
    digest = hashing._digest_span

    def slow(target: Path, span: Any) -> object:
        result = digest(target, span)
        target.write_bytes(b"after!")
        return result

    monkeypatch.setattr(hashing, "_digest_span", slow)
    with pytest.raises(CheckpointError, match="changed while it was being hashed"):
        hash_file(path)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent: can't be read"):
        hash_file(tmp_path / "absent")


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing a file takes a few chunks of memory, not the file."""
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 1 << 16)
    (tmp_path / "model.safetensors").write_bytes(save({"w": np.ones(8 << 20, np.float16)}))
    tensors = read_tensors(tmp_path)
    tracemalloc.start()
    scan_checkpoint(tmp_path, tensors, threads=2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20


def tree(folder: Path) -> Path:
    (folder / "Data" / "empty").mkdir(parents=True)
    (folder / "Data" / "weight.bin").write_bytes(b"w")
    (folder / "Manifest.json").write_bytes(b"{}")
    return folder


def test_tree_hash_depends_on_names_and_bytes_only(tmp_path: Path) -> None:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    (two / "Manifest.json").chmod(0o600)
    assert tree_hash(one) == tree_hash(two)
    (two / "Manifest.json").unlink()
    (two / "Manifest.json").symlink_to(one / "Manifest.json")
    assert tree_hash(one) == tree_hash(two)


def test_tree_hash_ignores_the_order_of_the_listing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems list a directory in whatever order they like."""
    folder = tree(tmp_path / "t")
    for name in "abc":
        (folder / name).write_text(name)
    right = tree_hash(folder)
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda path: [(r, d[::-1], f[::-1]) for r, d, f in walk(path)][::-1])
    assert tree_hash(folder) == right


@pytest.mark.parametrize("change", ["bytes", "name", "moved", "added", "emptied"])
def test_tree_hash_sees_every_change(tmp_path: Path, change: str) -> None:
    folder = tree(tmp_path / "t")
    before = tree_hash(folder)
    match change:
        case "bytes":
            (folder / "Data" / "weight.bin").write_bytes(b"v")
        case "name":
            (folder / "Data" / "weight.bin").rename(folder / "Data" / "weights.bin")
        case "moved":
            (folder / "Data" / "weight.bin").rename(folder / "weight.bin")
        case "added":
            (folder / "more").write_bytes(b"")
        case "emptied":
            (folder / "Data" / "empty").rmdir()
    assert tree_hash(folder) != before


def test_a_folder_that_only_the_finder_has_seen_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a/empty").mkdir(parents=True)
    before = tree_hash(tmp_path / "a")
    (tmp_path / "a/empty/.DS_Store").touch()
    assert tree_hash(tmp_path / "a") == before


def test_tree_hash_of_a_file_is_its_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"content")
    assert tree_hash(tmp_path / "f") == sha(b"content")


def test_tree_hash_refuses_linked_directories(tmp_path: Path) -> None:
    folder = tree(tmp_path / "t")
    (folder / "loop").symlink_to(folder)
    with pytest.raises(CheckpointError, match="loop: links to a directory"):
        tree_hash(folder)


def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its header is read, or all of it is hashed."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(8))

    def refuse(path: Path, mode: str = "r") -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refuse)
    for read in (lambda: hash_file(file), lambda: read_header(tmp_path, file.name)):
        with pytest.raises(CheckpointError, match=f"^{file}: can't be read \\(Permission denied\\)"):
            read()


def test_a_hard_link_made_meanwhile_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds link the same stored file at the same time, which moves its ctime; what is remembered stays right."""
    file = tmp_path / "a"
    file.write_bytes(b"content")
    real = hashing._digest_span

    def linked(path: Path, span: ByteSpan) -> object:
        os.link(file, tmp_path / "b")
        return real(path, span)

    monkeypatch.setattr(hashing, "_digest_span", linked)
    cache = HashCache(tmp_path / "cache")
    later = time.time_ns() + 10 * RACY_NS
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert hash_file(file, cache) == sha(b"content")
    assert cache.lookup(file_state(file)) == {}
