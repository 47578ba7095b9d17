"""What a run of Snakemake that sends its jobs to other machines does otherwise than one that does them here."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import yaml

from shardmill import config
from shardmill.pipeline import resources as pipeline_resources
from shardmill.pipeline import scheduling
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.needs import STEPS

ROOT = Path(__file__).parents[2]


class Resources(dict[str, SimpleNamespace]):
    """As Snakemake's: what is not there is None, and a number that is put in comes out as a resource."""

    def get(self, name: str, default: object = None) -> SimpleNamespace:  # type: ignore[override]
        return super().get(name, SimpleNamespace(value=default))

    def __setitem__(self, name: str, value: object) -> None:
        super().__setitem__(name, SimpleNamespace(value=value))


def workflow(jobs: int | None, mem_mb: int | None = None, main: bool = True, cores: int | None = None) -> object:
    """Snakemake's workflow object as it is while the rules are read."""
    resources = Resources()
    resources["_nodes"], resources["_cores"] = jobs, cores  # type: ignore[assignment]
    if mem_mb is not None:
        resources["mem_mb"] = mem_mb  # type: ignore[assignment]
    return SimpleNamespace(global_resources=resources, is_main_process=main)


@pytest.mark.parametrize(("system", "most"), [("Linux", 1800), ("Darwin", 1200)])
def test_jobs_of_this_machine_share_its_memory_with_what_else_is_there(
    system: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a Mac the Neural Engine and the GPU are there too, whose weights are in no job's process."""
    here = workflow(None)
    monkeypatch.setattr(pipeline_resources, "memory_bytes", lambda: 2_000_000_000)
    monkeypatch.setattr(platform, "system", lambda: system)
    assert pipeline_resources.most_mb(here) == most
    assert pipeline_resources.most_mb(here) == here.global_resources.get("mem_mb").value  # type: ignore[attr-defined]


def test_what_the_command_line_says_of_memory_holds_everywhere() -> None:
    assert pipeline_resources.most_mb(workflow(None, 700)) == pipeline_resources.most_mb(workflow(50, 700)) == 700


@pytest.mark.parametrize("there", [workflow(50), workflow(None, main=False)], ids=["submitting", "in a job"])
def test_this_machines_memory_limits_no_job_that_runs_elsewhere_or_has_begun(there: object) -> None:
    assert pipeline_resources.most_mb(there) is None
    assert there.global_resources.get("mem_mb").value is None  # type: ignore[attr-defined]


def test_a_job_that_is_sent_somewhere_asks_for_the_snakemakes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [pipeline_resources.held_mb(each) for each in (workflow(None), workflow(50), workflow(50, main=False))] == [
        0,
        pipeline_resources.SNAKEMAKE_MB,
        0,
    ]
    monkeypatch.chdir(ROOT)
    settings = config.parse(tiny.settings("resources/demo"))
    here, there = (scheduling.memory(Batch({settings.model: settings}), workflow(jobs)) for jobs in (None, 50))
    asked: tuple[Any, ...] = (SimpleNamespace(model=settings.model), [], 1, "fetch")
    assert there(*asked) == here(*asked) + pipeline_resources.SNAKEMAKE_MB


@pytest.mark.parametrize(("given", "asked"), [(None, pipeline_resources.NODE_CORES), (1, 1), (64, 64)])
def test_a_cluster_may_have_no_number_of_cores(given: int | None, asked: int) -> None:
    """Snakemake's own `workflow.cores` ends the run there; a dry run does not show it."""
    assert pipeline_resources.every_core(workflow(None, cores=given)) == asked


def test_a_part_of_one_matrix_asks_for_one_core() -> None:
    asked = [pipeline_resources.matrices_at_once(SimpleNamespace(part=part)) for part in ("layers_00_24", "head_0")]
    assert asked == [pipeline_resources.MATRICES, 1]


def test_the_profile_for_slurm_names_rules_that_there_are() -> None:
    profile = yaml.safe_load((ROOT / "profiles/slurm/config.yaml").read_text())
    rules = set(STEPS)
    assert set(profile["groups"]) < rules and set(profile["set-resources"]) < rules
    assert set(profile["group-components"]) < set(profile["groups"].values())


def test_the_default_profile_says_nothing_else_of_what_the_one_for_slurm_does() -> None:
    """Snakemake reads both, and what the default one says would hold."""
    default, slurm = (
        yaml.safe_load((ROOT / f"profiles/{name}/config.yaml").read_text()) for name in ("default", "slurm")
    )
    assert all(default[key] == slurm[key] for key in default.keys() & slurm.keys())
    assert "resources" not in default
