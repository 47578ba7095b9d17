"""A remote store that does not answer holds up one job, not each of a build."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shardmill.pipeline.cache import remote as cache_remote
from shardmill.pipeline.cache.remote import Remote


def test_a_bucket_that_is_silent_is_soon_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each layer below asks again for itself: all of their tries together are few."""
    settings = cache_remote.PATIENCE["s3"]["config_kwargs"] | {"read_timeout": 0.5}
    monkeypatch.setattr(cache_remote, "PATIENCE", {"s3": {"config_kwargs": settings}})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
        answer = cache_remote.pull(Remote("s3://bucket/folder"), tmp_path / ("a" * 64), lambda work: None)
        silent.setblocking(False)
        tries = 0
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                tries += 1
    assert answer is cache_remote.PullResult.SILENT
    assert 0 < tries <= 4  # two layers that each ask twice; it is fifty with each layer as it comes
    assert "Read timeout" in caplog.text


def test_who_waited_in_vain_spares_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A build may have a thousand jobs. Where an error came soon, the next one asks again; after a while all do."""
    asked = []

    def silent(*_: object) -> None:
        asked.append(1)
        raise TimeoutError("no answer")

    def ask() -> cache_remote.PullResult:
        return cache_remote.pull(Remote("s3://bucket/folder"), tmp_path / ("a" * 64), lambda work: None)

    monkeypatch.setattr(cache_remote, "find_entry", silent)
    caplog.set_level(logging.INFO)
    assert [ask(), ask()] == [cache_remote.PullResult.SILENT] * 2 and len(asked) == 2
    monkeypatch.setattr(cache_remote, "LONG", -1.0)
    assert [ask(), ask()] == [cache_remote.PullResult.SILENT] * 2 and len(asked) == 3
    assert "not asked, as it was silent 0 s ago" in caplog.text
    os.utime(tmp_path / cache_remote.MARK, (time.time() - cache_remote.PAUSE - 1,) * 2)
    ask()
    assert len(asked) == 4


def test_a_download_that_stands_still_is_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that has the entry and sends nothing holds up each job of a build for as long."""

    class ReadTimeoutError(Exception):
        """As botocore calls it."""

    def stands_still(work: object) -> None:
        raise OSError("no bytes") from ReadTimeoutError()

    monkeypatch.setattr(cache_remote, "find_entry", lambda *_: {"file": "a" * 64})
    monkeypatch.setattr(cache_remote, "LONG", -1.0)
    assert (
        cache_remote.pull(Remote("s3://bucket/folder"), tmp_path / ("a" * 64), stands_still)
        is cache_remote.PullResult.SILENT
    )
    assert (tmp_path / cache_remote.MARK).exists()


def test_a_download_that_breaks_off_is_not_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it took: the store answers, and the next job may be luckier."""

    def breaks(work: object) -> None:
        raise ConnectionError("reset by peer")

    monkeypatch.setattr(cache_remote, "find_entry", lambda *_: {"file": "a" * 64})
    monkeypatch.setattr(cache_remote, "LONG", -1.0)
    assert (
        cache_remote.pull(Remote("s3://bucket/folder"), tmp_path / ("a" * 64), breaks) is cache_remote.PullResult.SILENT
    )
    assert not (tmp_path / cache_remote.MARK).exists()
