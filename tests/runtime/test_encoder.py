"""An encoder in a chain of programs gives what it gives as one program: the same numbers to the last bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import encoders
import numpy as np
import pytest
from models import tiny_encoders

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import ShardmillError
from shardmill.files import write_json
from shardmill.machine import is_portable, load_programs_as
from shardmill.runtime.encoder import Encoder, load_encoder
from shardmill.runtime.label import Reader, label
from shardmill.runtime.manifest import ENCODER, bucket_of, read_manifest

BUCKETS = [8, 32]
COUNTS = 1, 2, 4  # of programs, as far as there are layers
TEXTS = ["Anna Kovalenko, 14 Harbour Street", "x", "anna.k@example.org or +44 20 7946 0958"]


def built(folder: Path, model_type: str, **changes: Any) -> dict[int, Path]:
    """Builds of a checkpoint by the number of programs for each bucket."""
    checkpoint = tiny_encoders.write_tiny(model_type, folder / "ck", **changes)
    layers = tiny_encoders.tiny_config(model_type, **changes).get_text_config().num_hidden_layers
    builds = {}
    for count in (count for count in COUNTS if count <= layers):
        ends = [layers * place // count for place in range(count + 1)]
        topology = {"topology": [*pairwise(ends)]} if count > 1 else {}
        builds[count] = encoders.build(checkpoint, folder / f"in {count}", "int8", buckets=BUCKETS, **topology)
    return builds


@pytest.fixture(
    scope="module",
    params=[pytest.param(count, marks=pytest.mark.thorough) for count in (2, 4)],
    ids="{} layers".format,
)
def filters(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A privacy filter in 1, 2 and, with four layers, 4 programs."""
    return built(tmp_path_factory.mktemp("filter"), "openai_privacy_filter", num_hidden_layers=request.param)


@pytest.fixture(scope="module", params=["bert", "modernbert", "gemma3_text", "embedding_gemma2"])
def others(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Three layers of another family, in 1 and 2 programs."""
    return built(tmp_path_factory.mktemp("other"), request.param)


def rows(build: Path, precision: str) -> list[np.ndarray]:
    """Rows of texts that fill a bucket, that do not, and that share one."""
    with load_programs_as(precision):
        encoder = Encoder(json.loads((build / "model.json").read_text()), build)
    text = tiny_encoders.tiny_text(max(BUCKETS))
    alone = [encoder.run(text[:count], bucket) for bucket in BUCKETS for count in (1, bucket - 3, bucket)]
    return alone + encoder.run_together([text[:5], text[5:7], text[7:20]])


def equal_to_one_program(builds: Mapping[int, Path]) -> None:
    for precision in ("fp32", "fp16") if is_portable() else ("fp16",):
        one = rows(builds[1], precision)
        for count in builds.keys() - {1}:
            found = rows(builds[count], precision)
            assert all(np.array_equal(got, want) for got, want in zip(found, one, strict=True)), (precision, count)


def test_a_privacy_filter_in_parts_gives_the_same_bits(filters: dict[int, Path]) -> None:
    equal_to_one_program(filters)


@pytest.mark.slow
def test_every_family_in_parts_gives_the_same_bits(others: dict[int, Path]) -> None:
    equal_to_one_program(others)


def test_spans_of_a_chain_are_those_of_one_program(filters: dict[int, Path]) -> None:
    def spans(build: Path) -> list[Any]:
        encoder: Any = load_encoder(build)
        reader = Reader(encoder, read_tokenizer(build / encoder.manifest["tokenizer"]["path"]))
        return [label(reader, text).spans for text in TEXTS]

    found = {count: spans(build) for count, build in filters.items()}
    assert all(one == found[1] for one in found.values()) and any(found[1])


def test_a_chain_is_a_feature_that_older_versions_refuse(filters: dict[int, Path]) -> None:
    used = {count: read_manifest(build, ENCODER)["uses"] for count, build in filters.items()}
    assert used == {1: []} | dict.fromkeys(used.keys() - {1}, ["encoder-chain"])
    manifest = read_manifest(filters[2], ENCODER)
    half = max(filters) // 2
    assert [part["name"] for part in manifest["parts"]] == [
        f"encoder_{n}_{ends}" for n in BUCKETS for ends in (f"00_{half:02d}", f"{half:02d}_{2 * half:02d}")
    ]
    assert [bucket_of(manifest, part) for part in manifest["parts"]] == [8, 8, 32, 32]


@pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2, 3], [0, 0, 2, 3], [0, 2, 1, 3]])
def test_parts_that_are_no_chain_are_refused(filters: dict[int, Path], tmp_path: Path, order: list[int]) -> None:
    manifest = json.loads((filters[2] / "model.json").read_text())
    write_json(tmp_path / "model.json", manifest | {"parts": [manifest["parts"][place] for place in order]})
    with pytest.raises(ShardmillError, match="its parts are not a chain of layers for each bucket"):
        read_manifest(tmp_path, ENCODER)
