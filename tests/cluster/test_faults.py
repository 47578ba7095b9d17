"""What goes wrong on a cluster: whatever ends a job, the build completes with the bytes that it has without Slurm."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from pipeline.driver import made_here
from pipeline.project import Project
from processes import succeeded

from shardmill.pipeline.needs import STEPS

from .configuration import NODES
from .slurm import Cluster, Job, kill_tasks, waited_for
from .submitting import Submitting, contents, killed

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
PART = "head_0"
PARTS = ("layers_00_01", "layers_01_02", PART)
PACKAGE = f"build/tiny/packages/{PART}.mlpackage"
NOT_MADE = tuple(name for name in STEPS if name not in ("fetch", "split", "precision"))
SECONDS = 1200.0  # that a job may take to come where a fault is to meet it, on a machine with other work
EVERY_CPU = ("--nodes=2", "--ntasks=2", "--exclusive")
BY_SLURM = ("--executor", "slurm", "--jobs", "2")


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose packages can be made at once."""
    folder = tmp_path_factory.mktemp("faults")
    checkpoint = tiny.write_checkpoint(folder / "checkpoint", layers=2)
    return made_here(Project(folder / "project").create(checkpoint), NOT_MADE)


@pytest.fixture(scope="module")
def package(split: Project, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A package and its receipt as they are made where nothing goes wrong."""
    folder = tmp_path_factory.mktemp("undisturbed") / "project"
    shutil.copytree(split.folder, folder)
    return made(made_here(Project(folder), [name for name in NOT_MADE if name != "convert"]))


@pytest.fixture
def whole(cluster: Cluster) -> Cluster:
    """The cluster, with nothing to do."""
    waited_for(lambda: idle(cluster), "the last test's jobs are still there", SECONDS)
    return cluster


@contextmanager
def drained(cluster: Cluster) -> Iterator[None]:
    """Inside, no job begins."""
    for node in NODES:
        cluster.ask("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    try:
        yield
    finally:
        for node in NODES:
            cluster.ask("scontrol", "update", f"nodename={node}", "state=resume")


def idle(cluster: Cluster) -> bool:
    return cluster.one("PENDING RUNNING COMPLETING") is None


def another(split: Project, folder: Path, cluster: Cluster, *options: str) -> Submitting:
    """A copy of the project."""
    shutil.copytree(split.folder, folder)
    return Submitting(folder, cluster, *BY_SLURM, *options)


def made(project: Project) -> dict[str, bytes]:
    """The part's package and receipt."""
    return {name: data for name, data in contents(project.build / "packages").items() if name.startswith(PART)}


def at_work(project: Submitting, but: Job | None = None) -> Job:
    """The job, once its step works in a folder of the store; `but` is one that ended."""

    def found() -> Job | None:
        job = project.cluster.one("RUNNING")
        working = list((project.folder / "build/.store").glob("tmp-*/entry"))
        return job if working and job and job.number != (but and but.number) else None

    job = waited_for(found, project.said, SECONDS)
    assert job
    return job


def ended(project: Submitting, snakemake: subprocess.Popen[bytes]) -> None:
    assert snakemake.wait(SECONDS) == 0, project.said()


def scratch(project: Project) -> list[Path]:
    return list((project.folder / "build/.store").glob("tmp-*"))


def restarted(cluster: Cluster, job: Job) -> int:
    """How often Slurm has started a job again."""
    said = cluster.ask("scontrol", "show", "job", job.number)
    return int(said.split("Restarts=")[1].split()[0])


def test_a_job_that_is_cancelled_or_killed_is_tried_again(
    whole: Cluster, split: Project, package: dict[str, bytes], tmp_path: Path
) -> None:
    project = another(split, tmp_path / "project", whole, "--retries", "2")
    snakemake = project.begin(PACKAGE)
    first = at_work(project)
    whole.ask("scancel", first.number)
    waited_for(lambda: whole.one("CANCELLED"), "not cancelled", SECONDS)
    waited_for(lambda: not scratch(project), "SIGTERM left something", SECONDS)
    second = at_work(project, but=first)
    kill_tasks(whole, second)
    ended(project, snakemake)
    assert made(project) == package and not scratch(project)
    assert [job.state for job in whole.jobs()][-3:] == ["CANCELLED", "FAILED", "COMPLETED"]


def test_a_job_that_slurm_starts_again_completes(
    whole: Cluster, split: Project, package: dict[str, bytes], tmp_path: Path
) -> None:
    """Requeued by hand, and preempted by a job that matters more."""
    project = another(split, tmp_path / "project", whole)
    snakemake = project.begin(PACKAGE)
    job = at_work(project)
    whole.ask("scontrol", "requeue", job.number)
    waited_for(lambda: not scratch(project), "SIGTERM left something", SECONDS)
    at_work(project)
    urgent = whole.ask("sbatch", "--parsable", "--partition=urgent", *EVERY_CPU, "--output=/dev/null", "--wrap=sleep 1")
    waited_for(lambda: restarted(whole, job) == 2, f"{urgent} preempted nothing", SECONDS)
    ended(project, snakemake)
    assert made(project) == package and not scratch(project)


def test_a_job_whose_node_goes_down_is_done_all_the_same(
    whole: Cluster, split: Project, package: dict[str, bytes], tmp_path: Path
) -> None:
    """By Slurm, with the same number; the node comes back by itself as soon as it answers."""
    project = another(split, tmp_path / "project", whole)
    snakemake = project.begin(PACKAGE)
    job = at_work(project)
    whole.ask("scontrol", "update", f"nodename={job.node}", "state=down", "reason=test")
    ended(project, snakemake)
    last = whole.jobs()[-1]
    assert (last.number, last.state, restarted(whole, job)) == (job.number, "COMPLETED", 1)
    assert made(project) == package and not scratch(project)


def test_two_builds_may_make_the_same_entry_at_a_time(
    whole: Cluster, split: Project, package: dict[str, bytes], tmp_path: Path
) -> None:
    one, two = (another(split, tmp_path / name, whole) for name in ("one", "two"))
    shutil.rmtree(two.folder / "build/.store")
    (two.folder / "build/.store").symlink_to(one.folder / "build/.store")
    running = [project.begin(PACKAGE) for project in (one, two)]
    for project, snakemake in zip((one, two), running, strict=True):
        ended(project, snakemake)
    assert made(one) == made(two) == package and not scratch(one)
    assert {job.node for job in whole.jobs()[-2:]} == set(NODES)


def test_jobs_of_a_killed_build_that_begin_after_another_change_nothing(
    whole: Cluster, split: Project, package: dict[str, bytes], tmp_path: Path
) -> None:
    project = another(split, tmp_path / "project", whole)
    with drained(whole):
        snakemake = project.begin(PACKAGE)
        waiting = waited_for(lambda: whole.one("PENDING"), project.said, SECONDS)
        assert waiting
        killed(snakemake)
        done = Project(project.folder).run(PACKAGE)  # here, without Slurm
        succeeded(done)
        (project.build / "model.json").write_text("{}\n")  # which a job withdraws before it works
        before = {file: file.stat().st_ctime_ns for file in (project.folder / PACKAGE).rglob("*") if file.is_file()}
    waited_for(lambda: idle(whole), "the job that waited does not end", SECONDS)
    assert whole.jobs()[-1].state == "FAILED"
    (log,) = (project.folder / ".snakemake/slurm_logs").rglob(f"{waiting.number}.log")
    assert "this job is of a build that was killed, and another was begun since; not run" in log.read_text()
    assert {file: file.stat().st_ctime_ns for file in before} == before and made(project) == package
    assert (project.build / "model.json").exists()


def test_the_benchmark_asks_for_a_node_of_its_own(whole: Cluster, split: Project, tmp_path: Path) -> None:
    project = another(split, tmp_path / "project", whole, "--profile", "profiles/slurm")
    for file in ("model.json", "embedding.safetensors", *(f"compiled/{name}.mlmodelc/x" for name in PARTS)):
        (project.build / file).parent.mkdir(parents=True, exist_ok=True)
        (project.build / file).touch()
    with drained(whole):
        snakemake = project.begin("build/tiny/benchmark/speed.json", "--allowed-rules", "benchmark")
        waited_for(lambda: whole.one("PENDING", "benchmark") or snakemake.poll() is not None, project.said, SECONDS)
        job = whole.one("PENDING", "benchmark")
        assert job, project.said()
        killed(snakemake)
        said = whole.ask("scontrol", "show", "job", job.number)
        whole.ask("scancel", job.number)
    assert "OverSubscribe=NO" in said and "TimeLimit=04:00:00" in said and "CPUs/Task=4" in said
