"""The real pipeline under the real Snakemake: it completes, works once, and stops at a gate."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
from processes import succeeded
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.records.audit import audit, is_out_of_scope

from .project import Project
from .proof import faults
from .undisturbed import undisturbed

pytestmark = pytest.mark.pipeline
PARTS = ("layers_00_01", "layers_01_02", "head_0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build that nothing disturbed."""
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "project")


def copied(project: Project, folder: Path) -> Project:
    """Another project that shares the first one's store."""
    shutil.copytree(project.folder, folder, ignore=shutil.ignore_patterns(".snakemake", "tiny"))
    return Project(folder, project.hash_seed)


def jobs(output: str) -> set[str]:
    """The rules that a run ran or, if it was a dry one, would run."""
    found = re.findall(r"^(?:local)?rule (\w+):|^ *[\d:]+ \[ *\d+/\d+\] (\w+).*: begins", output, re.MULTILINE)
    return {dry or ran for dry, ran in found}


def said(output: str) -> list[str]:
    """What shardmill itself said."""
    return [line for line in output.splitlines() if line.startswith("shardmill")]


def test_a_build_is_complete_and_true(finished: Project) -> None:
    records = finished.records()
    expected = {f"{folder}/{part}" for folder in ("packages", "compiled", "residency", "parity") for part in PARTS}
    expected |= {"source", "plan", "precision", "reference", "embedding", "expected", "parity/stack"}
    assert set(records) == {f"{name}.receipt.json" for name in expected} | {"model.json", "provenance.json"}
    assert faults(finished.build) == []


def test_the_published_schema_describes_the_manifest(finished: Project) -> None:
    """A runtime of another make reads docs/model.schema.json: it holds, and names every key that there is."""
    schema = json.loads((Path(__file__).parents[2] / "docs" / "model.schema.json").read_text())
    content = json.loads((finished.build / "model.json").read_text())
    jsonschema.validate(content, schema)
    # Keys that not every build has, and two that older builds lack.
    some = {"verify", "contexts", "margin", "reshape_frequency", "silu", "chat", "sampling", "drafter", "adapters"}
    some |= {"uses", "requires", "recurrent", "expected", "ungated", "conversation", "images", "audio", "tower"}
    assert content.keys() | some == schema["properties"].keys() == {*schema["required"], *some}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content | {"window": "8"}, schema)


@pytest.mark.thorough
def test_a_bit_flipped_anywhere_in_a_build_is_found(finished: Project, tmp_path: Path) -> None:
    """In every file but the logs and Snakemake's marks, each by its name; provenance.json names all others."""
    build = tmp_path / "tiny"
    shutil.copytree(finished.build, build)
    names = [path.relative_to(build).as_posix() for path in build.rglob("*") if path.is_file()]
    names = [name for name in names if not is_out_of_scope(name)]
    assert len(names) == audit(build).checked > 40
    for name in names:
        path = build / name
        content, mode = path.read_bytes(), path.stat().st_mode
        path.chmod(0o644)
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert name in judged(build)
        path.write_bytes(content)
        path.chmod(mode)
    assert audit(build).wrong == ()


def judged(build: Path) -> str:
    """What `shardmill verify` says where something is wrong."""
    said = CliRunner().invoke(app, ["verify", str(build)])
    assert said.exit_code == 1
    return said.output


def test_records_tell_nothing_of_place_or_time(finished: Project) -> None:
    for name, content in finished.records().items():
        text = content.decode()
        assert str(finished.folder) not in text, name
        assert not re.search(r"20\d\d-\d\d-\d\d[T ]\d\d:", text), name
        assert "snakemake_timestamp" not in text, name


def test_every_gate_is_beside_its_threshold(finished: Project) -> None:
    for name in [f"{gate}/{part}" for gate in ("parity", "residency") for part in PARTS] + ["parity/stack"]:
        verdict = json.loads((finished.build / f"{name}.json").read_text())
        assert verdict["gate"], name
        assert all(row["passed"] and row["threshold"] and row["question"] for row in verdict["gate"]), name


