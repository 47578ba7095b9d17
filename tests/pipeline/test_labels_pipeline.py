"""A model with a program for labels, under the real Snakemake: every gate, what is delivered, and what is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import limits
import pytest
import tiny
import torch
import yaml
from processes import succeeded
from reciter import shardmill
from serve.running import Running, running

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable
from shardmill.plan import load_part
from shardmill.serve.model import load_model

from .driver import stored_here
from .project import ROOT, Project
from .proof import faults
from .test_forms_pipeline import SETTINGS

pytestmark = [
    pytest.mark.pipeline,
    pytest.mark.slow,
    pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have"),
]
LABELS = [" not", "None", " return"]
SHARES = limits.logprobs(limits.model(tiny.LAYERS, tiny.FFN), 2, tiny.VOCAB)
TEXTS = ["def decode(self, s", "    if not isinstance(", 'raise JSONDecodeError("Expecting value']


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A build of everything, with an untied head in two slices."""
    folder = tmp_path_factory.mktemp("labels")
    checkpoint = tiny.write_checkpoint(folder / "checkpoint", layers=2, tied=False)
    project = Project(folder / "project").create(checkpoint)
    settings = SETTINGS | {"program": {"labels": LABELS}, "head": {"slices": 2}}
    (project.folder / "tiny.yaml").write_text(yaml.safe_dump(settings))
    done = stored_here(project).run("all")
    succeeded(done)
    return project


def test_the_build_verifies(finished: Project) -> None:
    assert faults(finished.build) == []


@pytest.fixture(scope="module", params=["fp32", "fp16"])
def served(request: pytest.FixtureRequest, finished: Project) -> Iterator[tuple[str, Running]]:
    with running(load_model(finished.build, None, request.param)) as server:
        yield request.param, server


def decided(server: Running, **body: Any) -> list[dict[str, float]]:
    """The probabilities of the labels after each text."""
    status, answer = server.post({"model": "tiny", "input": TEXTS, "labels": LABELS, **body}, "/v1/decide")
    assert status == 200, answer
    assert all(("logprob" in one) == body.get("logprobs", True) for row in answer["data"] for one in row["labels"])
    return [{one["label"]: one["probability"] for one in row["labels"]} for row in answer["data"]]


def transformers_shares(build: Path) -> list[list[float]]:
    """transformers' softmax over the labels' logits after each text, with the weights that the packages hold."""
    model, held = tiny.transformers_model(build / "source"), dict[str, list[torch.Tensor]]()
    for name in ("layers_00_02", "head_0", "head_1"):
        stored = PackageWeights(build / f"packages/{name}.mlpackage", load_part(build / f"parts/{name}.json"))
        for tensor in stored.part.tensors:
            held.setdefault(tensor.source.tensor, []).append(stored.block(tensor))
    for name, weight in model.named_parameters():
        if name in held:
            blocks = held[name] if name.startswith("lm_head") else held[name][:1]  # both slices hold the norm
            weight.data.copy_(torch.cat(blocks).reshape(weight.shape))
    tokenizer = read_tokenizer(build / "source/tokenizer.json")
    tokens = [tokenizer.encode(label).ids[0] for label in LABELS]
    with torch.no_grad():
        rows = [model(torch.tensor([tokenizer.encode(text).ids])).logits[0, -1, tokens].double() for text in TEXTS]
    return [row.softmax(0).tolist() for row in rows]


def test_the_manifest_names_the_tokens(finished: Project) -> None:
    content = json.loads((finished.build / "model.json").read_text())
    jsonschema.validate(content, json.loads((ROOT / "docs/model.schema.json").read_text()))
    *_, part = content["parts"]
    tokenizer = read_tokenizer(finished.build / "source/tokenizer.json")
    assert part["kind"] == "labels" and part["inputs"].keys() == {"hidden"}
    assert part["tokens"] == [tokenizer.encode(label).ids[0] for label in LABELS]
    assert "labels" in content["uses"] and "labels" in content["packages"]


def test_it_goes_through_every_gate_and_into_every_file(finished: Project) -> None:
    numbers = {row["name"]: row for row in json.loads((finished.build / "parity/labels.json").read_text())["gate"]}
    assert numbers["program_error"]["value"] > 0 and numbers["psnr"]["passed"]
    limits.agrees("the labels' part", numbers["program_error"]["value"], limits.sums("fp32", tiny.HIDDEN, limits.HEAD))
    assert json.loads((finished.build / "residency/labels.json").read_text())["part"] == "labels"
    for name in ("provenance.json", "test-results.jsonl"):
        assert "compiled/labels.mlmodelc" in (finished.build / name).read_text()
    assert "rows 0 to 15" in (finished.build / "report.html").read_text()
    for command in (("verify",), ("warm",), ("device", "kit", "--output", finished.folder / "kit.zip")):
        result = shardmill(command[0], *command[1:2], finished.build, *command[2:])
        assert result.exit_code == 0, result.output
    assert "0 of" in finished.why()


def test_the_server_decides_alike_by_either_head(finished: Project, served: tuple[str, Running]) -> None:
    """To fp64's rounding where the engine rounds all shapes of a product alike, and as transformers does in fp32."""
    precision, server = served
    few, whole = decided(server, logprobs=False), decided(server)
    for one, other in zip(few, whole, strict=True):
        limit = limits.sums("fp64", len(LABELS)) if precision == "fp16" else SHARES
        limits.numbers_agree("shares by either head", one, other, limit, size=1)
    if precision == "fp32":
        for found, expected in zip(few, transformers_shares(finished.build), strict=True):
            limits.numbers_agree("shares", [found[label] for label in LABELS], expected, SHARES, size=1)
    others = decided(server, labels=[*LABELS, " is"], logprobs=False)
    assert [row[" is"] > 0 for row in others] == [True] * len(TEXTS)
