"""Forecasts which jobs the next `all` would work on, and why, without doing their work.

The jobs of Snakemake's own DAG are gone through in a scratch folder. Known outputs are linked into this folder: from
the store, or from the build if the store no longer has them. Each step describes its job as in the build, and the job's
action is looked up. If a step would work, its outputs are not known. The steps that read these outputs are then
reported as depending on them: they may turn out to be unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardmill.checkpoint.fetch import adapter_hashes, as_fetched, hash_local, source_description
from shardmill.config import Config, Source
from shardmill.files import read_json, write_json
from shardmill.imports import quiet, quiet_transformers
from shardmill.models.eagle3 import FOLDER
from shardmill.pipeline import code_digest
from shardmill.pipeline.cache import entry as entries
from shardmill.pipeline.cache.entry import intact, read_entry
from shardmill.pipeline.cache.store import Store, write_receipt
from shardmill.pipeline.code_digest import RECORD
from shardmill.pipeline.job import describe
from shardmill.pipeline.planned import Job, planned
from shardmill.pipeline.task import Action, Task, source_folder
from shardmill.records.names import RECEIPT


@dataclass(frozen=True)
class StepOutlook:
    """One job: "unchanged", "works" (for a reason) or "depends" (on an output)."""

    step: str
    status: str
    reason: str = ""


def forecast(config: Config, build: Path, store: Store) -> list[StepOutlook]:
    """Return a verdict for every job whose result is kept, each after the jobs whose outputs it reads.

    Args:
        config: the model's config.
        build: the model's folder.
        store: where results are kept on this machine; a remote store is not asked.
    """
    record = _source_record(config, build, store)
    if record is None:
        return [StepOutlook("source", "works", "not fetched as the config has it; all else depends on what it brings")]
    with TemporaryDirectory(prefix="shardmill-why-") as folder:
        known = Path(folder)
        write_json(known / RECORD, record)
        _link_checkpoints(config, source_folder(build / RECORD), source_folder(known / RECORD))
        jobs = planned(config)
        walk = _Walk(build, store, known, {_label(job) for job in jobs})
        outlooks = [walk.visit(job) for job in jobs if job.step.name != "fetch"]
        return [verdict for verdict in outlooks if verdict]


# Steps that are done in the scratch folder where they would work: they are quick, and later steps read their outputs.
ON_THE_SIDE = ("split", "precision", "manifest")


def _label(job: Job) -> str:
    """Return the name of a job's result: the path of its receipt without the suffix; empty without a receipt."""
    return job.receipt.removesuffix(RECEIPT)


def _link_checkpoints(config: Config, fetched: Path, source: Path) -> None:
    """Link the checkpoint, and its drafter's files in a folder, to where the steps look for them.

    Args:
        config: the model's config.
        fetched: the build's folder source/.
        source: the folder to make.
    """
    checkpoint = Path(config.source.path) if config.source.path and not config.source.adapter else fetched
    if len(config.sources) == 1:
        source.symlink_to(checkpoint.resolve())
        return
    path = config.sources[1].path
    drafter = Path(path) if path else fetched / FOLDER
    for file in checkpoint.resolve().iterdir():
        if file.is_file():
            _link(file, source / file.name)
    _link(drafter, source / FOLDER)


def _source_record(config: Config, build: Path, store: Store) -> Any:
    """Return source.receipt.json as the next fetch would write it; None if this takes a download."""
    receipt = build / RECORD
    recorded = read_json(receipt) if receipt.is_file() else {}
    record = _record(config.source, {key: value for key, value in recorded.items() if key != "drafter"}, store)
    if record is None or len(config.sources) == 1:
        return record
    drafter = _record(config.sources[1], recorded.get("drafter", {}), store)
    return drafter and record | {"drafter": drafter}


