"""config.json alone, from a hub with the real client: checked as a whole checkpoint's files are, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.checkpoint.hub import download_config
from shardmill.checkpoint.hub_listing import HubAccess
from shardmill.checkpoint.modules import longest_text
from shardmill.errors import CheckpointError

from .hub_server import COMMIT, REPO, running
from .samples import two_file_checkpoint


def test_only_config_json_is_fetched_and_only_once(tmp_path: Path) -> None:
    """Its bytes and a listing; a commit never changes, so the next time nothing is asked."""
    files = two_file_checkpoint()
    with running(files) as hub:
        access = HubAccess(hub.endpoint, tmp_path)
        assert download_config(REPO, COMMIT, access).read_bytes() == files["config.json"]
        assert not any(hub.downloads(name) for name in files if name != "config.json")
        before = len(hub.downloads("config.json"))
        assert before == 1
        assert download_config(REPO, COMMIT, access).read_bytes() == files["config.json"]
        assert len(hub.downloads("config.json")) == before


def test_how_long_texts_may_be_is_fetched_with_it(tmp_path: Path) -> None:
    """`buckets: auto` follows from it."""
    with running(two_file_checkpoint() | {"sentence_bert_config.json": b'{"max_seq_length": 8}'}) as hub:
        found = download_config(REPO, COMMIT, HubAccess(hub.endpoint, tmp_path))
    assert longest_text(found.parent) == 8


def test_other_bytes_than_the_listing_promises_are_refused(tmp_path: Path) -> None:
    files = two_file_checkpoint()
    with running(files) as hub:
        hub.served["config.json"] = files["config.json"].replace(b"{", b"[", 1)
        with pytest.raises(CheckpointError, match=r"config\.json") as caught:
            download_config(REPO, COMMIT, HubAccess(hub.endpoint, tmp_path))
    assert "\n" not in str(caught.value)


def test_a_repository_without_config_json_is_named(tmp_path: Path) -> None:
    files = two_file_checkpoint()
    del files["config.json"]
    with running(files) as hub, pytest.raises(CheckpointError, match=f"{REPO}@.*: holds no config.json"):
        download_config(REPO, COMMIT, HubAccess(hub.endpoint, tmp_path))