def test_no_job_takes_more_memory_than_it_declares(finished: Project) -> None:
    """Every job logs its peak, its own and not what Snakemake had resident when it started the job."""
    logs = {log.stem: log.read_text() for log in (finished.build / "logs").glob("*.log")}
    found = {name: re.search(r"peak memory (\d+) MB, declared (\d+) MB", text) for name, text in logs.items()}
    assert len(found) == 5 + 4 * len(PARTS) + 4  # before the parts, for each of them, after them
    assert {name for name, sizes in found.items() if not sizes or int(sizes[1]) > int(sizes[2])} == set()


def test_no_job_imports_what_it_has_no_use_for(finished: Project) -> None:
    """What takes long: torch where a step needs none, and what coremltools and transformers would import beside it.

    A library that an import did not find is in the log as well; its modules are not. What a fork had from the start is
    in no log.
    """
    logs = {log.stem: log.read_text() for log in (finished.build / "logs").glob("*.log")}
    loaded = {job: re.findall(r"^import time:.*\| +(\S+)$", text, re.MULTILINE) for job, text in logs.items()}
    compiled = [f"compile_{part}" for part in PARTS]
    assert all("coremltools" in loaded[job] for job in compiled)
    assert [job for job in compiled if "torch.nn" in loaded[job]] == []
    spared = {"accelerate.utils", "scipy.optimize"}
    assert {job: found for job in loaded if (found := spared & {*loaded[job]})} == {}


@pytest.mark.thorough
def test_a_dry_run_knows_the_memory_before_there_is_a_plan(finished: Project, tmp_path: Path) -> None:
    project = Project(tmp_path / "fresh").create(finished.folder / "checkpoint")
    done = project.run("all", "--dry-run")
    succeeded(done)
    assert re.search(r"rule convert:(\n    .*)*mem_mb=\d{3,4},", done.stdout) and "TBD" not in done.stdout
    made = {path.relative_to(project.folder / "build").parts[:2] for path in (project.folder / "build").rglob("*")}
    shared = {(".store",), (".store", "templates")}  # by all tests
    assert made <= shared | {(".store", "topologies"), (".store", "sizes")}  # while rules were read


def test_a_job_that_needs_more_memory_than_there_may_be_is_refused(finished: Project, tmp_path: Path) -> None:
    """Snakemake itself would start it all the same."""
    project = copied(finished, tmp_path / "small")
    done = project.run("all", "--resources", "mem_mb=200")
    assert done.returncode != 0
    (line,) = said(done.stdout)
    assert re.search(r"needs \d+ MB of memory and this build may use 200; allow more with --resources", line)
    assert not project.build.exists() and "Traceback" not in done.stdout


@pytest.mark.thorough
def test_a_dry_run_refuses_a_job_that_needs_more_memory_in_the_same_words(finished: Project, tmp_path: Path) -> None:
    project = copied(finished, tmp_path / "small")
    done, planned = (project.run("all", "--resources", "mem_mb=200", *dry) for dry in ((), ("--dry-run",)))
    assert done.returncode and planned.returncode and len(said(done.stdout)) == 1
    assert (said(planned.stdout), "Traceback" in planned.stdout) == (said(done.stdout), False)


def test_the_build_generates(finished: Project) -> None:
    """What was built and attested is a model: it loads from its folder, and speculation keeps its output."""
    from drafted_decoding import Session, create_drafter, run

    from shardmill.runtime import engine

    loaded = engine.load(finished.build)
    tokens = {
        name: run(Session(loaded), [5, 6, 7], max_new_tokens=12, drafter=create_drafter(name)).tokens
        for name in ("none", "ngram")
    }
    assert tokens["none"] == tokens["ngram"]
    assert len(tokens["none"]) == 12


