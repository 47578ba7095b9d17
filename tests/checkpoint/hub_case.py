"""A build folder and a hub cache of their own, filled from the tests' hub."""

from pathlib import Path

import pytest

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.fetch import fetch
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.errors import CheckpointError

from .hub_server import COMMIT, REPO, Hub

CHUNK = 1 << 16  # in which the client writes what it downloads


class Case:
    """One build folder and one hub cache."""

    def __init__(self, tmp_path: Path, hub: Hub) -> None:
        self.dest = tmp_path / "build" / "source"
        self.cache_dir = tmp_path / "hub"
        self.hub = hub

    def fetch(
        self,
        repo: str = REPO,
        revision: str | None = COMMIT,
        token: str | None = None,
        cache: HashCache | None = None,
    ) -> dict:
        access = HubAccess(self.hub.endpoint, self.cache_dir, token)
        return fetch(path=None, repo=repo, revision=revision, dest=self.dest, cache=cache, access=access)

    def refused(self, repo: str = REPO, revision: str | None = COMMIT, token: str | None = None) -> str:
        with pytest.raises(CheckpointError) as caught:
            self.fetch(repo, revision, token)
        assert "\n" not in str(caught.value)
        assert not self.dest.exists()
        return str(caught.value)
