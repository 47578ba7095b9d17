"""Files in a storage of Snakemake's: a job works where only what its rule names is, and the build is the same."""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import fsspec
import pytest
import tiny
from processes import succeeded
from programs import skip_or_fail

from shardmill.errors import GateError
from shardmill.pipeline.storage import Files, pack, room
from shardmill.pipeline.verdict import failed

from .bucket import BUCKET, bucket
from .driver import made_here
from .project import Project, steps_that

pytestmark = pytest.mark.slow

MODEL = "build/tiny"
LATER = {"benchmark", "provenance", "report"}  # what is told of the whole build


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Snakemake's copies of a bucket, as a job finds them: its inputs, and folders for its outputs."""
    home = tmp_path / ".snakemake/storage/s3/models/b"
    for folder in ("parts", "packages", "parity"):
        (home / MODEL / folder).mkdir(parents=True)
    (home / MODEL / "parts/a.json").write_text("part")
    (home / MODEL / "parts/undeclared.json").write_text("undeclared")
    (tmp_path / "a.mlpackage").mkdir()
    (tmp_path / "a.mlpackage/Manifest.json").write_text("package")
    pack(tmp_path / "a.mlpackage", home / MODEL / "packages/a.mlpackage.tar")
    (tmp_path / "text.txt").write_text("text")
    return home


def files(home: Path, tmp_path: Path) -> tuple[Files, Files]:
    """A gate's inputs and outputs."""
    own = home / MODEL
    inputs = {"part": own / "parts/a.json", "packages": [own / "packages/a.mlpackage.tar"]}
    outputs = {"verdict": own / "parity/a.json", "bundle": own / "compiled/a.mlmodelc.tar"}
    return inputs | {"text": tmp_path / "text.txt"}, outputs


def test_where_files_lie_in_build_nothing_changes() -> None:
    inputs, outputs = {"part": Path("build/tiny/parts/a.json")}, {"package": Path("build/tiny/packages/a.mlpackage")}
    with room(inputs, outputs, "tiny") as found:
        assert (found.inputs, found.outputs, found.is_elsewhere) == (inputs, outputs, False)


def test_a_job_sees_a_build_with_what_its_rule_names_and_nothing_else(home: Path, tmp_path: Path) -> None:
    with room(*files(home, tmp_path), "tiny") as found:
        assert found.is_elsewhere
        part, (package,), text = (found.inputs[name] for name in ("part", "packages", "text"))
        assert isinstance(part, Path) and isinstance(package, Path) and text == tmp_path / "text.txt"
        assert part == found.builds / "tiny/parts/a.json" and part.read_text() == "part"
        assert package == found.builds / "tiny/packages/a.mlpackage"
        assert (package / "Manifest.json").read_text() == "package"
        inside = {path.relative_to(found.builds).as_posix() for path in found.builds.rglob("*") if path.is_file()}
        assert inside == {"tiny/parts/a.json", "tiny/packages/a.mlpackage/Manifest.json"}
        for name in ("verdict", "bundle"):
            assert isinstance(found.outputs[name], Path) and found.outputs[name].parent.is_dir()
        (home / MODEL / "compiled").mkdir()
        found.outputs["verdict"].write_text("passed")
        found.outputs["bundle"].mkdir()
        (found.outputs["bundle"] / "model.mil").write_text("bundle")
    assert (home / MODEL / "parity/a.json").read_text() == "passed"
    with tarfile.open(home / MODEL / "compiled/a.mlmodelc.tar") as archive:
        assert archive.getnames() == ["a.mlmodelc", "a.mlmodelc/model.mil"]
    assert not found.builds.exists() and not list(home.glob("tmp-*"))


def test_of_a_job_that_fails_only_a_gates_numbers_are_left(home: Path, tmp_path: Path) -> None:
    inputs, outputs = files(home, tmp_path)
    with pytest.raises(GateError) as said, room(inputs, outputs, "tiny") as found:
        verdict = found.outputs["verdict"]
        assert isinstance(verdict, Path)
        verdict.write_text("half")
        failed(verdict).write_text("numbers")
        raise GateError(f"missed; all numbers: {failed(verdict)}")
    assert str(said.value) == f"missed; all numbers: {home / MODEL / 'parity/a.failed.json'}"
    assert (home / MODEL / "parity/a.failed.json").read_text() == "numbers"
    assert not (home / MODEL / "parity/a.json").exists() and not list(home.glob("tmp-*"))


