"""codes: the integers that quantisers choose for a part's matrices, from the matrices' inputs during calibration.

Every matrix gets codes, whatever form a recipe gives it, so another recipe does not make the codes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from shardmill import plan
from shardmill.files import digest, read_json
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder


def task(part: Path, summary: Path, record: Path, edges: Artifact, forms: Sequence[str], tools: Tools) -> Task:
    """Describe a file of codes in INT4 and in `forms`, the forms besides INT4 and INT8 that the search may choose.

    See convert/codes.py. The file's metadata has the errors of each matrix, by form.
    """
    piece, content = plan.load_part(part), read_json(summary)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.precision.original import original
        from shardmill.precision.part_codes import write_part_codes

        source = source_folder(record)
        write_part_codes(piece, source, original(source, content), edges.path, made["codes"], forms)

    params = {"forms": forms} if forms else {}
    return Task(work, Action("codes", {"part": digest(piece.content), "edges": edges.sha256}, params, **tools))
