"""fetch: the checkpoint's files, linked into the build, and source.json."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from shardmill import canonical
from shardmill.checkpoint.fetch import fetch
from shardmill.steps import source_folder
from shardmill.store import Store

log = logging.getLogger(__name__)


def run(record: Path, store: str, path: str | None, repo: str | None, revision: str | None, **_: Any) -> None:
    """Fills source/ beside `record` (source.receipt.json) from a local folder or from the hub.

    The files themselves as inputs (`_`) are only for Snakemake, which sees by them that a local checkpoint changed.
    """
    content = fetch(
        path=Path(path) if path else None,
        repo=repo,
        revision=revision,
        dest=source_folder(record),
        cache=Store(Path(store)).hashes,
    )
    canonical.write_json(record, content)
    log.info("%d files at %s", len(content["files"]), content["commit"])
