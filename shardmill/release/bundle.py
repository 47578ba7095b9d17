"""The bundle: what of a build leaves the machine.

Left behind are logs, Snakemake's marks, the original weights (whoever wants them has their commit and hashes) and the
reference's states. bundle.json says what else was left out and names the files that were added for people and hubs; the
rest is named by the records that a build has anyway.
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
# What hubs and libraries look for beside a model; config.json is what downloads are counted by.
COPIED = ("config.json", "generation_config.json", "chat_template.jinja", "merges.txt")
COPIED_STEMS = ("tokenizer", "special_tokens", "added_tokens", "vocab", "spiece")


def assemble(build: Path, include: Include, license: License | None = None) -> None:
    """Add to a build what its bundle holds besides, and bundle.json.

    Args:
        build: the build's folder.
        include: which programs the bundle has.
        license: the checkpoint's, where it is known.

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
    """Return every file of an assembled build that leaves the machine, sorted; signatures too."""
    content = added(build)
    known = {name for name in records(build) if name not in content["left_out"]}
    beside = {path.relative_to(build).as_posix() for path in (*build.iterdir(), *build.glob("attestations/*"))}
    return sorted(name for name in known | set(filter(is_signature, beside)) if (build / name).is_file())


def unsigned(build: Path, signed: Iterable[str]) -> set[str]:
    """Return the names in a build that a signature over some files must leave out.

    A folder where all of it is left out.
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
    """Remove the marks that Snakemake leaves in folders; it then goes by the folder's own time."""
    for mark in build.rglob(SNAKEMAKE_MARK):
        mark.unlink()


def _is_copied(name: str) -> bool:
    return name in COPIED or name.startswith(COPIED_STEMS)


def _is_left_out(name: str, include: Include) -> bool:
    return may_be_absent(name, include) and not is_signature(name) and name not in (BUNDLE, CARD_RECORD)


def _hashed(build: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hash_file(build / name) for name in names}
