"""embedding: the host's embedding table, fp16 as the programs' inputs are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan
from shardmill.files import digest
from shardmill.pipeline.steptable import ingredients, source_folder
from shardmill.pipeline.store import Action, Store


def run(part: Path, record: Path, table: Path, receipt: Path, store: str, threads: int = 1) -> None:
    """Args: part parts/embedding.json; record source.receipt.json; table embedding.safetensors."""
    embedding = plan.load_part(part)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.convert.table import write_table

        write_table(embedding, source_folder(record), made["table"], threads)

    Store(Path(store)).perform(action(embedding), {"table": table}, receipt, work)


def action(embedding: plan.Part) -> Action:
    """The table depends on its tensor alone."""
    return Action("embedding", {"part": digest(embedding.content)}, **ingredients("embedding"))
