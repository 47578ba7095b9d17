"""Fetches a published build and verifies it before anybody uses it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardmill.checkpoint.cache import HashCache, file_state
from shardmill.checkpoint.paths import ADDRESS, ON_HUB
from shardmill.errors import ShardmillError
from shardmill.files import cache_folder, replacing
from shardmill.release.bundle import check_build
from shardmill.release.sign import PublicKey
from shardmill.release.verify import prove


@dataclass(frozen=True)
class Address:
    """A published build: its repository, and a revision (None for the newest)."""

    repo: str
    revision: str | None


def address(text: str) -> Address:
    """Return what `hf:OWNER/NAME@REVISION` means. Raises ShardmillError."""
    match = ADDRESS.fullmatch(text)
    if match is None:
        raise ShardmillError(
            f"{text}: not the address of a published build; write hf:OWNER/NAME or hf:OWNER/NAME@REVISION"
        )
    return Address(match["repo"], match["revision"])


def pull(where: Address, out: Path | None = None, keys: Sequence[PublicKey] = ()) -> Path:
    """Fetch a published build, verify every byte by the build's records, and return its folder.

    Files that did not change since they were hashed are not read again.

    Args:
        where: the build's address.
        out: the folder to make; None for a folder in shardmill's cache, named by repository and commit.
        keys: public keys; one key must have signed the build. Empty to accept a build by anybody.

    Raises:
        ShardmillError: the repository does not exist, or is not a sound build.
    """
    from shardmill.checkpoint.hub import download_all
    from shardmill.checkpoint.hub_listing import HubAccess

    if out is not None and out.exists() and any(out.iterdir()):
        raise ShardmillError(f"{out}: is not empty; choose another folder")
    cache = HashCache(_home() / "hashes.sqlite")
    commit, snapshot, names = download_all(where.repo, where.revision, HubAccess(), cache)
    target = out or _home() / where.repo.replace("/", "--") / commit
    if out is None and target.exists():
        if keys:
            _believe(target, keys, where, commit, cache)
        else:
            check_build(target, cache)
        return target
    with replacing(target) as fresh:
        for name in names:
            _place((snapshot / name).resolve(), fresh / name, cache)
        _believe(fresh, keys, where, commit, cache)
    return target


def _believe(build: Path, keys: Sequence[PublicKey], where: Address, commit: str, cache: HashCache) -> None:
    """Raise ShardmillError for the first fault of the fetched build."""
    for name, what in prove(build, keys, cache).wrong[:1]:
        raise ShardmillError(f"{where.repo}@{commit}: {name}: {what}; pull another revision, and tell the publisher")


def local_build(text: str) -> Path:
    """Return a local path unchanged, or fetch a published build and return its folder."""
    return pull(address(text)) if text.startswith(ON_HUB) else Path(text)


def _place(blob: Path, path: Path, cache: HashCache) -> None:
    """Link to the bytes in the hub's cache, or copy them if there are no hard links."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = file_state(blob)
    try:
        os.link(blob, path)
    except OSError:
        shutil.copyfile(blob, path)
    else:
        cache.carry(before, file_state(path))


def _home() -> Path:
    return cache_folder() / "pulled"
