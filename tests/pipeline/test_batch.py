"""Many models in one run: each config stands for itself, and one that can't be built stops no other."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import yaml
from snakemake.iocontainers import Wildcards

from shardmill import config
from shardmill.config import Config
from shardmill.errors import ConfigError
from shardmill.files import write_json
from shardmill.pipeline import batch, options, snakefile
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.resolve import parsed

from .project import CONFIG, Project
from .workflows import IN_BUILD


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with the checkpoint's config.json."""
    monkeypatch.chdir(tmp_path)
    tiny.hf_config().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "models").mkdir()
    return tmp_path


def write(file: str, **changes: object) -> None:
    Path(file).write_text(yaml.safe_dump(tiny.settings("checkpoint") | changes))


def job(model: str, **wildcards: str) -> Wildcards:
    return Wildcards(fromdict={"model": model, **wildcards})


def test_every_listed_config_is_a_model(folder: Path) -> None:
    for name in ("b", "a", "c"):
        write(f"models/{name}.yaml", model=name)
    write("other.yaml", model="other")
    found = batch.read_batch({"batch": ["other.yaml", "models/*.yaml", "models/a.yaml"]}, "batch.yaml", parsed)
    assert list(found.models) == ["other", "a", "b", "c"]
    assert found.models["b"] == parsed(yaml.safe_load(Path("models/b.yaml").read_text()), "")
    assert found.refused == {}
    absolute = batch.read_batch({"batch": [str(folder / "models/*.yaml")]}, "batch.yaml", parsed)
    assert list(absolute.models) == ["a", "b", "c"]


def test_configs_of_the_workflow_are_found_beside_it(folder: Path) -> None:
    found = batch.read_batch({"batch": ["configs/demo.yaml"]}, "batch.yaml", parsed)
    assert list(found.models) == ["demo"]


def test_what_is_wrong_with_one_config_is_said_and_the_others_stay(folder: Path) -> None:
    write("models/a.yaml", model="a")
    write("models/b.yaml", model="b", contxt=1)
    write("models/c.yaml", model="a")
    Path("models/d.yaml").write_text("- a list")
    Path("models/e.yaml").write_text("model: e\nmodel: f\n")
    Path("models/f.yaml").write_text("model: f\nnote: 2024-13-45\n")
    Path("models/g.yaml").write_text("model: g\nnote: !!bool x\n")
    found = batch.read_batch({"batch": ["models/*.yaml"]}, "batch.yaml", parsed)
    assert list(found.models) == ["a"]
    assert found.refused == {
        "models/b.yaml": "models/b.yaml: contxt: unknown key; did you mean context?",
        "models/c.yaml": "models/c.yaml: another config of the batch is called a, too; rename one",
        "models/d.yaml": "models/d.yaml: expected a mapping of keys, see configs/README.md",
        "models/e.yaml": "models/e.yaml: model: given twice (line 2); keep one",
        "models/f.yaml": "models/f.yaml: not YAML: month must be in 1..12",
        "models/g.yaml": "models/g.yaml: not YAML: 'x'",
    }
    assert [path for path in snakefile.finished(found) if "refused" in path] == [
        f"build/refused/models_{name}.yaml" for name in "bcdefg"
    ]


def test_jobs_do_not_look_again_at_what_their_run_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving a config imports transformers and asks a hub: a job of Slurm has no memory and no time for either."""
    write("good.yaml", model="good")
    write("bad.yaml", model="bad", topology=[[0, 9]])
    monkeypatch.setattr(snakefile, "file_problems", lambda _: [])
    content = {"batch": ["*.yaml"]}

    def read(main: bool) -> Batch:
        workflow = SimpleNamespace(configfiles=[], is_main_process=main)
        return snakefile.checked(content, workflow)

    assert read(main=False).refused.keys() == {"bad.yaml"}  # nobody has told it
    begun = read(main=True)
    assert not Path("build/.batch.json").exists()  # a dry run tells the jobs of another run nothing
    batch.tell_jobs(begun)
    names: list[str] = []
    resolve = snakefile.resolved
    monkeypatch.setattr(snakefile, "resolved", lambda *given: names.append(given[1]) or resolve(*given))
    known = read(main=False)
    assert (known.models, known.refused) == (begun.models, begun.refused) and begun.refused.keys() == {"bad.yaml"}
    assert names == ["good.yaml"]
    Path("build/.batch.json").write_text("[")
    assert read(main=False) == begun and names == ["good.yaml", "bad.yaml", "good.yaml"]


def test_a_job_reads_the_config_of_its_own_model_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of N models has jobs in proportion to N, and each starts a Snakemake or three."""
    write("a.yaml", model="a")
    write("b.yaml", model="b", topology=[[0, 4]])
    write("c.yaml", model="c", topology=[[0, 9]])
    monkeypatch.setattr(snakefile, "file_problems", lambda _: [])
    began, a_job = (SimpleNamespace(configfiles=[], is_main_process=main) for main in (True, False))
    content = {"batch": ["*.yaml"]}
    begun = snakefile.checked(content, began)
    batch.tell_jobs(begun)
    names: list[str] = []
    resolve = snakefile.resolved
    monkeypatch.setattr(snakefile, "resolved", lambda *given: names.append(given[1]) or resolve(*given))

    def read(*jobs: str) -> Batch:
        names.clear()
        monkeypatch.setattr("sys.argv", ["snakemake", "--target-jobs", *jobs, "--allowed-rules", "split"])
        return snakefile.checked(content, a_job)

    own = read("split_1:model=b")
    assert (names, own.models) == (["b.yaml"], {"b": begun.models["b"]})
    assert [(one.rule, one.models) for one in batch.alike(own, "split")] == [("split_1", ("b",))]
    assert [one.rule for one in batch.alike(begun, "split")] == ["split", "split_1"]
    assert read("convert:part=head_0,model=a").models.keys() == {"a"}
    assert read("residency:model=a,part=head_0", "parity:model=b,part=head_0").models.keys() == {"a", "b"}
    assert read("refused:config=c.yaml").refusals.keys() == {"c.yaml"} and names == []
    write("b.yaml", model="b", contxt=1)
    with pytest.raises(SystemExit, match=r"b\.yaml: contxt: unknown key"):
        read("split_1:model=b")
    Path("build/.batch.json").unlink()
    assert read("convert:part=head_0,model=a").models.keys() == {"a"} and len(names) == 3


