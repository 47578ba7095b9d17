"""`snakedeploy deploy-workflow`: the published workflow, used from a folder that is not a clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from patience import BUILDING
from pipeline.project import PACKAGES, python_path
from processes import succeeded

from shardmill.pipeline.resolve import PARTS

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="needs snakedeploy, which has no version for Python 3.13"),
]
ROOT = Path(__file__).parents[1]
ADDRESS, TAG = "https://github.com/shardmill/shardmill", "v0.1.0"
AUTHOR = ("-c", "user.name=Tests", "-c", "user.email=tests@example.org", "-c", "commit.gpgsign=false")


def run(folder: Path, environment: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """A command that must end well."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILDING,
        errors="replace",
    )
    succeeded(done)
    return done


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One in which git finds, in place of GitHub, a repository of this workflow with a tag; nothing is cached yet."""
    host = tmp_path_factory.mktemp("host")
    repository = host / "shardmill/shardmill"
    repository.mkdir(parents=True)
    for name in (*PARTS, "config", "LICENSE"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, repository / name, symlinks=True)
        else:
            shutil.copy(ROOT / name, repository / name)
    settings = {f"url.file://{host}/.insteadOf": "https://github.com/", "protocol.file.allow": "always"}
    given = {"GIT_CONFIG_COUNT": str(len(settings)), "XDG_CACHE_HOME": str(host / "cache"), "OMP_NUM_THREADS": "1"}
    for i, (key, value) in enumerate(settings.items()):
        given |= {f"GIT_CONFIG_KEY_{i}": key, f"GIT_CONFIG_VALUE_{i}": value}
    given["PYTHONPATH"] = python_path(ROOT, *PACKAGES)
    made = {key: value for key, value in os.environ.items() if key != "GITHUB_TOKEN"} | given
    for words in (("init", "-q"), ("add", "-A"), (*AUTHOR, "commit", "-q", "-m", "Release"), ("tag", TAG)):
        run(repository, made, "git", *words)
    return made


@pytest.fixture(scope="module")
def deployed(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What snakedeploy makes of it."""
    parent = tmp_path_factory.mktemp("deployed")
    snakedeploy = str(Path(sys.executable).with_name("snakedeploy"))
    run(parent, environment, snakedeploy, "deploy-workflow", ADDRESS, "mine", "--tag", TAG)
    return parent / "mine"


def test_it_is_a_module_of_the_tag_with_the_demo_s_config(deployed: Path) -> None:
    written = (deployed / "workflow/Snakefile").read_text()
    assert f'github("shardmill/shardmill", path="Snakefile", tag="{TAG}")' in written
    assert (deployed / "config/config.yaml").read_bytes() == (ROOT / "configs/demo.yaml").read_bytes()
    assert not any(path.is_symlink() for path in (deployed / "config").iterdir())
    assert (deployed / "profiles/default/config.yaml").is_file()


def test_it_builds(deployed: Path, environment: dict[str, str]) -> None:
    """Rules and scripts come from the tag; the checkpoint and the texts from the library's workflow."""
    snakemake = (sys.executable, "-m", "snakemake", "--cores", "1")
    run(deployed, environment, *snakemake, "build/demo/parts/head_0.json")
    assert (deployed / "build/demo/parts/head_0.json").is_file()
    assert "build/demo/report.html" in run(deployed, environment, *snakemake, "--dry-run").stdout
