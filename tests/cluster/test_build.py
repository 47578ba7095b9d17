"""A model's build through Slurm on two nodes, with the profile as it is: the same bytes as without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from pipeline.driver import made_here
from pipeline.project import TARGETS, Project
from processes import succeeded

from .configuration import NODES
from .slurm import Cluster
from .submitting import Submitting, contents

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


PARTS = {"topology": [[0, 2]]}  # and a head: as few as there can be
SECONDS = 3000.0  # on a machine with much else to do; alone it is three minutes


def test_a_build_through_slurm_has_the_bytes_of_one_without(
    cluster: Cluster, tmp_path: Path, compared_model: str
) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=2)
    there = Submitting(tmp_path / "there", cluster, "--profile", "profiles/slurm")
    here = Project(tmp_path / "here")
    for project in (there, here):
        project.create(checkpoint).configure(**PARTS)
        if compared_model == "demo":
            project.take_demo()
    before = len(cluster.jobs())
    snakemake = there.begin(*TARGETS)
    made_here(here, ("benchmark", "report", "provenance"))  # the last names the clone that this process is of
    last = here.run("build/tiny/provenance.json", "--rerun-triggers", "mtime")
    succeeded(last)
    assert snakemake.wait(SECONDS) == 0, there.said()
    assert contents(there.build) == contents(here.build)
    jobs = cluster.jobs()[before:]
    assert {job.state for job in jobs} == {"COMPLETED"} and {job.node for job in jobs} == set(NODES)
    assert len(jobs) == {"tiny": 8, "demo": 14}[compared_model]  # of 17 steps, and of 43
    assert "Nothing to be done" in there.run(*TARGETS).stdout
