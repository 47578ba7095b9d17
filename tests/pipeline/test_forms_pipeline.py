"""A model in a form that is not the default, under the real Snakemake: every rule, and what is served in the end."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import tiny
import yaml
from processes import succeeded

from shardmill.machine import is_portable

from .driver import stored_here
from .project import ROOT, Project, steps_that
from .proof import faults

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]
SETTINGS = {
    "model": "tiny",
    "source": {"path": "checkpoint"},
    "context": 64,
    "program": {"shapes": "fixed", "state": "host", "contexts": [32], "bundles": "each"},
    "parity": {"text": "text.txt", "positions": 16, "perplexity_positions": 32},
    "benchmark": {
        **{"text": "text.txt", "prompt_tokens": [16], "tasks": []},
        **{"new_tokens": 8, "repetitions": 1, "drafters": ["ngram"]},
    },
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build of everything. The jobs' work is done in this process: Snakemake's find it if they are given the same."""
    folder = tmp_path_factory.mktemp("forms")
    project = Project(folder / "project").create(tiny.write_checkpoint(folder / "checkpoint", layers=2))
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS))
    done = stored_here(project).run("all")
    succeeded(done)
    assert steps_that("worked", done.stdout) == {"benchmark"}
    assert steps_that("unchanged", done.stdout) >= {"split", "embedding", "convert", "compile", "residency", "parity"}
    return project


def test_the_published_schema_describes_the_manifest(finished: Project) -> None:
    """And docs/model-json.md: a function for each width and length of the context, and caches among the inputs."""
    content = json.loads((finished.build / "model.json").read_text())
    jsonschema.validate(content, json.loads((ROOT / "docs/model.schema.json").read_text()))
    assert content["widths"] == [1, 4]
    assert all(part["functions"] == {"1": "t1", "4": "t4"} and not part["states"] for part in content["parts"])
    layers, head = content["parts"]
    assert layers["written"] == {name: f"{name}_new" for name in ("k_0", "v_0", "k_1", "v_1")}
    assert layers["inputs"]["k_1"] == [1, 1, 64, 32] and "written" not in head
    assert (content["context"], content["contexts"], "contexts" in head) == (64, [32], False)
    shorter = layers["contexts"]["32"]
    assert shorter["functions"] == {"1": "c32_t1", "4": "c32_t4"} and shorter["inputs"]["k_1"] == [1, 1, 32, 32]
    assert shorter["inputs"].keys() == {"attn_mask", "kv_write_mask", *layers["written"]} and not shorter["states"]


def test_passes_that_no_function_takes_were_compared_too(finished: Project) -> None:
    """The gate feeds every width that decoding may take: those between are filled up."""
    numbers = json.loads((finished.build / "parity/layers_00_02.json").read_text())["gate"]
    ways = {"T=2", "T=3", "T=4", "mixed", "rejected drafts", "context of 32", "moving between contexts"}
    assert ways <= {number["detail"] for number in numbers}


def test_every_function_is_judged_at_its_width(finished: Project) -> None:
    content = json.loads((finished.build / "residency/layers_00_02.json").read_text())
    expected = {("t1", "T=1"), ("t4", "T=4"), ("c32_t1", "T=1"), ("c32_t4", "T=4")}
    assert {(row["function"], row["shape"]) for row in content["rows"]} == expected
    if is_portable():  # Core ML plans by itself
        assert content["counts"].keys() <= {"eligible", "no_device"} and content["counts"]["eligible"] > 20


def test_each_function_is_a_bundle_of_its_own(finished: Project) -> None:
    """With the weights of all of them on the disk once; model.json says where they lie."""
    content = json.loads((finished.build / "model.json").read_text())
    layers = content["parts"][0]["program"]
    assert layers["bundles"] == {name: f"{layers['path']}/{name}.mlmodelc" for name in ("c32_t1", "c32_t4", "t1", "t4")}
    folder = finished.build / layers["path"]
    assert {path.name for path in folder.glob("*.mlmodelc")} == {Path(path).name for path in layers["bundles"].values()}
    weights = [*folder.glob("*/weights/weight.bin"), *finished.build.glob("packages/layers*/**/weight.bin")]
    assert (len(weights), len({path.stat().st_ino for path in weights})) == (5, 1)


def test_the_build_verifies_and_the_report_says_its_form(finished: Project) -> None:
    assert faults(finished.build) == []
    page = (finished.build / "report.html").read_text()
    assert "What a token takes in each context" in page
    assert "a function each for passes of 1 and 4 tokens; the host keeps keys and values" in page


def test_bundles_of_all_functions_convert_nothing_again(finished: Project) -> None:
    """The packages are the same; what is loaded of them is made and judged anew."""
    program = {**SETTINGS["program"], "bundles": "one"}
    (finished.folder / "tiny.yaml").write_text(yaml.safe_dump(SETTINGS | {"program": program}))
    done = finished.run("build/tiny/compiled/layers_00_02.receipt.json")
    succeeded(done)
    worked = [line for line in done.stdout.splitlines() if ": worked" in line]
    assert len(worked) == 1 and worked[0].startswith("shardmill compile tiny layers_00_02"), done.stdout
    assert [path.name for path in (finished.build / "compiled/layers_00_02.mlmodelc").glob("*.mil")] == ["model.mil"]
