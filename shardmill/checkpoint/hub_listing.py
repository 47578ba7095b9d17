"""What a hub says of a repository at a commit, checked before anything of it is used.

Ids become names of files in the cache, so each must be what it claims to be: 40 or 64 hexadecimal digits.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub._tree_cache import TreeCacheEntry, read_tree_cache, write_tree_cache
from huggingface_hub.hf_api import RepoFile

from shardmill.checkpoint.hub_errors import understood
from shardmill.checkpoint.hub_limits import MOST_FILES, SMALL_SECONDS, use_client, within
from shardmill.checkpoint.paths import check_name
from shardmill.errors import CheckpointError

_GIT_ID = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class HubAccess:
    """Where the hub is and who asks; the defaults are the hub client's own environment variables."""

    endpoint: str = constants.ENDPOINT
    cache_dir: Path = Path(constants.HF_HUB_CACHE)
    token: str | None = None

    @property
    def api(self) -> HfApi:
        """The hub client for this endpoint, which waits for nobody's hour."""
        use_client()
        return HfApi(endpoint=self.endpoint, token=self.token)


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file: `sha256` if it lies in large-file storage (LFS), else only its git blob id."""

    name: str
    size: int
    blob_id: str
    sha256: str | None

    @property
    def blob(self) -> str:
        """The name of its bytes in the hub cache."""
        return self.sha256 or self.blob_id


def pinned(repo: str, revision: str | None, access: HubAccess) -> str:
    """The commit that `revision` is. Raises CheckpointError, naming the commit to pin, if it is a name."""
    if revision and _GIT_ID.fullmatch(revision):
        return revision
    commit = resolved(repo, revision, access)
    raise CheckpointError(f"{repo}: revision {revision or 'main'!r} is a name that can move; pin revision: {commit}")


def resolved(repo: str, revision: str | None, access: HubAccess) -> str:
    """The commit that `revision` is now."""
    if revision and _GIT_ID.fullmatch(revision):
        return revision
    with understood(access.endpoint):
        commit = within(SMALL_SECONDS, lambda: access.api.model_info(repo, revision=revision).sha, access.endpoint)
        if not _GIT_ID.fullmatch(str(commit)):
            raise ValueError("no commit")
    return str(commit)


def list_files(repo: str, commit: str, folder: Path, access: HubAccess) -> dict[str, RemoteFile]:
    """The repository's files at a commit by name; from the cache where it has them, as a commit never changes.

    Args:
        repo: owner/name.
        commit: 40 hexadecimal digits.
        folder: the repository's folder in the hub cache.
        access: the hub.

    Raises:
        CheckpointError: a name leads out of the checkpoint, or an id or a size is invalid.
    """
    with understood(access.endpoint):
        # The public get_cached_repo_tree leaves out the sha256 that its file holds.
        known = read_tree_cache(str(folder), commit)
        if known is not None:
            return _checked((RemoteFile(n, f.size, f.blob_id, f.lfs_sha256) for n, f in known.items()), repo)
        tree = within(SMALL_SECONDS, lambda: _asked(repo, commit, access), access.endpoint)
        files = _checked((RemoteFile(f.path, f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in tree), repo)
    write_tree_cache(str(folder), commit, {file.name: _entry(file) for file in files.values()})
    return files


def _asked(repo: str, commit: str, access: HubAccess) -> list[RepoFile]:
    tree = access.api.list_repo_tree(repo, recursive=True, revision=commit)
    found = [entry for entry in islice(tree, MOST_FILES + 1) if isinstance(entry, RepoFile)]
    if len(found) > MOST_FILES:
        raise CheckpointError(f"{repo}: the hub lists more than {MOST_FILES} files; choose a repository of one model")
    return found


def _checked(files: Iterable[RemoteFile], repo: str) -> dict[str, RemoteFile]:
    checked = {}
    for file in files:
        check_name(file.name, repo)
        sound = _GIT_ID.fullmatch(file.blob_id) and (file.sha256 is None or _SHA256.fullmatch(file.sha256))
        if not sound or type(file.size) is not int or not 0 <= file.size < 2**63:
            raise CheckpointError(
                f"{repo}: {file.name}: the hub lists it with an invalid id or size; check HF_ENDPOINT"
            )
        checked[file.name] = file
    return checked


def _entry(file: RemoteFile) -> TreeCacheEntry:
    return TreeCacheEntry(file.size, file.blob_id, file.sha256, file.size if file.sha256 else None)
