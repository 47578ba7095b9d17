"""Headers and indices: what is read equals what the safetensors library reads; what is damaged is named."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load, save

from shardmill.checkpoint.headers import MAX_HEADER_BYTES, TensorInfo, read_header, read_tensors
from shardmill.errors import CheckpointError

from .samples import index_of, two_file_checkpoint

FILE = "model.safetensors"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def raw_file(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def row(dtype: Any = "F16", shape: Any = (2,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_ranges_hold_the_tensors_bytes(tmp_path: Path) -> None:
    """start and end are positions in the file, so the bytes between them are the tensor."""
    folder = write(tmp_path, two_file_checkpoint())
    tensors = read_tensors(folder)
    assert list(tensors) == ["a", "b", "c"]
    for name, info in tensors.items():
        content = (folder / info.file).read_bytes()
        right = load(content)[name]
        assert info.name == name and info.shape == right.shape
        assert content[info.start : info.end] == right.tobytes()


def test_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """transformers looks for model.safetensors first; so do we, and leave a stale index alone."""
    write(tmp_path, {FILE: save({"w": np.zeros(2, np.float16)}), "model.safetensors.index.json": b"stale"})
    start = tmp_path.joinpath(FILE).stat().st_size - 4
    assert read_tensors(tmp_path) == {"w": TensorInfo("w", FILE, start, start + 4, "F16", (2,))}


def test_scalars_empty_tensors_and_metadata(tmp_path: Path) -> None:
    content = save({"s": np.array(1, np.float32), "e": np.zeros((0, 3), np.float32)}, {"format": "pt"})
    found = read_tensors(write(tmp_path, {FILE: content}))
    assert {n: (i.shape, i.end - i.start) for n, i in found.items()} == {"s": ((), 4), "e": ((0, 3), 0)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "truncated"),
        (b"\x10\0\0\0\0\0\0\0{}", "truncated, header of 16 bytes"),
        (b"\x03\0\0\0\0\0\0\0{}", "truncated, header of 3 bytes"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "over the limit"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b" " * (MAX_HEADER_BYTES + 1), "over the limit"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (raw_file(b"{"), "not valid JSON"),
        (raw_file(b"[1]"), "not an object"),
        (raw_file(b'{"\xff": 1}'), "not valid JSON"),
        (raw_file(b"[" * 1_000_000), "not valid JSON"),
        (raw_file(b'{"w": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}, "w": 1}'), "w is given twice"),
        (raw_file({"__metadata__": {"a": 1}}), "__metadata__"),
        (raw_file({"w": 1}), "tensor w has no dtype"),
        (raw_file({"w": row(dtype="Q4")}, b"1234"), "tensor w has dtype Q4"),
        (raw_file({"w": row(dtype=["F16"])}, b"1234"), "tensor w has dtype"),
        (raw_file({"w": row(shape=[True, 2])}, b"1234"), "tensor w: shape"),
        (raw_file({"w": row(shape=[-1, -2])}, b"1234"), "tensor w: shape"),
        (raw_file({"w": row(shape=[2.0])}, b"1234"), "tensor w: shape"),
        (raw_file({"w": row(shape=[1] * 9)}, b"1234"), "at most 8"),
        (raw_file({"w": row(offsets=[4, 0])}, b"1234"), "tensor w: data_offsets"),
        (raw_file({"w": row(offsets=[0, 4, 8])}, b"1234"), "tensor w: data_offsets"),
        (raw_file({"w": row(shape=[3])}, b"1234"), "4 bytes do not hold F16 of shape [3]"),
        (raw_file({"w": row()}, b"123"), "truncated, tensor w"),
        (raw_file({"w": row()}, b"12345"), "1 bytes after the last tensor"),
        (raw_file({"w": row(offsets=[2, 6])}, b"123456"), "unused bytes before tensor w"),
        (raw_file({"v": row(), "w": row(offsets=[2, 6])}, b"123456"), "tensor w overlaps"),
        (raw_file({"v": row(), "w": row()}, b"1234"), "tensor w overlaps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Each kind of damage is one line with the file, the tensor where there is one, and what is wrong."""
    write(tmp_path, {FILE: content})
    with pytest.raises(CheckpointError) as caught:
        read_tensors(tmp_path)
    assert FILE in str(caught.value) and message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": 1}, "weight_map"),
        ({"w": "../w.safetensors"}, "index.json: '../w.safetensors' leaves the checkpoint folder"),
        ({"w": "/etc/w.safetensors"}, "leaves the checkpoint folder"),
        ({"w": "sub/../../w.safetensors"}, "leaves the checkpoint folder"),
        ({"w": "w.bin"}, "only .safetensors"),
        ({"w": "model-3.safetensors"}, "model-3.safetensors: file is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_index_is_named(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    write(tmp_path, two_file_checkpoint() | {"model.safetensors.index.json": index_of(weight_map)})
    with pytest.raises(CheckpointError, match=message.replace(".", r"\.")):
        read_tensors(tmp_path)


def test_the_files_say_which_tensors_there_are(tmp_path: Path) -> None:
    """An index may list some that were left out, and leave out some; but none may be in another file than it says."""
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write(tmp_path, two_file_checkpoint())
    for weight_map in ({"a": one, "b": one, "c": two, "d": two}, {"a": one, "c": two}):
        write(tmp_path, {"model.safetensors.index.json": index_of(weight_map)})
        assert {name: info.file for name, info in read_tensors(tmp_path).items()} == {"a": one, "b": one, "c": two}
    write(tmp_path, {"model.safetensors.index.json": index_of({"a": one, "b": two, "c": two})})
    with pytest.raises(CheckpointError, match="tensor b belongs to model-00002"):
        read_tensors(tmp_path)
    write(
        tmp_path, {"model.safetensors.index.json": index_of({"a": one, "c": two}), two: (tmp_path / one).read_bytes()}
    )
    with pytest.raises(CheckpointError, match="tensor a belongs to model-00001"):
        read_tensors(tmp_path)


def test_links(tmp_path: Path) -> None:
    """A link out of the folder is refused, unless it is the hub cache's own; a link within the folder is fine."""
    outside = write(tmp_path, {"w.safetensors": save({"w": np.zeros(2, np.float16)})}) / "w.safetensors"
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / FILE).symlink_to(outside)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_tensors(plain)
    (plain / FILE).unlink()
    (plain / FILE).symlink_to(plain / "inner.safetensors")
    (plain / "inner.safetensors").write_bytes(outside.read_bytes())
    assert list(read_tensors(plain)) == ["w"]
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / FILE).symlink_to(Path("../../../w.safetensors"))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        read_tensors(snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    outside.rename(blobs / "abc")
    (snapshot / FILE).unlink()
    (snapshot / FILE).symlink_to(Path("../../blobs/abc"))
    assert list(read_tensors(snapshot)) == ["w"]


def test_no_weights(tmp_path: Path) -> None:
    """Pickles are refused by name; an empty or absent folder says so."""
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        read_tensors(tmp_path)
    write(tmp_path, {"pytorch_model.bin": b""})
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is a pickle"):
        read_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_tensors(tmp_path / "absent")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
DTYPES = st.sampled_from(["F16", "BF16", "F32", "U8", "F4", "bf16"])
SMALL = st.integers(-1, 9)
ROWS = st.fixed_dictionaries(
    {
        "dtype": DTYPES | JSON,
        "shape": st.lists(SMALL, max_size=3) | JSON,
        "data_offsets": st.tuples(SMALL, SMALL) | JSON,
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ROWS | JSON, max_size=3)


def agrees_with_library(folder: Path, content: bytes) -> None:
    """Either both read the same, or we refuse with our own error; we may be stricter than the library."""
    (folder / FILE).write_bytes(content)
    try:
        ours = {i.name: (i.dtype, i.shape, content[i.start : i.end]) for i in read_header(folder, FILE)}
    except CheckpointError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return
    theirs = {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in deserialize(content)}
    assert ours == theirs


FUZZ = settings(max_examples=300)


@pytest.mark.thorough
@FUZZ
@given(header=HEADERS, data=st.binary(max_size=12))
def test_invented_headers(tmp_path: Path, header: dict[str, Any], data: bytes) -> None:
    agrees_with_library(tmp_path, raw_file(header, data))


@FUZZ
@given(data=st.data())
def test_mutated_files(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of a sound file overwritten, cut off or inserted anywhere in its header."""
    content = bytearray(save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float16)}))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        width = data.draw(st.integers(0, 3))
        content[at : at + width] = data.draw(st.binary(max_size=3) | st.sampled_from([b"9", b"-", b"]", b'"', b"F32"]))
    agrees_with_library(tmp_path, bytes(content))


def test_sound_files_are_not_refused(tmp_path: Path) -> None:
    """The fuzzing above would pass if everything were refused: a sound file must not be."""
    content = save({"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(5, np.float16)})
    agrees_with_library(tmp_path, content)
    assert len(read_header(tmp_path, FILE)) == 2
    with pytest.raises(SafetensorError):
        deserialize(content[:-1])


def test_lying_length_costs_no_memory(tmp_path: Path) -> None:
    """A header length of terabytes is refused before anything of that size is asked for."""
    write(tmp_path, {FILE: (1 << 42).to_bytes(8, "little") + b"{}"})
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        read_tensors(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
