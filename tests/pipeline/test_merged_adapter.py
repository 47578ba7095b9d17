"""A build with an adapter merged into its weights: gates, what `why` says, provenance, and what a rebuild needs."""

from __future__ import annotations

from pathlib import Path

import adapters
import pytest
import tiny
import yaml
from reciter import shardmill

from shardmill import config
from shardmill.checkpoint.fetch import adapter_hashes
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import read_json
from shardmill.pipeline import why
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.needs import STEPS
from shardmill.release import rebuild

from . import driver
from .kinds import FORMS, SETTINGS
from .project import Project

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("merged")
    made = Project(folder / "project").create(tiny.write_checkpoint(folder / "checkpoint", layers=2))
    adapters.write_lora(made.folder / "checkpoint", made.folder / "lora", 3)
    layout = {"topology": [[0, 2]], "head": {"slices": 1}}
    settings = (
        SETTINGS
        | {"program": FORMS}
        | layout
        | {"source": {"path": "checkpoint", "adapter": "lora"}, "benchmark": False}
    )
    (made.folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return driver.made_here(made, leave_out=("report",))


def forecast(project: Project) -> set[str]:
    """Steps of which `shardmill why` says that they would work, or depend on one that would."""
    verdicts = why.forecast(config.parse(project.content()), project.build, Store(project.folder / "build/.store"))
    return {verdict.step for verdict in verdicts if verdict.status != "unchanged"}


def test_every_gate_passed_and_the_provenance_names_what_was_merged(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weight files before the merge and after it, and the adapter's; `verify` and a rebuild find each of them."""
    monkeypatch.chdir(project.folder)
    assert read_json(project.build / "model.json")["source"] == {"repo": None, "commit": "local"}
    definition = read_json(project.build / "provenance.json")["predicate"]["buildDefinition"]
    rows = {row["name"]: row.get("digest", {}).get("sha256") for row in definition["resolvedDependencies"]}
    changed = [name.removeprefix("base/") for name in rows if name.startswith("base/")]
    assert changed
    for name in changed:
        assert rows[f"base/{name}"] == hash_file(project.folder / "checkpoint" / name) != rows[f"source/{name}"]
        assert rows[f"source/{name}"] == hash_file(project.build / "source" / name)
    for name, sha256 in adapter_hashes(project.folder / "lora").items():
        assert rows[f"adapter/{name}"] == sha256
    verified = shardmill("verify", project.build)
    assert verified.exit_code == 0, verified.output
    original = rebuild.read_original(project.build / "provenance.json")
    assert rebuild._checkpoint(original, None) == Path("checkpoint")
    assert rebuild._adapter(original) == Path("lora")
    assert forecast(project) == set()
    assert driver.run(project.folder, project.content(), leave_out=("report",)) == []


def test_another_adapter_is_another_build(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen by its content: `why` says so, a rebuild refuses it, and Snakemake is told of its files."""
    from shardmill.pipeline import options

    monkeypatch.chdir(project.folder)
    settings = config.parse(project.content())
    assert {"lora/adapter_config.json", "lora/adapter_model.safetensors"} <= {*options.source_files(settings)}
    before = read_json(project.build / "plan.json")["source"]
    adapters.write_lora(project.folder / "checkpoint", project.folder / "lora", 4)
    assert forecast(project) == {"source"}
    original = rebuild.read_original(project.build / "provenance.json")
    with pytest.raises(ShardmillError, match="lora: the adapter that was merged into the weights is not here"):
        rebuild._adapter(original)
    driver.run(project.folder, project.content(), leave_out=[name for name in STEPS if name not in ("fetch", "split")])
    assert read_json(project.build / "plan.json")["source"] != before