def test_a_refused_config_may_have_a_path_longer_than_a_name(tmp_path: Path) -> None:
    """Snakemake ends, with all other models, at a name that no file can have."""
    paths = ["/".join(letter * 90 for letter in "abcd") + f"/{name}.yaml" for name in ("模" * 80, "x", "y")]
    names = [*Batch({}, dict.fromkeys(paths, "it makes no sense")).refusals]
    assert len(names) == 3 and names[1].endswith("_x.yaml")
    for name in names:
        (tmp_path / f"{name}.log").touch()


def test_paths_that_are_one_file_name_are_told_apart() -> None:
    found = Batch({}, {"a/b.yaml": "first", "a_b.yaml": "second", "c.yaml": "third"})
    assert sorted(found.refusals.values()) == ["first", "second", "third"]
    assert found.refusals["c.yaml"] == "third" and all("/" not in name for name in found.refusals)


def test_what_nobody_foresaw_stops_no_other_model(folder: Path) -> None:
    for name in ("a", "b"):
        write(f"models/{name}.yaml", model=name)

    def read(content: Any, name: str) -> Config:
        if content["model"] == "a":
            raise PermissionError(13, "Permission denied", "/secret")
        return parsed(content, name)

    found = batch.read_batch({"batch": ["models/*.yaml"]}, "batch.yaml", read)
    assert list(found.models) == ["b"]
    assert found.refused["models/a.yaml"].startswith("models/a.yaml: PermissionError: ")