def test_a_bucket_may_hold_a_folder_that_is_called_as_the_build(tmp_path: Path) -> None:
    home = tmp_path / ".snakemake/storage/s3/models/build/tiny"
    (home / MODEL).mkdir(parents=True)
    with room({}, {"summary": home / MODEL / "plan.json"}, "tiny") as found:
        assert found.builds.is_relative_to(home)
        found.outputs["summary"].write_text("plan")
    assert (home / MODEL / "plan.json").read_text() == "plan"


def contents(url: str) -> Iterator[tuple[str, bytes]]:
    """Files of a build in a bucket by their names, folders unpacked."""
    fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    for path in fs.find(root):
        name, content = path.removeprefix(f"{root}/"), fs.cat_file(path)
        if not name.endswith(".tar"):
            yield name, content
            continue
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for entry in archive:
                file = archive.extractfile(entry)
                if file:
                    yield (Path(name).parent / entry.name).as_posix(), file.read()


@contextmanager
def s3(_: Path) -> Iterator[tuple[str, ...]]:
    """A folder of a bucket."""
    with bucket():
        yield "s3", f"s3://{BUCKET}/b", f"s3://{BUCKET}/b"


@contextmanager
def fs(folder: Path) -> Iterator[tuple[str, ...]]:
    """A folder that is mounted everywhere, but that no job is to work in."""
    if not shutil.which("rsync"):
        skip_or_fail("the plugin copies by rsync, which is not installed")
    yield "fs", str(folder), f"file://{folder}"


@pytest.mark.pipeline
@pytest.mark.parametrize("place", [s3, fs])
def test_a_build_in_a_storage_is_the_build_on_a_disk(
    tmp_path: Path,
    place: Callable[[Path], AbstractContextManager[tuple[str, ...]]],
    compared_model: str,
) -> None:
    """S3 is moto's; Snakemake is told that nothing is shared. A second run has nothing to do.

    From a bucket the jobs work; from a folder they find what was made of the same inputs on a disk.
    """
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=2)
    here, there = (Project(tmp_path / name).create(checkpoint) for name in ("here", "there"))
    for project in (here, there):
        project.configure(topology=[[0, 2]])
        if compared_model == "demo":
            project.take_demo()
    made_here(here, LATER)
    if place is fs:
        stores = (project.folder / "build/.store" for project in (here, there))
        shutil.copytree(*stores, ignore=shutil.ignore_patterns("templates"), dirs_exist_ok=True)
    with place(tmp_path / "mounted") as (provider, prefix, url):
        options = ("--default-storage-provider", provider, "--default-storage-prefix", prefix)
        done = there.run("all", *options, "--shared-fs-usage", "none", verbose=True)
        succeeded(done)
        assert steps_that("worked" if place is s3 else "unchanged", done.stdout) >= {"convert", "compile", "parity"}
        assert place is s3 or steps_that("worked", done.stdout) == {"benchmark"}
        assert not there.build.exists()
        made = dict(contents(f"{url}/{MODEL}"))
        again = there.run("all", *options, "--shared-fs-usage", "none")
        assert again.returncode == 0 and "Nothing to be done" in again.stdout, again.stdout
    local = {file.relative_to(here.build).as_posix(): file for file in here.build.rglob("*") if file.is_file()}
    later = ("benchmark/", "logs/", "plots/", "provenance.json", "report.", "test-results.jsonl")
    assert local.keys() == {name for name in made if not name.startswith(later)}
    assert not [name for name, file in sorted(local.items()) if made[name] != file.read_bytes()]
    assert {"benchmark/speed.json", "provenance.json", "report.html"} <= made.keys()
    assert [name for name in made if name.startswith("plots/") and name.endswith(".svg")]
