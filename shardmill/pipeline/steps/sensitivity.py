"""sensitivity: what each matrix of a part costs in quality if it alone is stored in four bits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from shardmill import plan
from shardmill.files import digest, read_json, write_json
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder


def task(
    part: Path, summary: Path, record: Path, edges: Artifact, codes: Artifact, tools: Tools, threads: int = 1
) -> Task:
    """Describe {"matrices": {path: {"kl": nats, "errors": {form: share}}}} of the matrices whose cost is known."""
    piece, content = plan.load_part(part), read_json(summary)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.original import original
        from shardmill.precision.part_costs import part_costs

        source = source_folder(record)
        originals = partial(original, source, content, often=True)
        matrices = part_costs(piece, source, originals, edges.path, codes.path, made["costs"].parent, threads)
        write_json(made["costs"], {"matrices": matrices})

    inputs = {"part": digest(piece.content), "source": content["source"], "edges": edges.sha256, "codes": codes.sha256}
    return Task(work, Action("sensitivity", inputs, {}, **tools))
