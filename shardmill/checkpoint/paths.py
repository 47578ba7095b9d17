"""File names that come from a checkpoint (an index, a repository's listing) are checked here before use.

A name may only lead to a file inside the checkpoint folder. Raises CheckpointError for every other name.
"""

import os
import re
from collections.abc import Collection
from io import BufferedReader
from pathlib import Path, PurePosixPath

from shardmill.errors import CheckpointError, UnreadableError
from shardmill.files import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
RECORD_FILE = "source.json"
COMMIT = re.compile(r"[0-9a-f]{40}")
ON_HUB = "hf:"  # begins the address of a repository on the hub
ADDRESS = re.compile(r"(?:hf:)?(?P<repo>[\w.-]+/[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")  # OWNER/NAME@REVISION
Row = tuple[str, int, str]  # a file's name, its size and digest: sha256:..., or git:... with the id of its git blob
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")


def is_commit(revision: str | None) -> bool:
    """Return whether a revision is a commit, and not a name that can move."""
    return bool(revision and COMMIT.fullmatch(revision))


def check_name(name: str, where: str) -> None:
    """Refuse a file name that is absolute, climbs with `..`, or has another meaning on other systems."""
    posix = PurePosixPath(name)
    plain = name == str(posix) and not posix.is_absolute() and ".." not in posix.parts and name != "."
    if not plain or "\\" in name or not name.isprintable():
        raise CheckpointError(f"{where}: {name!r} leaves the checkpoint folder; refusing to use it")


def checked_file(folder: Path, name: str, *, ours: bool = True) -> Path:
    """Return `folder/name`, an existing file that really lies in the folder.

    Two kinds of links may point outside the folder. The first kind is the hub cache's links (snapshots/<commit>/x ->
    blobs/<etag>). The second kind is links that `fetch` made and recorded in source.json, if the folder is `ours`: a
    stranger's folder may hold a forged record. Raises CheckpointError for any other link, and if the file is missing.
    """
    check_name(name, str(folder))
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: file is missing or a dangling link; fetch the checkpoint again")
    inside = path.resolve().is_relative_to(folder.resolve())
    if not (inside or _is_hub_blob(folder, path) or (ours and _is_recorded(folder, name))):
        raise CheckpointError(f"{path}: links to {path.resolve()}, outside the checkpoint; copy the file in")
    return path


def opened(path: Path) -> BufferedReader:
    """Return a checkpoint's file, open for reading.

    Raises CheckpointError if the file can't be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}); allow it, or fetch it again") from error


def describe_missing_config(where: str, names: Collection[str]) -> str:
    """Return the error line for a folder or repository without config.json, or why its weights are no model."""
    whole = SINGLE_FILE in names or INDEX_FILE in names
    if not whole and any(name.endswith((".safetensors", *PICKLE_SUFFIXES)) for name in names):
        return describe_missing_weights(where, names)
    return f"{where}: holds no config.json; is it in Hugging Face layout?"


def describe_missing_weights(where: str, names: Collection[str]) -> str:
    """Return the error line for a folder or repository with neither `model.safetensors` nor an index."""
    weights = sorted(name for name in names if name.endswith(".safetensors") and not name.startswith("adapter_"))
    pickles = sorted(n for n in names if n.endswith(PICKLE_SUFFIXES))
    if "adapter_config.json" in names and not weights:
        return (
            f"{where}: holds a LoRA adapter and no model; build the model that it was trained on, with this as "
            "source.adapter, see docs/adapters.md"
        )
    if len(weights) > 1:
        some = f"{weights[0]}, {weights[1]}{', ...' if len(weights) > 2 else ''}"
        return f"{where}: holds several models, or one in another layout ({some}); give a folder that holds one alone"
    if pickles:
        return (
            f"{where}: {pickles[0]} is a pickle checkpoint, which can run code when loaded; "
            "use a revision with safetensors, or convert it with save_pretrained"
        )
    return f"{where}: neither {SINGLE_FILE} nor {INDEX_FILE} found; is it in Hugging Face layout?"


def _is_hub_blob(folder: Path, path: Path) -> bool:
    snapshot = folder.resolve()
    if snapshot.parent.name != "snapshots" or not path.is_symlink():
        return False
    # One hop only: the blob itself may be a link into the hub client's store of shared blobs.
    target = os.path.normpath(path.parent.resolve() / os.readlink(path))
    return Path(target).parent == snapshot.parent.parent / "blobs"


def _is_recorded(folder: Path, name: str) -> bool:
    try:
        recorded = read_json(folder / RECORD_FILE)["files"][name]["size"]
    except (UnreadableError, KeyError, TypeError):
        return False
    return bool(recorded == (folder / name).stat().st_size)
