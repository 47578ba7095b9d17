"""Builds whose files lie in a storage of Snakemake's (`--default-storage-provider`), not in a folder that all jobs see.

Snakemake downloads a job's inputs and uploads its outputs; both stand below a folder that Snakemake chooses.
Steps do not notice this. A job works in a room: a folder with the layout of a build that holds only the files that the
job's rule names. Folders are transferred as archives. If the files lie in build/ itself, none of this happens.
"""

from __future__ import annotations

import filecmp
import logging
import os
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import is_left_by_macos
from shardmill.pipeline.cache.entry import scratch_folder
from shardmill.pipeline.verdict import failed

SUFFIX = ".tar"
END = bytes(2 * tarfile.BLOCKSIZE)  # after the last entry


def pack(folder: Path, to: Path) -> None:
    """Write a folder's files; links are followed."""
    with tarfile.open(to, "w", format=tarfile.PAX_FORMAT) as archive:
        top = tarfile.TarInfo(folder.name)
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(top)
        for file in sorted(path for path in folder.rglob("*") if path.is_file() and not is_left_by_macos(path)):
            with file.open("rb") as content:
                entry = tarfile.TarInfo(file.relative_to(folder.parent).as_posix())
                entry.size = file.stat().st_size
                archive.addfile(entry, content)


def unpack(archive: Path, to: Path) -> None:
    """Make the folder `to` from an archive of a folder with the same name.

    Files of the same bytes become one file, as they were before: bundles of one program share their weights, and the
    engine holds the weights of a file once.

    Raises:
        UnreadableError: the file is not this archive, is cut short, or would write elsewhere.
    """
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as content:
            of_size: dict[int, Path] = {}
            for entry in content:
                path = _extract(content, entry, to)
                if entry.isfile():
                    _link(of_size.setdefault(entry.size, path), path)
            file.seek(content.offset)
            if file.read(len(END)) != END:  # the library takes a cut or a damaged header for the end
                raise tarfile.TarError("its end is missing")
    except (tarfile.TarError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        reason = f"no whole archive of {to.name} ({error})"
        raise UnreadableError(f"{archive}: {reason}; remove it and run the same command again") from None


def _extract(content: tarfile.TarFile, entry: tarfile.TarInfo, to: Path) -> Path:
    """Write an entry that is a file of the folder `to`, or a folder; return its path.

    `extractall` checks the entries since Python 3.11.4.
    """
    first, *others = entry.name.split("/")
    source = content.extractfile(entry) if entry.isfile() else None
    if (
        first != to.name
        or {"", ".", ".."} & {*others}
        or "\0" in entry.name
        or not (others if source else entry.isdir())
    ):
        raise tarfile.TarError(f"{entry.name!r} is not a file of this archive")
    path = to.joinpath(*others)
    folder = path if source is None else path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        with source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    return path


def _link(first: Path, path: Path) -> None:
    """Make `path` a hard link to a file of the same size if it has the same bytes, and the file system has links."""
    if first != path and filecmp.cmp(first, path, shallow=False):
        fresh = path.with_name(f"{path.name}.link")
        with suppress(OSError):
            os.link(first, fresh)
            os.replace(fresh, path)


log = logging.getLogger(__name__)

Files = Mapping[str, Path | list[Path]]
BUILDS = "build"
CHECKPOINT = "build/{model}/source"  # the only folder that no rule names if the files lie in build/


def is_used(workflow: Any) -> bool:
    """Return whether the files of a run lie in a storage."""
    return workflow.storage_settings.default_storage_provider is not None


def folder(path: str, workflow: Any) -> str:
    """Return the path that stands for a folder in rules."""
    return path + SUFFIX if is_used(workflow) else path


def new_folder(path: str) -> Any:
    """Return an output of a rule that stands for a folder."""
    from snakemake.io import directory

    return path if path.endswith(SUFFIX) else directory(path)


def checkpoint_input(workflow: Any) -> list[str]:
    """Return the input that stands for the checkpoint's files in rules.

    If the files lie in build/, the list is empty, because the record source.receipt.json stands for them.
    """
    return [folder(CHECKPOINT, workflow)] if is_used(workflow) else []


def home_of(path: str, model: str) -> Path | None:
    """Return the folder in which Snakemake keeps the copy of a build that a path belongs to.

    None if that is build/ itself.
    """
    before, folder, _ = path.rpartition(f"{BUILDS}/{model}/")
    return Path(before) if before and folder else None


@dataclass(frozen=True)
class Room:
    """The folder in which a job works.

    Attributes:
        builds: the folder that the folders of models are in.
        inputs: by name, where the job finds its inputs; files outside of builds stay at their paths.
        outputs: by name, where the job is to make its outputs.
    """

    builds: Path
    inputs: Files
    outputs: Files

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the room is another folder than the build's."""
        return self.builds != Path(BUILDS)


@contextmanager
def room(inputs: Files, outputs: Files, model: str) -> Iterator[Room]:
    """Lay out a job's inputs, and move its outputs to Snakemake's paths once the job has succeeded.

    Args:
        inputs: the job's inputs by name, as Snakemake gives them.
        outputs: the job's outputs by name, as Snakemake gives them.
        model: the job's model.
    """
    home = home_of(str(next(iter(_listed(outputs)))), model)
    if home is None:
        yield Room(Path(BUILDS), inputs, outputs)
        return
    with scratch_folder(home) as at:
        for path in _listed(inputs):
            _bring(path, _placed(path, home, at))
        inside = _moved(outputs, home, at)
        for path in _listed(inside):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield Room(at / BUILDS, _moved(inputs, home, at), inside)
        except ShardmillError as error:
            _keep_numbers(outputs.get("verdict"), inside.get("verdict"))
            raise type(error)(str(error).replace(f"{at}/", f"{home}/")) from error
        for path in _listed(outputs):
            _take(_placed(path, home, at), path)


def _listed(files: Files) -> list[Path]:
    return [path for value in files.values() for path in (value if isinstance(value, list) else [value])]


def _moved(files: Files, home: Path, at: Path) -> Files:
    return {
        name: [_placed(path, home, at) for path in value] if isinstance(value, list) else _placed(value, home, at)
        for name, value in files.items()
    }


def _placed(path: Path, home: Path, at: Path) -> Path:
    """Return where a file of a build stands in the room, a folder without the archive's suffix; other files stay."""
    if not path.is_relative_to(home / BUILDS):
        return path
    inside = at / path.relative_to(home)
    return inside.with_name(inside.name.removesuffix(SUFFIX))


def _keep_numbers(verdict: Path | list[Path] | None, inside: Path | list[Path] | None) -> None:
    """Log a missed gate's verdict for a person; only the log reaches the storage."""
    if isinstance(verdict, Path) and isinstance(inside, Path) and failed(inside).exists():
        log.debug("%s", failed(inside).read_text(encoding="utf-8"))
        os.replace(failed(inside), failed(verdict))


def _bring(path: Path, to: Path) -> None:
    if to == path:
        return
    if path.name.endswith(SUFFIX):
        unpack(path, to)
        return
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, to)
    except OSError:  # no hard links here
        shutil.copyfile(path, to)


def _take(made: Path, to: Path) -> None:
    if made.is_dir():
        pack(made, to)
    else:
        os.replace(made, to)
