"""A build through Slurm whose jobs share nothing but a bucket: each has a folder of its own for what it is brought."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from pipeline.bucket import BUCKET, bucket
from pipeline.test_storage import contents

from .slurm import Cluster
from .submitting import Submitting
from .test_build import PARTS, SECONDS

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

SHARED = ("persistence", "software-deployment", "sources", "source-cache")  # of all that may be, no input and no output

ALONE = "fetch=fetch"  # in place of the profile's groups, whose later steps do not find what the first have made


def test_jobs_that_share_a_bucket_alone_build_a_model(cluster: Cluster, tmp_path: Path) -> None:
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=2)
    with bucket():
        storage = ("--default-storage-provider", "s3", "--default-storage-prefix", f"s3://{BUCKET}/b")
        own = ("--remote-job-local-storage-prefix", f"{tmp_path}/scratch/$SLURM_JOB_ID")
        options = ("--profile", "profiles/slurm", *storage, *own, "--groups", ALONE, "--shared-fs-usage", *SHARED)
        project = Submitting(tmp_path / "project", cluster, *options)
        project.create(checkpoint).configure(**PARTS)
        assert project.begin("build/tiny/model.json").wait(SECONDS) == 0, project.said()
        made = dict(contents(f"s3://{BUCKET}/b/build/tiny"))
    assert not project.build.exists()
    assert {"model.json", "packages/head_0.mlpackage/Manifest.json", "source/config.json"} <= made.keys()
    assert len(list((tmp_path / "scratch").iterdir())) == len(cluster.jobs())
