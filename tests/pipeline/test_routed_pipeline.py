"""A model whose experts the host routes to, under the real Snakemake: every rule, and what is served in the end."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml
from models import tiny_families
from processes import succeeded

from shardmill.machine import is_portable

from .driver import stored_here
from .project import ROOT, Project, steps_that
from .proof import faults

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
GROUPS = 2
SETTINGS = {
    "model": "tiny",
    "source": {"path": "checkpoint"},
    "context": 64,
    "experts": GROUPS,
    "parity": {"text": "text.txt", "positions": 16, "perplexity_positions": 32},
    "benchmark": {
        **{"text": "text.txt", "prompt_tokens": [16], "tasks": []},
        **{"new_tokens": 8, "repetitions": 1, "drafters": ["ngram"]},
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build of everything. The jobs' work is done in this process: Snakemake's find it if they are given the same."""
    folder = tmp_path_factory.mktemp("routed")
    checkpoint = tiny_families.write_tiny("granitemoe", folder / "checkpoint", num_hidden_layers=1)
    project = Project(folder / "project").create(checkpoint)
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    done = stored_here(project).run("all")
    succeeded(done)
    assert steps_that("worked", done.stdout) == {"benchmark"}
    assert steps_that("unchanged", done.stdout) >= {"split", "embedding", "convert", "compile", "residency", "parity"}
    return project


def test_the_published_schema_describes_the_manifest(finished: Project) -> None:
    """And docs/model-json.md: groups follow their layer's part, and divide its experts among them."""
    content = json.loads((finished.build / "model.json").read_text())
    jsonschema.validate(content, json.loads((ROOT / "docs/model.schema.json").read_text()))
    assert [part["kind"] for part in content["parts"]] == ["layers", "experts", "experts", "head"]
    groups = content["parts"][1:3]
    assert [(part["start"], part["end"]) for part in groups] == [(0, 6), (6, 12)]
    assert all(part["inputs"]["weights"] == [1, 6, "T", 1] and not part["states"] for part in groups)


@pytest.mark.skipif(not is_portable(), reason="Core ML plans by itself, and nothing is predicted")
def test_every_operation_is_predicted_to_run_on_the_neural_engine(finished: Project) -> None:
    for name in ("layers_00_01", "experts_00_0", "experts_00_1"):
        content = json.loads((finished.build / f"residency/{name}.json").read_text())
        assert content["counts"].keys() <= {"eligible", "no_device"} and content["counts"]["eligible"] > 10


def test_the_build_verifies(finished: Project) -> None:
    assert faults(finished.build) == []


def test_the_report_compares_both_forms(finished: Project) -> None:
    page = (finished.build / "report.html").read_text()
    assert "experts_00_1" in page
    assert "What a pass reads" in page and f"{GROUPS} groups a layer" in page and "what a Mac must measure" in page
