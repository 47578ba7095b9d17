"""What follows the programs of encoders that embed texts or rank documents, from the checkpoint into model.json."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import tiny
from models import tiny_encoders
from torch import nn

from shardmill.errors import ShardmillError
from shardmill.records.finished import manifest_files
from shardmill.runtime.label import embed, load_reader
from shardmill.runtime.manifest import COMPLETE, read_manifest

from .driver import run
from .kinds import ENCODER
from .project import ROOT

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]


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
    run(tmp_path, {**ENCODER, "buckets": [32], "benchmark": False, **answers}, leave_out=("provenance",))
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