def test_a_second_run_runs_no_job(finished: Project) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.build.rglob("*") if path.is_file()}
    output = finished.finish()
    assert "Nothing to be done" in output
    assert jobs(output) == set()
    assert {path: path.stat().st_mtime_ns for path in finished.build.rglob("*") if path.is_file()} == before


@pytest.mark.thorough
def test_an_artifact_that_is_gone_is_made_again(finished: Project, tmp_path: Path) -> None:
    """Though report and provenance, the last to be made, are there."""
    project = copied(finished, tmp_path / "project")
    shutil.copytree(finished.folder / ".snakemake", project.folder / ".snakemake")
    shutil.copytree(finished.build, project.build)
    for last in ("benchmark/speed.json", "benchmark/speed.receipt.json", "report.html", "report.receipt.json"):
        (project.build / last).parent.mkdir(exist_ok=True)
        (project.build / last).touch()
    (project.build / "plots").mkdir()
    assert "Nothing to be done" in project.run("all", "--dry-run", "--rerun-triggers", "mtime").stdout
    artifacts = {"packages/head_0.mlpackage": "convert", "compiled/head_0.mlmodelc": "compile"}
    for gone, rule in {**artifacts, "embedding.safetensors": "embedding"}.items():
        artifact = (project.build / gone).rename(tmp_path / "gone")
        assert rule in jobs(project.run("all", "--dry-run", "--rerun-triggers", "mtime").stdout), gone
        artifact.rename(project.build / gone)
    table = project.build / "embedding.safetensors"
    table.write_bytes(table.read_bytes()[:-1])
    done = project.run("all", "--dry-run", "--rerun-triggers", "mtime")
    assert "embedding" in jobs(done.stdout)
    assert "build/tiny/embedding.safetensors: is not as large as model.json says" in done.stdout


@pytest.mark.thorough
def test_what_was_made_before_is_restored_from_the_store(finished: Project, tmp_path: Path) -> None:
    """A build folder thrown away costs no work, and is then as resolved as the first one was."""
    again = copied(finished, tmp_path / "again")
    again.hash_seed = 5
    output = again.finish(verbose=True)
    assert again.records() == finished.records()
    worked = [line for line in said(output) if "worked" in line]
    assert worked == []
    assert sum("unchanged" in line for line in said(output)) >= 4 * len(PARTS)
    assert jobs(again.finish()) == set()


@pytest.mark.thorough
def test_a_gate_that_fails_stops_the_build(finished: Project, tmp_path: Path) -> None:
    """Non-zero exit, one clear line, and no model.json, not even the old one."""
    project = copied(finished, tmp_path / "faulty")
    shutil.copytree(finished.folder / ".snakemake", project.folder / ".snakemake")
    shutil.copytree(finished.build, project.build)
    project.replace("shardmill/runtime/kv.py", 'np.float32(rope["scale"])', "np.float32(1.0)")
    done = project.run()
    assert done.returncode != 0
    missed = [line for line in said(done.stdout) if "program_error is" in line]
    form = r"shardmill parity\S* tiny.*: parity (\S+): .*program_error is \S+, must be <= 0.0001"
    gates = [re.match(form, line) for line in missed]
    assert gates and all(gates)
    assert "Traceback" not in done.stdout
    assert not (project.build / "model.json").exists()
    assert not [gate[1] for gate in gates if gate and (project.build / f"parity/{gate[1]}.receipt.json").exists()]


@pytest.mark.thorough
def test_a_job_with_nothing_to_do_leaves_the_finished_build(finished: Project, tmp_path: Path) -> None:
    """It makes what model.json speaks for, byte for byte; and `why` and Snakemake agree once the store is gone."""
    project = copied(finished, tmp_path / "standing")
    shutil.copytree(finished.folder / ".snakemake", project.folder / ".snakemake")
    shutil.copytree(finished.build, project.build)
    before = project.records()
    done = project.run(
        "build/tiny/packages/head_0.receipt.json", "build/tiny/residency/head_0.json", "--forceall", verbose=True
    )
    succeeded(done)
    assert jobs(done.stdout) >= {"fetch", "split", "convert", "compile", "residency"}
    assert not [line for line in said(done.stdout) if "worked" in line]
    assert project.records() == before
    project.finish()
    shutil.rmtree(project.folder / "build/.store")
    assert "Nothing to be done" in project.finish()
    told = project.why()  # of all, which the benchmark belongs to
    assert "benchmark/speed" in told and "1 of 19 cached steps would work" in told


