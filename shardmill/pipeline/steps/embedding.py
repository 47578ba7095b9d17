"""embedding: the host's embedding table, in fp16 as the programs' inputs are, or in int8."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan
from shardmill.files import digest
from shardmill.pipeline.task import Action, Task, Tools, source_folder


def task(part: Path, record: Path, form: str, tools: Tools, threads: int = 1) -> Task:
    """Describe the table, which depends on its tensors and its form alone: not on how programs feed its rows."""
    piece = plan.load_part(part)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.convert.table import write_table

        write_table(piece, source_folder(record), made["table"], threads, form)

    tensors = digest([tensor.content for tensor in piece.tensors])
    return Task(work, Action("embedding", {"tensors": tensors}, {"form": form}, **tools))
