"""What a hub has under a name: the commit that a revision is, and the files of a commit with their ids."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache, write_tree_cache
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile

from shardmill.checkpoint.hub_limits import MOST_FILES, SMALL_SECONDS, explain_http, understood, use_client, within
from shardmill.checkpoint.paths import COMMIT, Row, check_name, is_commit
from shardmill.errors import CheckpointError

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubAccess:
    """The hub's endpoint, cache folder and token; the defaults are the hub client's own environment variables."""

    endpoint: str = constants.ENDPOINT
    cache_dir: Path = Path(constants.HF_HUB_CACHE)
    token: str | None = None

    @property
    def api(self) -> HfApi:
        """Return the hub client for this endpoint, which refuses long waits."""
        use_client()
        return HfApi(endpoint=self.endpoint, token=self.token)


@dataclass(frozen=True)
class RemoteFile:
    """A file in the hub's listing: `sha256` if it lies in large-file storage (LFS), otherwise only a git blob id."""

    name: str
    size: int
    blob_id: str
    sha256: str | None

    @property
    def blob(self) -> str:
        """Return the name of the file's blob in the hub cache."""
        return self.sha256 or self.blob_id

    @property
    def row(self) -> Row:
        """Return the file as a lock has it."""
        return self.name, self.size, f"sha256:{self.sha256}" if self.sha256 else f"git:{self.blob_id}"


def resolve(repo: str, revision: str | None, access: HubAccess) -> tuple[str, list[Row]]:
    """Return the commit that a revision is now, and what the hub lists there. Raises CheckpointError."""
    use_client()
    with explain_http(repo, revision, access.endpoint):
        commit = commit_of(repo, revision, access)
        _, _, listing = listed(repo, commit, access)
        return commit, sorted(file.row for file in listing.values())


def pinned(repo: str, revision: str | None, access: HubAccess) -> str:
    """Return `revision` if it is a commit. Otherwise raise a CheckpointError that names the commit that it is now."""
    if revision and is_commit(revision):
        return revision
    commit = commit_of(repo, revision, access)
    raise CheckpointError(
        f"{repo}: revision {revision or 'main'!r} is a name that can move, and {commit} now; `shardmill lock CONFIG` "
        "keeps it"
    )


def commit_of(repo: str, revision: str | None, access: HubAccess) -> str:
    """Return the current commit of `revision`."""
    if revision and is_commit(revision):
        return revision
    with understood(access.endpoint):
        info = within(SMALL_SECONDS, lambda: access.api.model_info(repo, revision=revision), access.endpoint)
        if not is_commit(str(info.sha)):
            raise ValueError("no commit")
        if str(info.id).casefold() != repo.casefold():  # the hub goes on from an old name for as long as it is free
            raise CheckpointError(f"{repo}: is called {info.id} now; write that name")
    return str(info.sha)


def listed(
    repo: str, commit: str, access: HubAccess, locked: Sequence[Row] | None = None
) -> tuple[Path, Path, dict[str, RemoteFile]]:
    """Return a repository's folder in the hub cache, the folder of a commit in it, and the commit's files by name.

    The listing comes from the cache if possible, because a commit never changes.

    Args:
        repo: owner/name.
        commit: 40 hexadecimal digits.
        access: the hub.
        locked: what a lock says that the hub lists; None without a lock.

    Raises:
        CheckpointError: a name leads out of the checkpoint, an id or a size is invalid, or a lock says otherwise.
    """
    folder, snapshot, files = listing_of(repo, commit, access)
    if locked is not None:
        _check_locked(f"{repo}@{commit[:7]}", {file.row for file in files.values()}, locked)
    return folder, snapshot, files


def _check_locked(source: str, rows: set[Row], locked: Sequence[Row]) -> None:
    other = sorted(rows ^ {(name, size, digest) for name, size, digest in locked})
    if other:
        raise CheckpointError(
            f"{source}: {other[0][0]}: the hub and the lock disagree about this file; check HF_ENDPOINT, or take "
            "what the hub has with `shardmill lock --upgrade CONFIG`"
        )


def listing_of(repo: str, commit: str, access: HubAccess) -> tuple[Path, Path, dict[str, RemoteFile]]:
    folder = access.cache_dir / repo_folder_name(repo_id=repo, repo_type="model")
    snapshot = folder / "snapshots" / commit
    with understood(access.endpoint):
        # The public get_cached_repo_tree leaves out the sha256 that its file holds.
        known = read_tree_cache(str(folder), commit)
        if known is not None:
            cached = (RemoteFile(n, f.size, f.blob_id, f.lfs_sha256) for n, f in known.items())
            return folder, snapshot, _checked(cached, repo)
        tree = within(SMALL_SECONDS, lambda: _asked(repo, commit, access), access.endpoint)
        files = _checked((RemoteFile(f.path, f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in tree), repo)
    write_tree_cache(str(folder), commit, {file.name: _entry(file) for file in files.values()})
    return folder, snapshot, files


def _asked(repo: str, commit: str, access: HubAccess) -> list[RepoFile]:
    tree = access.api.list_repo_tree(repo, recursive=True, revision=commit)
    files = [entry for entry in islice(tree, MOST_FILES + 1) if isinstance(entry, RepoFile)]
    if len(files) > MOST_FILES:
        raise CheckpointError(f"{repo}: the hub lists more than {MOST_FILES} files; choose a repository of one model")
    return files


def _checked(files: Iterable[RemoteFile], repo: str) -> dict[str, RemoteFile]:
    checked = {}
    for file in files:
        check_name(file.name, repo)
        sound = COMMIT.fullmatch(file.blob_id) and (file.sha256 is None or _SHA256.fullmatch(file.sha256))
        if not sound or type(file.size) is not int or not 0 <= file.size < 2**63:
            raise CheckpointError(
                f"{repo}: {file.name}: the hub lists it with an invalid id or size; check HF_ENDPOINT"
            )
        checked[file.name] = file
    return checked


def _entry(file: RemoteFile) -> TreeCacheEntry:
    return TreeCacheEntry(file.size, file.blob_id, file.sha256, file.size if file.sha256 else None)
