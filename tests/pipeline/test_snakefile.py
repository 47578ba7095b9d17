"""What the Snakefile asks of the library."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from snakemake.iocontainers import Wildcards
from snakemake.path_modifier import PathModifier

from shardmill import config
from shardmill.checkpoint import hub
from shardmill.errors import ShardmillError
from shardmill.pipeline import code_digest, options, resources, scheduling, snakefile
from shardmill.pipeline.batch import Batch
from shardmill.pipeline.needs import STEPS
from shardmill.pipeline.resolve import resolve_config

from . import made
from .workflows import IN_BUILD


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A valid config file's content; the working folder holds its checkpoint."""
    monkeypatch.chdir(tmp_path)
    tiny.hf_config().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "tokenizer.json").touch()
    (tmp_path / "checkpoint" / "folder").mkdir()
    monkeypatch.setattr(resources, "torch_mb", lambda: 220)
    return tiny.settings("checkpoint")


def limited(limit: int | None) -> SimpleNamespace:
    """Snakemake's workflow object, as far as it knows of a limit."""
    found = {name: SimpleNamespace(value=value) for name, value in (("mem_mb", limit), ("_nodes", None))}
    return SimpleNamespace(global_resources=found, is_main_process=False, dryrun=False)


def job(**wildcards: str) -> Wildcards:
    """What a function of a rule is told of a job."""
    return Wildcards(fromdict={"model": "tiny", **wildcards})