def _record(source: Source, fetched: Mapping[str, Any], store: Store) -> dict[str, Any] | None:
    """Return a checkpoint's record, given what the last fetch wrote; None if this takes a download or a merge."""
    if source.adapter:
        adapted = fetched.get("adapter", {}).get("files") == adapter_hashes(Path(source.adapter))
        bare = as_fetched(fetched) if adapted else {}
        if source.path is None:
            return dict(fetched) if bare and fetched.get("commit") == source.revision else None
        known = hash_local(Path(source.path), store.hashes)
        return dict(fetched) if {name: entry["sha256"] for name, entry in bare.items()} == known else None
    if source.path is None:
        return dict(fetched) if fetched.get("commit") == source.revision and "adapter" not in fetched else None
    folder = Path(source.path)
    files = source_description(folder, hash_local(folder, store.hashes))
    if "completed" in fetched and as_fetched(fetched) == files:
        return dict(fetched)
    return {"repo": None, "commit": "local", "files": files}


@dataclass(frozen=True)
class _Walk:
    """Goes through the jobs.

    Attributes:
        known: the folder into which known outputs are linked.
        labels: the names of all results, see `_label`.
    """

    build: Path
    store: Store
    known: Path
    labels: set[str]

    def visit(self, job: Job) -> StepOutlook | None:
        """Return the verdict on a job; None for a job whose result is not kept.

        If the job's outputs can be known, they are in the folder of known outputs afterwards.
        """
        step, label = job.step, _label(job)
        missing = self.missing(job)
        if missing:
            return StepOutlook(label, "depends", missing) if label else None
        if not label and step.name not in ON_THE_SIDE:
            return None
        tools = code_digest.tools(step, code_digest.fetched_model_type(self.known / RECORD))
        task = describe(step.task, job.arguments(self.known), self.store, tools)
        outputs = job.results(self.known)
        if task.action is None:
            task.work(outputs)
            return None
        receipt = f"{label}{RECEIPT}"
        if self.linked_from_store(task, task.action, outputs, receipt):
            return StepOutlook(label, "unchanged")
        if self.linked_from_build(task.action, outputs, receipt):
            return StepOutlook(label, "unchanged")
        if step.name in ON_THE_SIDE:
            with quiet_transformers(), quiet("shardmill"):
                _made_in_place(task, outputs)
            recorded = {name: entries.entry_description(path) for name, path in outputs.items()}
            write_receipt(self.known / receipt, task.action, recorded, outputs, task.notes)
        return StepOutlook(label, "works", self.store.reason(task.action, self.build / receipt))

    def missing(self, job: Job) -> str:
        """Return the first input of a job that is not known, by its name as a result.

        Empty if all inputs are known.
        """
        gone = next((path for path in job.read() if not (self.known / path).exists()), "")
        plain = gone.removesuffix(RECEIPT).removesuffix(Path(gone).suffix)
        return plain if plain in self.labels else gone

    def linked_from_store(self, task: Task, action: Action, outputs: Mapping[str, Path], receipt: str) -> bool:
        """Link an action's outputs from the store; False if the store does not have them."""
        entry = self.store.root / action.key
        if not intact(entry):
            return False
        recorded = read_entry(entry)
        for name, path in outputs.items():
            _link(entry / recorded[name]["file"], path)
        write_receipt(self.known / receipt, action, recorded, outputs, task.notes)
        return True

    def linked_from_build(self, action: Action, outputs: Mapping[str, Path], receipt: str) -> bool:
        """Link an action's outputs from the build; False if a file is missing or another action made them."""
        files = {path: self.build / path.relative_to(self.known) for path in (*outputs.values(), self.known / receipt)}
        if not all(path.exists() for path in files.values()):
            return False
        if read_json(self.build / receipt).get("key") != action.key:
            return False
        for path, source in files.items():
            _link(source, path)
        return True


def _made_in_place(task: Task, outputs: Mapping[str, Path]) -> None:
    """Do a job's work without looking into the store."""
    for path in outputs.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    task.work(outputs)


def _link(source: Path, target: Path) -> None:
    """Make a symbolic link."""
    target.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(source.resolve(), target)
