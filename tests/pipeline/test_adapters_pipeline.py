"""A model whose programs take adapters, under the real Snakemake: every gate, an adapter, and what verifies then."""

from __future__ import annotations

import json
from pathlib import Path

import adapters
import jsonschema
import limits
import pytest
import tiny
import yaml
from processes import succeeded
from reciter import shardmill

from shardmill.machine import is_portable

from .driver import stored_here
from .project import ROOT, Project
from .proof import faults
from .test_forms_pipeline import SETTINGS

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have"),
]
PROMPT = "def loads(s, *, cls=None"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build of everything with INT8 weights, a ladder of contexts and the host's caches."""
    folder = tmp_path_factory.mktemp("adapters")
    project = Project(folder / "project").create(tiny.write_checkpoint(folder / "checkpoint", layers=2))
    settings = SETTINGS | {"program": {"shapes": "fixed", "state": "host", "contexts": [32], "adapters": 8}}
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    done = stored_here(project).run("all")
    succeeded(done)
    return project


def test_the_manifest_says_what_the_programs_take(finished: Project) -> None:
    content = json.loads((finished.build / "model.json").read_text())
    jsonschema.validate(content, json.loads((ROOT / "docs/model.schema.json").read_text()))
    layers, head = content["parts"]
    assert content["adapters"] == 8
    assert "adapters" in content["uses"] and "adapters" not in head
    assert layers["inputs"]["adapter_attn"] == [1, 2, 32, tiny.HIDDEN]
    assert layers["adapters"]["adapter_ffn"] == [0, 1]


def test_the_gate_computes_with_an_adapter(finished: Project) -> None:
    numbers = json.loads((finished.build / "parity/layers_00_02.json").read_text())["gate"]
    found = {number["detail"]: number["value"] for number in numbers if number["name"] == "adapter_error"}
    assert {"T=1", "T=2", "context of 32"} <= found.keys() and min(found.values()) > 0
    limits.agrees("a part with an adapter", max(found.values()), limits.model(2, tiny.FFN))


def test_the_build_with_an_adapter_still_verifies_and_answers(finished: Project, tmp_path: Path) -> None:
    assert faults(finished.build) == []
    lora = adapters.write_lora(finished.build / "source", tmp_path / "lora", 3, 0.25)
    assert shardmill("adapter", "add", finished.build, lora, "--name", "told").exit_code == 0
    verified = shardmill("verify", finished.build)
    assert verified.exit_code == 0, verified.output
    file = finished.build / "adapters/told/adapter.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert "not the bytes that adapters/told/adapter.json names" in shardmill("verify", finished.build).output
    file.write_bytes(whole)
    given = ("generate", finished.build, "--prompt", PROMPT, "--max-new-tokens", 8, "--json")
    bare, adapted = (json.loads(shardmill(*given, *more).stdout)["tokens"] for more in ((), ("--adapter", "told")))
    assert bare != adapted
    for command in ("inspect", "lint"):
        result = shardmill(command, next(finished.build.glob("packages/layers_*.mlpackage")))
        assert result.exit_code == 0, result.output
    warmed = shardmill("warm", finished.build)
    assert warmed.exit_code == 0, warmed.output
