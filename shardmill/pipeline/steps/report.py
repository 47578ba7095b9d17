"""report: one page for a person, from the files of a build and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.checkpoint.hashing import hash_file, tree_hashes
from shardmill.files import read_json, sealed, write_json, write_text
from shardmill.pipeline.task import Task, paths_from

if TYPE_CHECKING:
    from shardmill.report.read import Build

log = logging.getLogger(__name__)


def task(
    manifest: Path,
    summary: Path,
    record: Path,
    parts: list[Path],
    artifacts: list[Path],
    verdicts: list[Path],
    speed: list[Path],
    receipts: list[Path],
    search: list[Path],
    evidence: list[Path],
    points: list[Path],
    predicted: list[Path],
    settings: Mapping[str, Any],
    pipeline: Sequence[Mapping[str, Any]],
) -> Task:
    """Describe report.html, its figures as files, and a receipt with their hashes and the benchmark's hash.

    `artifacts` are the packages and the embedding table, whose sizes are shown. Five lists may be empty: `speed` has
    the benchmark's result, `search` the search's, and `points` the measurements of sets of forms. `predicted` has the
    predicted costs of the Neural Engine's arithmetic, and `evidence` imported measurements from other machines.
    `pipeline` is what `snakefile.listed_steps` returns.
    """

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.evidence.build import read_evidence
        from shardmill.report.read import Build, read_pieces, read_receipts, read_verdicts

        plan, root, model = read_json(summary), manifest.parent, read_json(manifest)
        devices, stale = read_evidence(sorted(evidence), model)
        build = Build(
            model=model,
            plan=plan,
            source=read_json(record),
            pieces=read_pieces(plan, parts, artifacts),
            verdicts=read_verdicts(verdicts, root),
            speed=read_json(speed[0]) if speed else None,
            receipts=read_receipts(receipts, root),
            settings=settings,
            pipeline=pipeline,
            search=read_json(search[0]) if search else None,
            devices=devices,
            stale=stale,
            predicted=read_json(predicted[0]) if predicted else None,
            points={point.stem: read_json(point) for point in points},
        )
        _write(build, made)
        write_json(made["hashes"], sealed(_receipt(made, speed)))

    return Task(work)


def _write(build: Build, made: Mapping[str, Path]) -> None:
    """Describe the page, and each of its figures as a file."""
    from shardmill.report.page import context, filled
    from shardmill.report.wording import alone

    shown = context(build)
    log.info("%s", shown["verdict"].line)
    write_text(made["page"], filled(shown))
    made["plots"].mkdir(parents=True, exist_ok=True)
    for plot in (*shown.get("plots", ()), *([shown["front"]] if build.search else ())):
        write_text(made["plots"] / f"{plot.name}.svg", alone(plot.svg))


def _receipt(made: Mapping[str, Path], speed: list[Path]) -> dict[str, Any]:
    """Return the hashes of the page and of the benchmark, and of the figures if the page has any."""
    known = {"page": made["page"], **({"speed": speed[0]} if speed else {})}
    hashes = {name: hash_file(path) for name, path in known.items()}
    plots, files = tree_hashes(made["plots"])
    if files:
        known["plots"], hashes["plots"] = made["plots"], plots
    return {
        "step": "report",
        "outputs": hashes,
        "paths": paths_from(made["hashes"], known),
        "files": {"plots": files} if files else {},
    }