def test_memory_is_declared_within_the_limit(settings: dict[str, Any]) -> None:
    folder = Path("build/tiny")
    folder.mkdir(parents=True)
    layers = {"name": "layers_00_02", "kind": "layers", "parameters": 10**8, "largest_tensor": 10**8, "expanded": 0}
    table = {"name": "embedding", "kind": "embedding", "parameters": 0, "largest_tensor": 0, "expanded": 0}
    plan = {
        "architecture": {"layers": 4, "vocab": 0, "graph": {"experts": None}},
        "item_bytes": 2,
        "parts": [layers, table],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    batch = Batch({"tiny": config.parse(settings)})
    asked = (job(part="layers_00_02"), ["a"], 1, "convert")
    needed = scheduling.memory(batch, limited(None))(*asked)
    assert scheduling.memory(batch, limited(needed))(*asked) == needed > 200  # MB, of the largest tensor alone
    with pytest.raises(ShardmillError, match=f"needs {needed} MB of memory and this build may use {needed - 1}"):
        scheduling.memory(batch, limited(needed - 1))(*asked)


def test_memory_is_declared_for_the_configured_positions(settings: dict[str, Any]) -> None:
    """As many rows of logits as the context allows."""
    folder = Path("build/tiny")
    folder.mkdir(parents=True)
    table = {"name": "embedding", "kind": "embedding", "parameters": 0, "largest_tensor": 0, "expanded": 0}
    plan = {
        "architecture": {"layers": 4, "vocab": 10**6, "graph": {"experts": None}},
        "item_bytes": 2,
        "parts": [table],
    }
    (folder / "plan.json").write_text(json.dumps(plan))

    def declared(positions: int, context: int) -> int:
        parity = {"positions": 8, "perplexity_positions": positions}
        parsed = config.parse(settings | {"parity": parity, "context": context})
        return scheduling.memory(Batch({"tiny": parsed}), limited(None))(job(), ["a"], 1, "reference")

    assert declared(64, 64) - declared(32, 64) == 32 * 12
    assert declared(256, 64) == declared(64, 64)


def test_no_rule_needs_a_number_of_cores() -> None:
    rules = Path(__file__).parents[2] / "rules"
    assert not [file.name for file in rules.glob("*.smk") if "workflow.cores" in file.read_text()]


def test_a_wrong_config_ends_the_run_with_one_line(settings: dict[str, Any]) -> None:
    files = SimpleNamespace(configfiles=["configs/a.yaml"], is_main_process=True)
    Path("configs").mkdir()
    Path("configs/a.yaml").touch()

    def refusal(content: dict[str, Any]) -> str:
        with pytest.raises(SystemExit) as ended:
            snakefile.checked(content, files)
        return str(ended.value.code).removeprefix("shardmill: configs/a.yaml: ")

    benchmark = {"text": "text.txt", "task_prompts": "prompts", "tasks": ["summary"]}
    assert refusal(settings | {"contxt": 1}) == "contxt: unknown key; did you mean context?"
    nowhere = settings | {"parity": {"text": "nowhere.txt"}}
    assert refusal(nowhere) == "parity.text: nowhere.txt is no file with text in it"
    Path("text.txt").write_text("a text")
    settings |= {"parity": {"text": "text.txt"}}
    nowhere = settings | {"benchmark": benchmark | {"text": "nowhere.txt"}}
    assert refusal(nowhere) == "benchmark.text: nowhere.txt is no file with text in it"
    assert list(snakefile.checked(settings | {"benchmark": False}, files).models) == ["tiny"]
    settings |= {"benchmark": benchmark}
    assert refusal(settings) == "benchmark.tasks: prompts/summary holds no .txt file"
    Path("prompts/summary").mkdir(parents=True)
    Path("prompts/summary/a.txt").write_text("a text")
    Path("checkpoint/tokenizer.json").rename("checkpoint/tokenizer.model")
    assert refusal(settings) == "source.path: checkpoint holds no tokenizer.json"
    Path("checkpoint/tokenizer.model").rename("checkpoint/tokenizer.json")
    assert list(snakefile.checked(settings, files).models) == ["tiny"]
    assert refusal(settings | {"topology": [[0, 3]]}) == "topology: ends at layer 3, the model has 4"
    resolved = snakefile.checked(settings | {"topology": "auto"}, files).models["tiny"]
    assert resolved.parts == ("layers_00_04", "head_0", "head_1")


def test_a_key_given_twice_ends_the_run(settings: dict[str, Any]) -> None:
    """Snakemake reads configs itself, and hands over the last value alone."""
    Path("a.yaml").write_text("model: tiny\nmodel: other\n")
    with pytest.raises(SystemExit, match=r"shardmill: a\.yaml: model: given twice \(line 2\); keep one"):
        snakefile.checked(settings, SimpleNamespace(configfiles=["a.yaml"], is_main_process=True))


def test_two_configs_on_one_line_are_no_batch(settings: dict[str, Any]) -> None:
    """Snakemake merges them to one, with keys of the first in the second; what names no model may be merged."""
    for file, text in {"a.yaml": "model: a\n", "b.yaml": "model: b\n", "c.yaml": "context: 64\n"}.items():
        Path(file).write_text(text)
    said = r"a\.yaml \(a\) and b\.yaml \(b\) are configs of different models; list them in one under batch:"
    with pytest.raises(SystemExit, match=said):
        snakefile.checked(settings, SimpleNamespace(configfiles=["a.yaml", "b.yaml"], is_main_process=True))
    assert snakefile.checked(settings, SimpleNamespace(configfiles=["a.yaml", "c.yaml"], is_main_process=True))


def test_a_name_that_no_file_can_have_is_one_line(settings: dict[str, Any]) -> None:
    for precision in ("\0", "palette4/" + "9" * 5000):
        with pytest.raises(SystemExit, match="shardmill: a.yaml: "):
            snakefile.checked(
                settings | {"convert": {"precision": precision}},
                SimpleNamespace(configfiles=["a.yaml"], is_main_process=True),
            )


def test_settings_are_plain_data_that_parse_to_the_same_config(settings: dict[str, Any]) -> None:
    parsed = config.parse(settings)
    plain = options.settings(parsed)
    assert json.loads(json.dumps(plain)) == plain
    assert config.parse(plain) == parsed


def test_snakemake_watches_every_file_of_a_local_checkpoint(settings: dict[str, Any]) -> None:
    """But for what the Finder writes when somebody looks into the folder: nothing would be fetched anew."""
    Path("checkpoint/.DS_Store").touch()
    assert options.source_files(config.parse(settings)) == ["checkpoint/config.json", "checkpoint/tokenizer.json"]


def test_there_is_nothing_to_watch_on_the_hub(settings: dict[str, Any]) -> None:
    source = {"repo": "a/b", "revision": "0" * 40}
    assert options.source_files(config.parse(settings | {"source": source})) == []


def watched_split(parsed: config.Config) -> Any:
    """What Snakemake records of what decides the plan, by job."""
    known = snakefile.tools(Batch({"tiny": parsed}), IN_BUILD)["split"]
    assert callable(known)
    return known(job())


def test_what_is_recorded_before_there_is_a_checkpoint_holds_afterwards(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the jobs of a finished build would be submitted once more."""
    hub_s = {"source": {"repo": "a/b", "revision": "0" * 40}, "topology": "auto"}
    monkeypatch.setattr(hub, "download_config", lambda *_: Path("checkpoint/config.json"))
    configs = [resolve_config(config.parse(settings | own), "a.yaml") for own in ({}, hub_s)]
    before = [watched_split(one) for one in configs]
    assert before == 2 * [code_digest.tools(STEPS["split"], "phi3")]
    shutil.copytree("checkpoint", "build/tiny/source")
    assert [watched_split(one) for one in configs] == before


def test_every_step_is_watched_and_the_familys_code_once_it_is_known(settings: dict[str, Any]) -> None:
    """Before it is, Snakemake is told so by an error that names an input of the job."""
    named = config.parse(settings | {"source": {"repo": "a/b", "revision": "0" * 40}})
    watched = snakefile.tools(Batch({"tiny": named}), IN_BUILD)
    assert set(watched) == set(STEPS)
    assert {name for name, known in watched.items() if callable(known)} == {"split"}
    known = watched["split"]
    assert callable(known)
    with pytest.raises(FileNotFoundError) as raised:
        known(job())
    assert raised.value.filename == "build/tiny/source.receipt.json"
    Path("build/tiny/source").mkdir(parents=True)
    Path("checkpoint/config.json").rename("build/tiny/source/config.json")
    assert known(job()) == code_digest.tools(STEPS["split"], "phi3") != code_digest.tools(STEPS["split"], "")


@pytest.mark.parametrize(
    ("damaged", "made_anew"),
    [
        ("compiled/head_0.mlmodelc/inner/data", "compiled/head_0.mlmodelc"),
        ("packages/layers_00_02.mlpackage/inner/data", "packages/layers_00_02.mlpackage"),
        ("embedding.safetensors", "embedding.safetensors"),
        ("source/tokenizer.json", "source.receipt.json"),
    ],
)
@pytest.mark.parametrize("gone", [False, True])
def test_a_file_of_another_size_is_made_anew(
    damaged: str, made_anew: str, gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Snakemake would leave it: it is newer than what it was made of."""
    monkeypatch.chdir(tmp_path)
    file = made.finish(tmp_path / "build") / damaged
    models: Any = {"tiny": None}  # whose config does not matter
    plan = SimpleNamespace(forcefiles={"asked for"})
    storages = SimpleNamespace(default_storage_provider=None)
    workflow: Any = SimpleNamespace(dag=plan, storage_settings=storages)
    assert snakefile.mend(Batch(models), workflow) == []
    assert (plan.forcefiles, capsys.readouterr().err) == ({"asked for"}, "")
    file.unlink() if gone else file.write_bytes(file.read_bytes()[:-1])
    for _ in range(2):  # Snakemake may ask more than once
        assert snakefile.mend(Batch(models), workflow) == []
    assert plan.forcefiles == {"asked for", f"build/tiny/{made_anew}"}
    line = f"shardmill: build/tiny/{made_anew}: is not as large as model.json says, and is made anew\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("moving", [{"prefix": "deep/er"}, {"replace_prefix": {"build/": "results/"}}], ids=str)
def test_a_module_that_moves_paths_ends_the_run_with_one_line(moving: dict[str, Any], settings: dict[str, Any]) -> None:
    """Snakemake would move what rules name, and nothing else."""
    moved = PathModifier(moving.get("replace_prefix"), moving.get("prefix"), None)
    workflow = SimpleNamespace(configfiles=[], modifier=SimpleNamespace(path_modifier=moved))
    with pytest.raises(
        SystemExit, match=r"shardmill: a module of shardmill takes no prefix: or replace_prefix:; leave"
    ):
        snakefile.checked(settings, workflow)


def test_a_target_that_is_taken_for_a_config_is_told(settings: dict[str, Any]) -> None:
    """`--configfile a.yaml build/tiny/model.json` reads both, once the build is there."""
    Path("build/tiny").mkdir(parents=True)
    Path("build/tiny/model.json").write_text("{}")
    Path("a.yaml").touch()
    files = SimpleNamespace(configfiles=["a.yaml", Path("build/tiny/model.json").resolve()], is_main_process=True)
    with pytest.raises(SystemExit, match=r"shardmill: build/tiny/model\.json: taken for a config, as --configfile"):
        snakefile.checked(settings, files)
