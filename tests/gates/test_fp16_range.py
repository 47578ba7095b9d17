"""The fp16 audit of a built model: every operation of every layer, masks left out, the first overflow found."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
from models.tiny_families import write_tiny
from safetensors.torch import load_file, save_file

from shardmill import machine
from shardmill.commands.quality import range_summary
from shardmill.errors import ShardmillError
from shardmill.gates.nonfinite import LayerRangeRow, audit_values, first_to_leave, ranges_by_layer, worst
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place


@pytest.fixture
def engine(built: tiny.Build) -> Engine:
    """The small model in fp16 mode."""
    if not machine.is_portable():
        pytest.skip("looks inside the portable engine, which does not run on a Mac")
    with machine.load_programs_as("fp16"):
        return Engine(in_place(built.plan, built.packages, built.table), Path("/"))


def test_the_engine_is_not_watched_afterwards(engine: Engine, built: tiny.Build) -> None:
    """Watched passes are interpreted, which is slow; a pass that fails leaves nobody watching either."""
    audit_values(engine, built.text[:4])
    assert [program.around for program in engine.programs] == [nullcontext] * len(engine.programs)
    with pytest.raises(ShardmillError, match="token 1000000 is beyond the vocabulary"):
        audit_values(engine, [10**6] * 4)
    assert [program.around for program in engine.programs] == [nullcontext] * len(engine.programs)


def test_a_sound_model_stays_in_fp16(engine: Engine, built: tiny.Build) -> None:
    """Every program and layer has a row; the mask's -1e4 is in none of them, what is next to it is."""
    rows = audit_values(engine, built.text[:10])
    assert {row.program for row in rows} == set(built.packages)
    assert [row.layer for row in ranges_by_layer(rows)] == [None, 0, 1, None, 2, None, 3, None, None]
    assert not any(row.leaves for row in rows)
    assert min(row.headroom for row in rows) > 100
    before = {place: [row for row in rows[:place] if row.kind == "add"] for place, row in enumerate(rows)}
    scores = [before[place][-1] for place, row in enumerate(rows) if row.kind == "softmax"]  # with the mask added
    assert len(scores) == tiny.LAYERS
    assert all(row.largest > 0.5 for row in scores)
    assert "all stay in fp16" in range_summary(rows, 10, first_to_leave(rows))


def test_the_first_overflow_is_told(engine: Engine, built: tiny.Build) -> None:
    """A token whose embedding left fp16 already, fed in the second pass: the first operation of layer 0, from there."""
    values, (marked, plain) = engine.table.values.copy(), (7, 5)
    values[marked] = np.inf
    engine.table = replace(engine.table, values=values)
    rows = audit_values(engine, [plain] * 6 + [marked, plain])
    first = first_to_leave(rows)
    assert first is not None
    assert (first.layer, first.first) == (0, 4)  # passes of four tokens: the second one starts at token 4
    assert worst(rows)[0].nans
    assert "leave fp16, first" in range_summary(rows, 8, first)
    assert "layer 0" in range_summary(rows, 8, first)


@pytest.mark.slow
@pytest.mark.skipif(not machine.is_portable(), reason="looks inside the portable engine, which does not run on a Mac")
@pytest.mark.parametrize("model_type", ["apertus", "nemotron"])
def test_an_mlp_that_squares_what_it_reads_is_named(model_type: str, tmp_path: Path) -> None:
    """A number over 256, squared, is infinite in fp16; no scale of the residual stream helps, as norms undo it."""
    checkpoint = write_tiny(model_type, tmp_path / "checkpoint")
    loud = "model.layers.1.mlp.up_proj.weight"
    for file in checkpoint.glob("*.safetensors"):
        tensors = load_file(file)
        save_file(tensors | {name: t * 200 for name, t in tensors.items() if name == loud}, file, {"format": "pt"})
    built = tiny.converted(tiny.fetched(checkpoint, tmp_path / "source"), tmp_path, topology="auto", head={"slices": 1})
    with machine.load_programs_as("fp16"):
        engine = Engine(in_place(built.plan, built.packages, built.table), Path("/"))
    rows = audit_values(engine, [5, 77, 130, 9])
    first = first_to_leave(rows)
    assert first is not None and (first.layer, first.kind, first.first) == (1, "mul", 0)
    assert max(row.largest for row in rows[: rows.index(first)] if row.kind == "maximum") > 256


def test_the_earliest_pass_decides_then_the_order_of_operations() -> None:
    """Later operations that failed earlier in the text come first."""

    def row(output: str, first: int | None) -> LayerRangeRow:
        return LayerRangeRow("p", 0, "add", output, 1.0, 2.0, int(first is not None), 0, first)

    rows = [row("a", 8), row("b", 4), row("c", 4), row("d", None)]
    found = first_to_leave(rows)
    assert found is not None
    assert found.output == "b"
