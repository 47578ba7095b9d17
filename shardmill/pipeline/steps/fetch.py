"""fetch: the checkpoint's files, linked into the build, and source.receipt.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from shardmill.checkpoint.cache import HashCache
from shardmill.files import write_json
from shardmill.pipeline.task import Task, source_folder

log = logging.getLogger(__name__)


def task(source: Mapping[str, str | None], hashes: HashCache, before_change: Callable[[], None]) -> Task:
    """Fill source/ beside the record (source.receipt.json) from a local folder or the hub."""

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.checkpoint.fetch import fetch  # brings in a hub's client, which other jobs need not load

        content = fetch(
            path=Path(source["path"]) if source["path"] else None,
            repo=source["repo"],
            revision=source["revision"],
            dest=source_folder(made["record"]),
            cache=hashes,
            before_change=before_change,
        )
        write_json(made["record"], content)
        log.info("%d files at %s", len(content["files"]), content["commit"])

    return Task(work)
