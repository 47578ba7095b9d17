"""Downloads one pinned commit of a hub repository into the hub's cache and checks every byte of it.

The hub client lists, authenticates, and fills its cache. Weight files are streamed here, through the client's own
`http_get`: huggingface_hub 2.4 gives every download a new temporary name and deletes it on failure, so that a
killed process would begin its gigabytes anew. Ours have one name per content and are resumed by any later run,
and enter the cache only after their sha256 was found right.
"""

import hashlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url, snapshot_download
from huggingface_hub._tree_cache import read_tree_cache
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.hashing import hash_file, hash_files
from shardmill.checkpoint.hub_errors import explained
from shardmill.checkpoint.layout import text_files, weight_files
from shardmill.checkpoint.paths import check_name
from shardmill.checkpoint.progress import reporting
from shardmill.errors import CheckpointError

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class HubAccess:
    """Where the hub is and who asks; the defaults are the hub client's own environment variables."""

    endpoint: str = constants.ENDPOINT
    cache_dir: Path = Path(constants.HF_HUB_CACHE)
    token: str | None = None


@dataclass(frozen=True)
class RemoteFile:
    """What the hub says of a file: `sha256` if it lies in large-file storage (LFS), else only its git blob id."""

    name: str
    size: int
    blob_id: str
    sha256: str | None


def download(
    repo: str, revision: str | None, access: HubAccess, cache: HashCache | None
) -> tuple[Path, dict[str, str]]:
    """The cached snapshot folder of a commit, and the sha256 of each of its checkpoint files by name.

    Raises CheckpointError: revision not pinned to a commit, no access, no network, no space, damaged files, no
    safetensors. A damaged file is removed from the cache, so that the next run fetches it anew.
    """
    with explained(repo, revision, access.endpoint):
        commit = _pinned(repo, revision, access)
        listing = _list_files(repo, commit, access)
        texts = text_files(listing)
        folder = _snapshot(repo, commit, texts, access)
        hashes = _verified(folder, [listing[name] for name in texts], cache)
        weights = [listing[name] for name in weight_files(folder, listing, f"{repo}@{commit[:7]}")]
        _check_space(repo, weights, access)
        for file in weights:
            _download_weights(repo, commit, file, access)
        _snapshot(repo, commit, [*texts, *(file.name for file in weights)], access)
        return folder, hashes | _verified(folder, weights, cache)


def download_config(repo: str, revision: str | None, access: HubAccess) -> Path:
    """config.json of a commit in the hub's cache, checked as all files are. Raises CheckpointError."""
    with explained(repo, revision, access.endpoint):
        commit = _pinned(repo, revision, access)
        listing = _list_files(repo, commit, access)
        if "config.json" not in listing:
            raise CheckpointError(f"{repo}@{commit[:7]}: holds no config.json; choose a repository in its own layout")
        folder = _snapshot(repo, commit, ["config.json"], access)
        _verified(folder, [listing["config.json"]], None)
        return folder / "config.json"


def _pinned(repo: str, revision: str | None, access: HubAccess) -> str:
    if revision and _COMMIT.fullmatch(revision):
        return revision
    commit = HfApi(endpoint=access.endpoint, token=access.token).model_info(repo, revision=revision).sha
    raise CheckpointError(f"{repo}: revision {revision or 'main'!r} is a name that can move; pin revision: {commit}")


def _list_files(repo: str, commit: str, access: HubAccess) -> dict[str, RemoteFile]:
    """The repository's files at a commit; from the cache where it has them, as a commit never changes."""
    # The public get_cached_repo_tree leaves out the sha256 that its file holds.
    cached = read_tree_cache(str(_cache_folder(repo, access)), commit)
    if cached is not None:
        files = [RemoteFile(name, f.size, f.blob_id, f.lfs_sha256) for name, f in cached.items()]
    else:
        api = HfApi(endpoint=access.endpoint, token=access.token)
        tree = api.list_repo_tree(repo, recursive=True, revision=commit)
        found = [entry for entry in tree if isinstance(entry, RepoFile)]
        files = [RemoteFile(f.path, f.size, f.blob_id, f.lfs.sha256 if f.lfs else None) for f in found]
    for file in files:
        check_name(file.name, repo)
    return {file.name: file for file in files}


def _cache_folder(repo: str, access: HubAccess) -> Path:
    return access.cache_dir / repo_folder_name(repo_id=repo, repo_type="model")


def _snapshot(repo: str, commit: str, names: list[str], access: HubAccess) -> Path:
    return Path(
        snapshot_download(
            repo,
            revision=commit,
            allow_patterns=names,
            cache_dir=access.cache_dir,
            token=access.token,
            endpoint=access.endpoint,
        )
    )


def _check_space(repo: str, files: Iterable[RemoteFile], access: HubAccess) -> None:
    folder = _cache_folder(repo, access)
    missing = sum(_missing_bytes(folder, file) for file in files)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise CheckpointError(
            f"{folder}: disk full, {missing / 1e9:.1f} GB to download and {free / 1e9:.1f} GB free; "
            "free space or move the cache with HF_HOME"
        )


def _missing_bytes(folder: Path, file: RemoteFile) -> int:
    blob = folder / "blobs" / (file.sha256 or file.blob_id)
    if blob.exists():
        return 0
    partial = _partial(blob)
    return file.size - (partial.stat().st_size if partial.exists() else 0)


def _partial(blob: Path) -> Path:
    return blob.with_name(f"{blob.name}.shardmill.incomplete")


def _download_weights(repo: str, commit: str, file: RemoteFile, access: HubAccess) -> None:
    """Brings one large file into the cache's blobs, resuming what an earlier run left; no-op if it is there."""
    if file.sha256 is None:
        return  # small enough for git: `_snapshot` fetches it
    folder = _cache_folder(repo, access)
    blob = folder / "blobs" / file.sha256
    partial = _partial(blob)
    lock = access.cache_dir / ".locks" / folder.name / f"{blob.name}.lock"
    for path in (blob, lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if blob.exists():
            return
        _stream(hf_hub_url(repo, file.name, revision=commit, endpoint=access.endpoint), partial, file, access)
        if hash_file(partial) != file.sha256:
            partial.unlink()
            raise CheckpointError(f"{repo}: {file.name} arrived damaged (sha256 differs) and was removed; run again")
        partial.rename(blob)


def _stream(url: str, partial: Path, file: RemoteFile, access: HubAccess) -> None:
    if partial.exists() and partial.stat().st_size > file.size:
        partial.unlink()
    with partial.open("ab") as stream, reporting(file.name, partial, file.size):
        http_get(
            url,
            stream,
            resume_size=stream.tell(),
            headers=build_hf_headers(token=access.token),
            expected_size=file.size,
            displayed_filename=file.name,
        )


def _verified(folder: Path, files: list[RemoteFile], cache: HashCache | None) -> dict[str, str]:
    """sha256 of each file, after comparing its bytes with the hub's sha256 (LFS) or git blob id."""
    hashes = hash_files([folder / file.name for file in files], cache)
    for file in files:
        path = folder / file.name
        if (hashes[path] != file.sha256) if file.sha256 else (_git_blob_id(path) != file.blob_id):
            path.resolve().unlink()
            path.unlink(missing_ok=True)
            raise CheckpointError(f"{path}: not the hub's file (hash differs); removed from the cache, run again")
    return {file.name: hashes[folder / file.name] for file in files}


def _git_blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
