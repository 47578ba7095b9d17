"""An encoder in the Swift package says what the Python runtime says: spans, shares of labels, embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import encoders
import limits
import pytest
import tiny
from models import tiny_encoders
from tokenizers import Tokenizer

from shardmill.machine import is_portable
from shardmill.runtime import label as reading
from shardmill.runtime.spans import CALIBRATION, TRANSITIONS

from .programs import demand_check, script

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="the pipe's programs run on the portable engine"),
    pytest.mark.slow,
]
# Scores and an embedding's numbers, whose sums another language may order otherwise.
NEAR = limits.logprobs(limits.model(3, 128), 2, len(tiny_encoders.LABELS)).value
TEXTS = [
    "",
    " ",
    "x",
    "Anna Kovalenko lives at 14 Harbour Street, Bristol.",
    "Jürgen Müller, Ringstraße 8, 50667 Köln: +49 221 4929-1180",
    "王小明 北京市海淀区 🎉 e\u0301 é İ ﬁ",
    "[CLS] a\tb  two  \u200b 안녕 \U0001f469\u200d\U0001f467",
    "  Seán Ó Briain\n\nhttps://example.com/?q=1\t",
]


def swift(build: Path, texts: list[str], folder: Path) -> Any:
    """Return what shardmill-check reads in texts."""
    files = [folder / "texts.json", folder / "result.json"]
    files[0].write_text(json.dumps(texts))
    script("pipe_engine").serve([*demand_check(), "read", str(build), *map(str, files)])
    return json.loads(files[1].read_text())


def near(found: Any) -> Any:
    """Return the result for a text with numbers that may differ by a rounding."""
    spans = [span | {"score": pytest.approx(span["score"], abs=NEAR)} for span in found["spans"]]
    return found | {"spans": spans}


def labelled(build: Path, texts: list[str]) -> list[Any]:
    """Return what the Python runtime finds in texts."""
    found = reading.label_all(reading.load_reader(build, "fp32"), texts)
    return [near(reading.as_object(text, one)) for text, one in zip(texts, found, strict=True)]


@pytest.mark.parametrize(
    ("family", "topology"),
    [("bert", "auto"), ("modernbert", "auto"), ("openai_privacy_filter", [[0, 1], [1, 2], [2, 3]])],
)
def test_spans_are_those_of_the_python_runtime(family: str, topology: Any, tmp_path: Path) -> None:
    """Short texts that share passes, and long ones through windows; then along the best path of a calibration.

    One encoder is a chain of programs.
    """
    demand_check()
    checkpoint = tiny_encoders.write_tiny(family, tmp_path / "checkpoint")
    build = encoders.build(checkpoint, tmp_path / "build", buckets=[32, 64], topology=topology)
    texts = [*TEXTS, *tiny.sample_text().splitlines()[:20], " ".join(TEXTS) * 6]
    found = swift(build, texts, tmp_path)
    assert found == labelled(build, texts)
    assert sum(len(one["spans"]) for one in found) > 50 and found[-1]["windows"] > 1
    manifest = json.loads((build / "model.json").read_text())
    manifest["texts"]["files"][CALIBRATION] = "0" * 64
    (build / "model.json").write_text(json.dumps(manifest))
    biases = {f"transition_bias_{name}": (i % 3 - 1) / 2 for i, name in enumerate(sorted(set(TRANSITIONS.values())))}
    points = {"operating_points": {"default": {"biases": biases}}}
    (build / "source" / CALIBRATION).write_text(json.dumps(points))
    led = swift(build, texts, tmp_path)
    assert led == labelled(build, texts) and led != found


def test_windows_over_a_long_text_are_exact(tmp_path: Path) -> None:
    demand_check()
    layers = ["sliding_attention"] * 3
    checkpoint = tiny_encoders.write_tiny("modernbert", tmp_path / "checkpoint", layer_types=layers)
    build = encoders.build(checkpoint, tmp_path / "build", buckets=[64])
    text = tiny.sample_text()[:3000]
    found = swift(build, [text], tmp_path)
    assert found == labelled(build, [text]) and found[0]["exact"] and found[0]["windows"] > 5


def test_shares_of_labels_are_those_of_the_python_runtime(tmp_path: Path) -> None:
    demand_check()
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint", "text-classification")
    build = encoders.build(checkpoint, tmp_path / "build", buckets=[64])
    expected = reading.classify(reading.load_reader(build, "fp32"), TEXTS)
    assert swift(build, TEXTS, tmp_path) == [pytest.approx(one.labels, abs=NEAR) for one in expected]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_embeddings_are_those_of_the_python_runtime(pooling: str, tmp_path: Path) -> None:
    demand_check()
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint", "feature-extraction")
    build = encoders.build(checkpoint, tmp_path / "build", buckets=[64])
    manifest = json.loads((build / "model.json").read_text()) | {"pooling": pooling}
    (build / "model.json").write_text(json.dumps(manifest))
    reader = reading.load_reader(build, "fp32")
    tokenizer = Tokenizer.from_file(str(build / "source" / "tokenizer.json"))
    expected = reading.embed(reader, [tokenizer.encode(text).ids for text in TEXTS])
    assert swift(build, TEXTS, tmp_path) == [pytest.approx(list(map(float, one)), abs=NEAR) for one in expected]
