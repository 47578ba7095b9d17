"""A folder as one file: storage plugins take files, and differ in what a folder is to them.

The archive is a tar of the folder's files in the order of their names, without times and owners. So it follows from
the files' names and bytes, as the folder's hash does. `tar -xf` makes the folder beside it.
"""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from shardmill.errors import UnreadableError
from shardmill.files import is_left_by_macos

SUFFIX = ".tar"
END = bytes(2 * tarfile.BLOCKSIZE)  # after the last entry


def pack(folder: Path, to: Path) -> None:
    """Writes a folder's files; links are followed."""
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
    """Makes the folder `to` of an archive of a folder that is called so.

    Raises:
        UnreadableError: it is none, is cut short, or would write elsewhere.
    """
    try:
        with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as content:
            for entry in content:
                _extract(content, entry, to)
            file.seek(content.offset)
            if file.read(len(END)) != END:  # the library takes a cut or a damaged header for the end
                raise tarfile.TarError("its end is missing")
    except (tarfile.TarError, FileExistsError, IsADirectoryError, NotADirectoryError) as error:
        reason = f"no whole archive of {to.name} ({error})"
        raise UnreadableError(f"{archive}: {reason}; remove it and run the same command again") from None


def _extract(content: tarfile.TarFile, entry: tarfile.TarInfo, to: Path) -> None:
    """Writes an entry that is a file of the folder `to`, or a folder. `extractall` checks them since Python 3.11.4."""
    first, *others = entry.name.split("/")
    source = content.extractfile(entry) if entry.isfile() else None
    if (
        first != to.name
        or {"", ".", ".."} & {*others}
        or "\0" in entry.name
        or not (others if source else entry.isdir())
    ):
        raise tarfile.TarError(f"{entry.name!r} is no file of it")
    path = to.joinpath(*others)
    folder = path if source is None else path.parent
    folder.mkdir(parents=True, exist_ok=True)
    if source is not None:
        with source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
