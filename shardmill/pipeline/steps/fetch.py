"""fetch: the checkpoint's files, perhaps with an adapter merged, and the drafter's, and source.receipt.json."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill.checkpoint.cache import HashCache
from shardmill.checkpoint.paths import Row
from shardmill.files import write_json
from shardmill.models.eagle3 import FOLDER
from shardmill.pipeline.task import Task, source_folder

log = logging.getLogger(__name__)


def task(
    source: Mapping[str, str | None],
    drafter: Mapping[str, str | None] | str | None,
    locked: Sequence[Sequence[Row] | None],
    hashes: HashCache,
    before_change: Callable[[], None],
) -> Task:
    """Fill source/ beside the record (source.receipt.json) from a local folder or the hub.

    The files of a drafter with a checkpoint of its own go into a folder inside source/, and the record describes them
    under `drafter`. `locked` is what locks say of the repositories: the model's, then the drafter's.
    """

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.checkpoint.fetch import fetch  # brings in a hub's client, which other jobs need not load

        def fetched(one: Mapping[str, str | None], rows: Sequence[Row] | None, dest: Path) -> dict[str, Any]:
            description = fetch(
                path=Path(one["path"]) if one["path"] else None,
                repo=one["repo"],
                revision=one["revision"],
                dest=dest,
                cache=hashes,
                before_change=before_change,
                adapter=Path(one["adapter"]) if one["adapter"] else None,
                locked=rows,
            )
            log.info("%d files at %s", len(description["files"]), description["commit"])
            return description

        dest = source_folder(made["record"])
        content = fetched(source, locked[0], dest)
        if isinstance(drafter, Mapping):
            content["drafter"] = fetched(drafter, locked[1], dest / FOLDER)
        write_json(made["record"], content)

    return Task(work)
