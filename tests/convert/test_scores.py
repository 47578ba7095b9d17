"""Programs of fixed widths take queries in pieces where a product would have too many scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import coremltools as ct
import encoders
import limits
import numpy as np
import pytest
from models import tiny_encoders
from oracle import convert_plain
from portable_coreml.judge import limits as of_systems
from portable_coreml.judge.lint import lint

from shardmill.convert.stamped import by_function, convert_stamped
from shardmill.machine import load_programs_as
from shardmill.models import contract
from shardmill.models.caches import T
from shardmill.models.interface import FIXED, HOST, EntryPoints
from shardmill.models.part_kinds import inputs
from shardmill.plan import Part

from .small import layers_part, write_checkpoint

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]

MOST = 200  # scores, in place of 2^20
TOKENS = 16  # of a bucket
ENCODERS = ("modernbert", "openai_privacy_filter", "embedding_gemma2_text")  # one has a sink for each head


def encoder(model_type: str, folder: Path) -> tuple[Path, Part]:
    task = "token-classification" if model_type != "embedding_gemma2_text" else "feature-extraction"
    checkpoint = tiny_encoders.write_tiny(model_type, folder / "checkpoint", task)
    source, parts, _ = encoders.parts_of(checkpoint, folder, buckets=[TOKENS])
    return source, parts[f"encoder_{TOKENS}"]


def decoder(folder: Path) -> tuple[Path, Part]:
    """Two layers with a function of one token and one of four, over 64 slots."""
    source = write_checkpoint(folder / "checkpoint")
    return source, layers_part(source, 1, 3).changed(calls=EntryPoints(FIXED, (1, 4), HOST))


def results(package: Path, part: Part, precision: str) -> dict[str, Any]:
    """What each function gives for random inputs, by function and output."""
    found: dict[str, Any] = {}
    for name, spec in (dict(by_function(part.spec)) or {"": part.spec}).items():
        generator = np.random.default_rng(0)
        shapes = {key: [spec.tokens if n == T else n for n in shape] for key, shape in inputs(spec).items()}
        given = {key: generator.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
        with load_programs_as(precision):
            model = ct.models.MLModel(str(package), function_name=name or None)
            found |= {f"{name}.{key}": value for key, value in model.predict(given).items()}
    return found


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine compute few scores rightly."""
    monkeypatch.setattr(contract, "MOST_SCORES", MOST)
    monkeypatch.setattr(of_systems, "SCORES", tuple(replace(limit, most=MOST) for limit in of_systems.SCORES))


@pytest.mark.parametrize("model", [*ENCODERS, "phi3"])
def test_queries_in_pieces_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """To the bit where a row's sums do not depend on the other rows, which is in fp16; and no product is too large."""
    source, part = decoder(tmp_path) if model == "phi3" else encoder(model, tmp_path)
    convert_stamped(part, source, "fp16", tmp_path / "whole.mlpackage", tmp_path / "templates")
    few(monkeypatch)
    assert "S9" in {row.rule for row in lint(tmp_path / "whole.mlpackage")}
    convert_stamped(part, source, "fp16", tmp_path / "pieces.mlpackage", tmp_path / "others")
    assert "S9" not in {row.rule for row in lint(tmp_path / "pieces.mlpackage")}
    whole, pieces = (results(tmp_path / f"{name}.mlpackage", part, "fp16") for name in ("whole", "pieces"))
    assert whole.keys() == pieces.keys()
    assert all(np.array_equal(whole[name], pieces[name]) for name in whole)
    exact, cut = (results(tmp_path / f"{name}.mlpackage", part, "fp32") for name in ("whole", "pieces"))
    for name in exact:
        width = exact[name].shape[1]
        limits.numbers_agree(name, cut[name], exact[name], limits.sums("fp32", width, 64))


@pytest.mark.parametrize("model", ["openai_privacy_filter", "phi3"])
def test_pieces_are_those_that_coremltools_converts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Byte for byte, whole programs by coremltools alone."""
    few(monkeypatch)
    source, part = decoder(tmp_path) if model == "phi3" else encoder(model, tmp_path)
    convert_plain(part, source, "fp16", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "fp16", tmp_path / "stamped.mlpackage", tmp_path / "templates")
    plain, stamped = (
        {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
        for folder in (tmp_path / "plain.mlpackage", tmp_path / "stamped.mlpackage")
    )
    assert plain == stamped
