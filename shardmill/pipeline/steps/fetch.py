"""fetch: the checkpoint's files, linked into the build, and source.json."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill.checkpoint.fetch import fetch
from shardmill.files import write_json
from shardmill.pipeline.steptable import source_folder
from shardmill.pipeline.store import Store

log = logging.getLogger(__name__)


def run(record: Path, store: str, source: Mapping[str, str | None], files: Any = None) -> None:
    """Fills source/ beside `record` (source.receipt.json) from the config's `source`, a local folder or the hub.

    `files` are inputs only for Snakemake, which sees by them that a local checkpoint changed.
    """
    content = fetch(
        path=Path(source["path"]) if source["path"] else None,
        repo=source["repo"],
        revision=source["revision"],
        dest=source_folder(record),
        cache=Store(Path(store)).hashes,
    )
    write_json(record, content)
    log.info("%d files at %s", len(content["files"]), content["commit"])
