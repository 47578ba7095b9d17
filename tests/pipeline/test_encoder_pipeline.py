"""An encoder under the real Snakemake: every rule that a decoder goes through, up to the report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest
import tiny
import yaml
from models import tiny_encoders
from processes import succeeded
from torch import nn

from shardmill.errors import ShardmillError
from shardmill.machine import is_portable
from shardmill.records.finished import manifest_files
from shardmill.runtime.label import embed, load_reader
from shardmill.runtime.manifest import COMPLETE, read_manifest

from .driver import run, stored_here
from .project import ROOT, Project, steps_that
from .proof import faults

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
SETTINGS = {
    "model": "tiny",
    "source": {"path": "checkpoint"},
    "buckets": [16, 64],
    "parity": {"text": "text.txt", "positions": 16, "perplexity_positions": 100},
    "benchmark": {"text": "sentences.txt", "tasks": [], "repetitions": 1},
}

OPTIONAL = {"silu", "uses", "requires", "causal", "dense", "prompts", "default_prompt", "template", "instruction"}
OPTIONAL |= {"width"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build of everything. The jobs' work is done in this process: Snakemake's find it if they are given the same."""
    folder = tmp_path_factory.mktemp("encoder")
    checkpoint = tiny_encoders.write_tiny("bert", folder / "checkpoint")
    project = Project(folder / "project").create(checkpoint)
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    shutil.copyfile(ROOT / "resources/text/sentences.txt", project.folder / "sentences.txt")
    done = stored_here(project).run("all")
    succeeded(done)
    assert steps_that("worked", done.stdout) == {"benchmark"}
    assert steps_that("unchanged", done.stdout) >= {"split", "embedding", "convert", "compile", "residency", "parity"}
    return project


def test_every_bucket_has_the_same_weight_file(finished: Project) -> None:
    """Of packages and compiled bundles alike there is a single one on the disk."""
    found = sorted(finished.build.rglob("weight.bin"))
    assert len(found) == 4 and all(file.samefile(found[0]) for file in found)


def test_the_published_schema_describes_the_manifest(finished: Project) -> None:
    """A runtime of another make reads docs/encoder.schema.json: it holds, and names every key that there is."""
    schema = json.loads((ROOT / "docs/encoder.schema.json").read_text())
    content = json.loads((finished.build / "model.json").read_text())
    jsonschema.validate(content, schema)
    assert schema["properties"].keys() == {*schema["required"], *OPTIONAL} == content.keys() | OPTIONAL


@pytest.mark.skipif(not is_portable(), reason="Core ML plans by itself, and nothing is predicted")
def test_every_operation_is_predicted_to_run_on_the_neural_engine(finished: Project) -> None:
    for bucket in SETTINGS["buckets"]:
        content = json.loads((finished.build / f"residency/encoder_{bucket}.json").read_text())
        assert content["counts"].keys() <= {"eligible", "no_device"} and content["counts"]["eligible"] > 50


def test_the_build_verifies(finished: Project) -> None:
    assert faults(finished.build) == []


def test_the_report_says_what_a_user_of_labels_asks(finished: Project) -> None:
    """What it tells apart, how long a text may be, how fast it is; and nothing of what only decoders have."""
    page = (finished.build / "report.html").read_text()
    speed = json.loads((finished.build / "benchmark/speed.json").read_text())
    assert "tells apart person, email, phone" in page and "64 tokens in one pass" in page
    assert f"{speed['sentences']['per_second']:.1f} sentences a second" in page
    assert "label_agreement" in page and "span_agreement" in page
    shown = page.partition('id="provenance"')[0]  # which has the config, with every default
    for word in ("speculation", "drafter", "key/value", "rejected"):
        assert word not in shown, word


def test_nothing_is_built_twice(finished: Project) -> None:
    assert "Nothing to be done" in finished.run("all").stdout


@pytest.mark.parametrize("model_type", ["gemma3_text", "embedding_gemma2", "qwen3"])
def test_what_follows_the_programs_is_in_the_manifest(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pooling, projections and prompts of EmbeddingGemmas; answers and the question of a Qwen3-Reranker."""
    monkeypatch.chdir(tmp_path)
    ranks = model_type == "qwen3"
    checkpoint = tiny_encoders.write_tiny(model_type, tmp_path / "checkpoint", "text-ranking" if ranks else "")
    if not ranks:
        projections = [nn.Linear(96, 64), nn.Linear(64, 8, bias=False)] if model_type == "gemma3_text" else []
        tiny_encoders.write_modules(checkpoint, "mean", projections)
    (tmp_path / "text.txt").write_text(tiny.sample_text())
    answers = {"answers": ["n", "y"]} if ranks else {}
    run(tmp_path, {**SETTINGS, "buckets": [32], "benchmark": False, **answers}, leave_out=("provenance",))
    build = tmp_path / "build/tiny"
    content, page = read_manifest(build, COMPLETE), (build / "report.html").read_text()
    jsonschema.validate(content, json.loads((ROOT / "docs/encoder.schema.json").read_text()))
    if ranks:
        assert (content["task"], content["labels"], content["pooling"]) == ("text-ranking", ["n", "y"], "last")
        assert content["uses"] == ["causal"] and "<Query>: {query}" in content["template"] and content["instruction"]
        assert "gives documents the probability of y" in page and "longer texts are refused" in page
        return
    assert content["pooling"] == "mean" and content["prompts"] == tiny_encoders.PROMPTS
    (row,) = embed(load_reader(build, "fp32"), [[1, 5, 2]])
    if model_type == "embedding_gemma2":
        assert (content["width"], row.shape, content["uses"]) == (72, (72,), [])
        return
    files = {path for path, _ in manifest_files(content, build / "model.json")}
    assert {"source/2_Dense/model.safetensors", "source/3_Dense/model.safetensors"} <= files
    assert [entry["activation"] for entry in content["dense"]] == ["tanh", "identity"]
    assert content["uses"] == ["dense"] and row.shape == (8,)
    (build / "source/3_Dense/model.safetensors").unlink()
    with pytest.raises(ShardmillError, match="can't be read as a projection"):
        load_reader(build, "fp32")