def test_a_wrong_config_is_one_line_and_no_work(finished: Project, tmp_path: Path) -> None:
    project = copied(finished, tmp_path / "wrong")
    shutil.rmtree(project.folder / "build")
    project.configure(contxt=64)
    done = project.run()
    assert done.returncode != 0
    assert said(done.stdout) == ["shardmill: tiny.yaml: contxt: unknown key; did you mean context?"]
    assert "Traceback" not in done.stdout
    assert not (project.folder / "build").exists()


@pytest.mark.slow
def test_snakemakes_own_report_shows_the_page_the_figures_and_the_verdicts(finished: Project, tmp_path: Path) -> None:
    project = copied(finished, tmp_path / "project")
    shutil.copytree(finished.folder / ".snakemake", project.folder / ".snakemake")
    shutil.copytree(finished.build, project.build)
    for targets in (("all",), ("all", "--report", "shown.html")):
        done = project.run(*targets)
        succeeded(done)
    text = (project.folder / "shown.html").read_text(encoding="utf-8")
    held, shown = (
        json.loads(re.findall(rf"^ *var {name} = (\{{.+\}});?$", text, re.MULTILINE)[0])
        for name in ("results", "categories")
    )
    plots = sorted(path.name for path in (project.build / "plots").glob("*.svg"))
    assert "sweep.svg" in plots
    residency, parity = (
        [f"build/tiny/{gate}/{part}.json" for part in sorted(PARTS)] for gate in ("residency", "parity")
    )
    assert shown == {
        "Result": {"Other": ["build/tiny/report.html"]},
        "Speed": {"Other": [f"build/tiny/plots/{name}" for name in plots]},
        "Gates": {"residency": residency, "parity": [*parity, "build/tiny/parity/stack.json"]},
    }
    assert all("<p>" in entry["caption"] and entry["labels"] for entry in held.values())
    assert "head_0" in held["build/tiny/parity/head_0.json"]["caption"]


@pytest.mark.thorough
def test_a_build_without_a_benchmark_is_finished(finished: Project, tmp_path: Path) -> None:
    """`benchmark: false` in the config: gates, attestation and page, and nothing waits for a speed."""
    project = copied(finished, tmp_path / "project")
    shutil.copytree(finished.folder / ".snakemake", project.folder / ".snakemake")
    shutil.copytree(finished.build, project.build)
    project.configure(benchmark=False)
    done = project.run("all")
    succeeded(done)
    assert jobs(done.stdout) == {"provenance", "report"}
    assert "benchmark: false" in (project.build / "report.html").read_text(encoding="utf-8")
    assert not (project.build / "benchmark").exists() and audit(project.build).wrong == ()
    assert "Nothing to be done" in project.run("all").stdout
    told = project.why()
    assert "benchmark" not in told and "0 of 18 cached steps would work" in told


@pytest.mark.thorough
def test_two_builds_in_one_folder_do_not_mix(finished: Project, tmp_path: Path) -> None:
    project = copied(finished, tmp_path / "locked")
    with (project.folder / "build" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done, planned = project.run("all"), project.run("all", "--dry-run")
    assert done.returncode != 0 and planned.returncode == 0
    assert said(done.stdout) == ["shardmill: build: another build is running there; wait for it or stop it"]
    assert "Traceback" not in done.stdout and "Job stats" not in done.stdout  # nothing is planned aloud before
    assert not project.build.exists()
