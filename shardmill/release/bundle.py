"""The bundle: the files of a build that leave the machine.

The bundle leaves out logs, Snakemake's marks, the original weights (their commit and hashes are recorded) and the
reference's states. bundle.json lists the other files that were left out, and the files that were added for people and
hubs. The build's own records list all other files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import replacing, sealed, write_json
from shardmill.pipeline.audit import (
    BUNDLE,
    CARD_RECORD,
    SNAKEMAKE_MARK,
    added,
    audit,
    is_signature,
    may_be_absent,
    records,
)
from shardmill.pipeline.task import SOURCE
from shardmill.release.bom import BOM, write_bom
from shardmill.release.publishable import License

Include = Literal["packages", "compiled", "both"]
CARD = "README.md"
# Files that hubs and libraries look for beside a model; hubs count a model's downloads by config.json.
COPIED = ("config.json", "generation_config.json", "chat_template.jinja", "merges.txt")
COPIED_STEMS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "spiece")


def assemble(build: Path, include: Include, license: License | None = None) -> None:
    """Add the bundle's extra files and bundle.json to a build.

    Args:
        build: the build's folder.
        include: which programs the bundle has.
        license: the checkpoint's license; None if it is not known.

    Raises:
        ShardmillError: a file of the build is not as it was made.
    """
    check_build(build)
    copies = [path for path in sorted((build / SOURCE).iterdir()) if _is_copied(path.name)]
    for path in copies:
        with replacing(build / path.name) as temporary:
            shutil.copyfile(path, temporary)
    write_bom(build, license)
    names = [BOM, *(path.name for path in copies)]
    left_out = sorted(name for name in records(build) if _is_left_out(name, include))
    content = {"include": include, "files": _hashed(build, names), "left_out": left_out}
    write_json(build / BUNDLE, sealed(content))


def check_build(build: Path, cache: HashCache | None = None) -> None:
    """Raise ShardmillError, naming the first file that is wrong, unless every file of a build is as it was made."""
    wrong = audit(build, cache).wrong
    if wrong:
        (name, what), *others = wrong
        more = f" (and {len(others)} more)" if others else ""
        raise ShardmillError(f"{build / name}: {what}{more}; `shardmill verify {build}` tells all")


def bundle_files(build: Path) -> list[str]:
    """Return every file of an assembled build that leaves the machine, with signatures, sorted."""
    content = added(build)
    known = {name for name in records(build) if name not in content["left_out"]}
    beside = {path.relative_to(build).as_posix() for path in (*build.iterdir(), *build.glob("attestations/*"))}
    return sorted(name for name in known | set(filter(is_signature, beside)) if (build / name).is_file())


def unsigned(build: Path, signed: Iterable[str]) -> set[str]:
    """Return the names in a build that a signature over the signed files must ignore.

    A folder's name replaces the names of its files if the signature must ignore every file in the folder.
    """
    wanted = set(signed)
    folders = {parent.as_posix() for name in wanted for parent in Path(name).parents}
    return set(_outside(build, build, wanted, folders))


def _outside(folder: Path, build: Path, wanted: set[str], folders: set[str]) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        name = path.relative_to(build).as_posix()
        if name in folders and not path.is_symlink():
            yield from _outside(path, build, wanted, folders)
        elif name not in wanted:
            yield name


def remove_marks(build: Path) -> None:
    """Remove the marks that Snakemake leaves in folders; Snakemake then uses the folder's own time."""
    for mark in build.rglob(SNAKEMAKE_MARK):
        mark.unlink()


def _is_copied(name: str) -> bool:
    return name in COPIED or name.startswith(COPIED_STEMS)


def _is_left_out(name: str, include: Include) -> bool:
    return may_be_absent(name, include) and not is_signature(name) and name not in (BUNDLE, CARD_RECORD)


def _hashed(build: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hash_file(build / name) for name in names}
