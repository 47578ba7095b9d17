"""The pipeline's jobs, run in this process in the order of the rules, with what each did on record.

Snakemake decides which jobs may have to run; whether a job works is decided by content, and that is what this driver
lets tests count, in a fraction of the time of forty processes.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmill import config
from shardmill.pipeline import code_digest
from shardmill.pipeline.cache.remote import Remote
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import describe, perform, taken
from shardmill.pipeline.planned import planned
from shardmill.pipeline.resolve import resolve_config
from shardmill.records.names import RECEIPT

from .project import Project, share_templates

AFTER = ("manifest", "benchmark", "provenance", "report")


def run(
    root: Path, content: dict[str, Any], leave_out: Collection[str] = AFTER, shared: Remote | None = None
) -> list[str]:
    """Builds a config under `root`/build; names of the jobs that worked, of those whose results are kept, in order."""
    share_templates(root)
    with one_thread():
        return list(_worked(root, content, leave_out, shared))


@contextmanager
def one_thread() -> Iterator[None]:
    """What a Project's jobs have: some processors add up in another order with two, in the last bits of a gate."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _worked(root: Path, content: dict[str, Any], leave_out: Collection[str], shared: Remote | None) -> Iterator[str]:
    found, kept = config.parse(content), root / "build/.store"
    settings = found if found.is_resolved else resolve_config(found, "config", kept)
    build, store = root / "build" / settings.model, Store(kept, shared=shared)
    for job in planned(settings):
        if job.step.name in leave_out:
            continue
        family = "" if job.step.name == "fetch" else code_digest.fetched_model_type(build / code_digest.RECORD)
        given = job.arguments(build)
        task = describe(job.step.task, given, store, code_digest.tools(job.step, family))
        receipt = build / job.receipt if job.receipt else None
        if perform(task, job.results(build), receipt, store, taken(given)) and receipt:
            yield job.receipt.removesuffix(RECEIPT)


def made_here(project: Project, leave_out: Collection[str] = AFTER) -> Project:
    """Does the jobs of a project in this process, but those of the steps that are left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        run(project.folder, project.content(), leave_out)
    return project


def stored_here(project: Project) -> Project:
    """The same, and then nothing of it is there but its store.

    Snakemake's own jobs find it there in a fraction of the time that the work takes, if each is given what it was given
    here.
    """
    shutil.rmtree(made_here(project).build)
    return project


def measure(root: Path, content: dict[str, Any]) -> list[str]:
    """The same, and model.json and the benchmark."""
    return run(root, content, ("provenance", "report"))
