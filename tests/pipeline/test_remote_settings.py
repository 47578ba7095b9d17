"""The environment names the remote store, or what is wrong with what it names is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shardmill.errors import ShardmillError
from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.remote import Remote


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({remote.URL: "sftp://me:hunter2@host/x"}, "password"),
        ({remote.URL: "abfs://x/y?sig=hunter2"}, "token"),
        ({remote.URL: "https://hunter2@host/x"}, "token"),
        ({remote.URL: "https://host/x#hunter2"}, "token"),
        ({remote.URL: "simplecache::s3://me:hunter2@b/x"}, "token"),
        ({remote.URL: "s3:/bucket/folder"}, "no URL such as s3://bucket/folder"),
        ({remote.URL: "s3//bucket"}, "no URL such as"),
        ({remote.URL: "bucket/folder"}, "no URL such as"),
        ({remote.URL: "file://folder"}, "no URL such as"),
        ({remote.URL: "memory://x"}, "each process' own"),
        ({remote.URL: "http://["}, "Invalid IPv6 URL"),
        ({remote.URL: "s3://b/x", remote.MODE: "hunter2"}, "neither 'read' nor 'read-write'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ShardmillError, match=message) as refused:
        remote.configured(variables)
    assert remote.MODE in variables or "hunter2" not in str(refused.value)


def test_the_environment_names_the_store() -> None:
    assert remote.configured({}) is None
    assert remote.configured({remote.URL: "s3://b/x"}) == Remote("s3://b/x")
    assert remote.configured({remote.URL: "/mnt/a #1?"}) == Remote("/mnt/a #1?")
    assert remote.configured({remote.URL: "sftp://me@h/x", remote.MODE: "read"}) == Remote("sftp://me@h/x", False)


@pytest.mark.parametrize("protocol", ["s3", "s3a"])
def test_a_bucket_is_waited_for_as_long_by_either_of_its_names(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []

    def opened(url: str, **options: Any) -> tuple[SimpleNamespace, str]:
        given.append(options)
        return SimpleNamespace(), "b/x"

    monkeypatch.setattr("fsspec.core.url_to_fs", opened)
    remote.check_address(Remote(f"{protocol}://b/x"))
    assert given == [{"use_listings_cache": False, **remote.PATIENCE["s3"]}]


@pytest.mark.parametrize(("url", "message"), [("nonsense://x", "nonsense"), ("gs://x/y", "gcsfs")])
def test_a_store_that_nothing_here_can_open_is_refused(url: str, message: str) -> None:
    with pytest.raises(ShardmillError, match=f"{remote.URL}: .*{message}"):
        remote.check_address(Remote(url))
    remote.check_address(Remote("file:///tmp"))