def test_a_file_with_a_name_that_none_can_have_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml: .*x+: File name too long"):
        snakefile.resolved(tiny.settings("checkpoint") | {"parity": {"text": "x" * 300}}, "a.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"batch": []}, "batch.yaml: batch: lists no config"),
        ({"batch": "a.yaml"}, "batch.yaml: batch: expected a list of config files and no other key"),
        ({"batch": [1]}, "batch.yaml: batch: expected a list of config files and no other key"),
        ({"batch": ["a.yaml"], "model": "a"}, "batch.yaml: batch: expected a list of config files and no other key"),
        ({"batch": [""]}, "batch.yaml: batch: : no such file"),
        ({"batch": ["/"]}, "batch.yaml: batch: /: no such file"),
        ({"batch": ["a**b"]}, "batch.yaml: batch: a**b: no such file"),
        ({"batch": ["nowhere/*.yaml"]}, "batch.yaml: batch: nowhere/*.yaml: no such file"),
        ({"batch": ["empty.yaml"]}, "empty.yaml: expected a mapping of keys, see configs/README.md"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(folder: Path, content: dict[str, Any], message: str) -> None:
    Path("empty.yaml").touch()
    with pytest.raises(ConfigError) as refused:
        batch.read_batch(content, "batch.yaml", parsed)
    assert str(refused.value) == message


def models(**changes: Mapping[str, Any]) -> Batch:
    return Batch({name: config.parse(tiny.settings("checkpoint", model=name, **own)) for name, own in changes.items()})


def test_a_job_is_told_of_its_own_model(folder: Path) -> None:
    found = models(a={"context": 128}, b={"topology": [[0, 4]]})
    assert batch.of(found)(options.option, "context")(job("a")) == 128
    assert (
        batch.of(found)(options.section, "parity")(job("b", part="head_0"))
        == options.settings(found.models["b"])["parity"]
    )
    paths = batch.parts_of(found)("build/{model}/{part}.json", "embedding")
    assert paths(job("b")) == [f"build/{{model}}/{part}.json" for part in (*found.models["b"].parts, "embedding")]
    both = batch.together(paths, "build/{model}/x.json", batch.of(found)(options.source_files))
    assert both(job("a")) == [*paths(job("a")), "build/{model}/x.json", *options.source_files(found.models["a"])]


def test_models_of_the_same_parts_share_a_rule(folder: Path) -> None:
    found = batch.alike(models(a={}, b={"topology": [[0, 4]]}, c={"context": 128}), "split")
    assert [(one.rule, one.models) for one in found] == [("split", ("a", "c")), ("split_1", ("b",))]
    assert found[1].parts == ("layers_00_04", "head_0", "head_1")


def test_a_wildcard_stands_for_names_as_they_are(folder: Path) -> None:
    found = models(**{"a.b": {}, "c": {"topology": [[0, 4]]}})
    pattern = re.compile(found.names("model"))
    assert [name for name in ("a.b", "c", "axb", "a.bc", "d") if pattern.fullmatch(name)] == ["a.b", "c"]
    assert all(re.fullmatch(found.names("part"), part) for part in ("layers_00_02", "layers_00_04", "head_1"))
    assert not re.fullmatch(found.names("point"), "")


def test_a_page_of_an_earlier_run_hides_no_failure_of_this_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each model has a page. Of `a` a job failed now, of `b` one was killed, `c` failed once and is finished since."""
    logs = {"a": "measured_chosen", "b": "benchmark", "c": "benchmark"}
    for name, log in logs.items():
        (folder / f"build/{name}/logs").mkdir(parents=True)
        (folder / f"build/{name}/report.html").touch()
        (folder / f"build/{name}/logs/{log}.log").write_text("" if name == "b" else "ERROR no text\n")
        files = {"plan.json": {"kind": "decoder", "parts": [{}]}, "report.receipt.json": {"outputs": {}}}
        for file, content in files.items():
            write_json(folder / f"build/{name}/{file}", content)
    jobs = [
        SimpleNamespace(wildcards_dict={"model": "a", "point": "chosen"}, log=["build/a/logs/measured_chosen.log"]),
        SimpleNamespace(wildcards_dict={"model": "a"}, log=["build/a/logs/report.log"]),
        SimpleNamespace(wildcards_dict={"model": "b"}, log=["build/b/logs/benchmark.log"]),
        SimpleNamespace(wildcards_dict={}, log=[]),
    ]
    workflow = SimpleNamespace(
        storage_settings=IN_BUILD.storage_settings, dag=SimpleNamespace(needrun_jobs=lambda: jobs)
    )
    batch.sum_up(Batch(models(a={}, b={}, c={}).models, listed=True), workflow)
    assert capsys.readouterr().err.splitlines() == [
        "shardmill: not built: a: measured_chosen: no text",
        "shardmill: 1 of 3 models are finished, see build/index.html",
    ]
    page = Path("build/index.html").read_text()
    assert "<strong>b</strong>: not finished" in page and 'href="c/report.html"' in page and "a/report" not in page


@pytest.mark.pipeline
@pytest.mark.slow
def test_one_model_stops_no_other(tmp_path: Path) -> None:
    """Two models of one checkpoint, one of other parts, weights that are cut short, and a config that is refused."""
    checkpoint = tiny.write_checkpoint(tmp_path / "checkpoint", layers=2)
    project = Project(tmp_path / "project").create(checkpoint)
    cut = project.folder / "broken"
    (project.folder / "checkpoint").rename(cut)
    for file in cut.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size // 2)
    tiny.write_checkpoint(project.folder / "checkpoint", layers=2)
    (project.folder / "models").mkdir()
    changes: dict[str, dict[str, Any]] = {
        "one": {},
        "two": {},
        "three": {"topology": [[0, 2]]},
        "four": {"source": {"path": "broken"}},
        "five": {"topology": [[0, 3]]},
    }
    for name, own in changes.items():
        (project.folder / f"models/{name}.yaml").write_text(yaml.safe_dump(CONFIG | {"model": name} | own))
    (project.folder / "tiny.yaml").write_text("batch: ['models/*.yaml']\n")
    targets = [f"build/{name}/embedding.receipt.json" for name in ("one", "two", "three", "four")]
    done = project.run(*targets, "build/refused/models_five.yaml")
    assert done.returncode == 1, done.stdout
    made = [name for name in changes if (project.folder / f"build/{name}/embedding.receipt.json").exists()]
    assert made == ["one", "two", "three"]
    refused = "models/five.yaml: topology: ends at layer 3, the model has 2"
    lines = [line for line in done.stdout.splitlines() if line.startswith("shardmill: ")]
    (failed,) = [line for line in lines if line.startswith("shardmill: not built: four: ")]
    assert ".safetensors" in failed
    assert f"shardmill: not built: {refused}" in lines
    assert f"shardmill: {refused}" in lines
    assert lines[-1] == "shardmill: 0 of 5 models are finished, see build/index.html"
    logs = [log.read_text() for name in made for log in project.folder.glob(f"build/{name}/logs/*.log")]
    assert sum("INFO worked" in log or "INFO unchanged" in log for log in logs) == 2 * 3
    page = (project.folder / "build/index.html").read_text()
    assert "models/five.yaml" in page and "four" in page
    again = project.run(*targets[:3])
    assert again.returncode == 0 and "Nothing to be done" in again.stdout
