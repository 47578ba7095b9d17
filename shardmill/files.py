"""JSON in one canonical layout, and files that appear whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path, PurePath
from typing import Any

from shardmill import interrupt
from shardmill.errors import ShardmillError, UnreadableError


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file. Raises OSError with its path if it is not regular or can't be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise opening a pipe would wait for its writer
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def check(path: Path) -> None:
    """Raise OSError, which names the path, if a path that a library will open is no regular file."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        number, why = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "not a regular file")
        raise OSError(number, why, str(path))


def read_text(path: Path) -> str:
    """Return the text of a regular file, each of its lines ended by a newline alone.

    Raises:
        OSError: it is no regular file, or can't be read.
        UnicodeDecodeError: it is not UTF-8.
    """
    return io.IncrementalNewlineDecoder(None, translate=True).decode(read_bytes(path).decode("utf-8"), final=True)


def read_named(path: Path) -> str:
    """Return the text of a file that a person named. Raises ShardmillError if it can't be read or is not UTF-8."""
    try:
        return read_text(path)
    except OSError as error:
        raise ShardmillError(f"{path}: {error.strerror}; name another, or run from the project's folder") from error
    except UnicodeDecodeError as error:
        raise ShardmillError(f"{path}: not UTF-8 text") from error


SEAL = "shardmill_seal"  # the key under which a record holds the digest of its other content
SCRATCH = ".making-"  # prefix of folders with unfinished output; a killed process leaves them behind


def is_left_by_macos(path: str | PurePath) -> bool:
    """Tell whether macOS puts files of this name into folders: the Finder's .DS_Store, ._NAME on other disks."""
    name = PurePath(path).name
    return name == ".DS_Store" or name.startswith("._")


def cache_folder() -> Path:
    """Return this user's folder for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardmill"


def kept_for(module: str) -> Path:
    """Return where a module keeps what it can find out again, by its __file__: beside its compiled file.

    Where Python writes no compiled files (PYTHONDONTWRITEBYTECODE), it is this user's cache.
    """
    compiled = Path(cache_from_source(module)).with_suffix(".json")
    return cache_folder() / digest(str(compiled))[:16] / compiled.name if sys.dont_write_bytecode else compiled


def how_to_build(build: Path) -> str:
    """Return the command that builds the model of a build's folder, for messages; without a config it is the demo's."""
    name = build.resolve().name
    config = f"configs/{name}.yaml"
    chosen = "" if name == "demo" else f" --configfile {config if Path(config).is_file() else 'CONFIG'}"
    return f"snakemake --cores 4 all{chosen}"


def dumps(content: Any) -> str:
    """Return JSON with sorted keys, an indent of one space and a final newline; refuse NaN, since JSON has no NaN."""
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False, ensure_ascii=False) + "\n"


def digest(content: Any) -> str:
    """Return sha256 of the canonical JSON of `content`."""
    return hashlib.sha256(dumps(content).encode()).hexdigest()


def flattened(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of nested mappings, and of lists of mappings, by dotted name."""
    rows = content.items() if isinstance(content, Mapping) else enumerate(content)
    leaves: dict[str, Any] = {}
    for key, value in rows:
        nested = isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value))
        leaves |= flattened(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return leaves


def parse_json(text: str | bytes, unique: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON.
        unique: whether a repeated key is an error; if not, its last value counts.

    Raises:
        ValueError: it is no JSON, is nested too deeply, or repeats a key though keys must be unique.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]  # not name by name: a header may have millions
        raise ValueError(f"{name} is given twice; keep one")
    return content


def load_json(path: Path, unique: bool = False) -> Any:
    """Return the value in a JSON file, whoever wrote it.

    Args:
        path: the file.
        unique: as for `parse_json`.

    Raises:
        OSError: it is no regular file, or can't be read.
        ValueError: it holds no JSON.
    """
    return parse_json(read_bytes(path).decode("utf-8"), unique)


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, whoever wrote it; an empty one if it holds none or can't be read."""
    try:
        content = load_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_json(path: Path) -> Any:
    """Return the content of a JSON file of our own. Raises UnreadableError if it can't be read."""
    try:
        return load_json(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"damaged: {error}"
        raise UnreadableError(f"{path}: can't be read ({why}); remove it and build again") from error


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with a digest of its content, which reveals damage."""
    body = {key: value for key, value in content.items() if key != SEAL}
    return body | {SEAL: digest(body)}


def read_sealed(path: Path) -> dict[str, Any]:
    """Return a record that was written sealed. Raises UnreadableError if a single bit has changed."""
    content = read_json(path)
    try:
        whole = sealed(content) == content and dumps(content).encode() == read_bytes(path)
    except (ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise UnreadableError(f"{path}: can't be read (damaged: not what was written); remove it and build again")
    return dict(content)


def write_json(path: Path, content: Any) -> None:
    """Write canonical JSON by atomic rename."""
    write_text(path, dumps(content))


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text by atomic rename."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` for a new file or folder.

    On success, the new file or folder replaces `path`; otherwise it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{path.name}.", dir=path.parent))
    with interrupt.scratch(scratch):
        temporary = scratch / path.name
        yield temporary
        replace(temporary, path, scratch / "old")


def give_back(path: Path) -> None:
    """Give a file that root wrote, or a folder with all its content, to the user who called sudo."""
    user, group = os.environ.get("SUDO_UID"), os.environ.get("SUDO_GID")
    if os.geteuid() == 0 and user and group and path.exists():
        for each in (path, *path.rglob("*")):
            os.chown(each, int(user), int(group), follow_symlinks=False)


def replace(new: Path, target: Path, aside: Path) -> None:
    """Rename `new` to `target`; an existing folder, which a rename can't replace, is moved to `aside` first.

    Raises OSError if a file would replace a folder, or if `target` is a device or a pipe.
    """
    new.lstat()  # raises if `new` was not made, so that `target` stays
    if target.exists() and not target.is_symlink() and not target.is_file() and not (target.is_dir() and new.is_dir()):
        raise OSError(errno.EEXIST, "exists and is not a regular file, so it is not replaced", str(target))
    if not target.is_dir() or target.is_symlink():
        os.replace(new, target)
        return
    target.rename(aside)
    try:
        os.replace(new, target)
    except OSError:
        aside.rename(target)
        raise
