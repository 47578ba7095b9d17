"""What matrices cost does not depend on how many threads measure, and an error ends all of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import limits
import pytest
import torch
from safetensors import safe_open

from shardmill.plan import Part
from shardmill.precision import part_costs
from shardmill.precision.original import Original, original
from shardmill.precision.part_codes import write_part_codes
from shardmill.precision.part_costs import Costs, as_stored
from shardmill.precision.quantisers import QuantizedMatrix

from .cases import SLOTS, Case

THREADS = 3


def found(case: Case, part: Part, folder: Path, threads: int) -> dict[str, Any]:
    """The costs of a part's matrices; their codes are left in `folder`."""
    summary = {"prefix": case.prefix, "context": SLOTS, "architecture": {"tied": case.model.head is case.model.table}}
    codes = folder / f"{part.name}.safetensors"
    if not codes.exists():
        write_part_codes(part, case.source, case.model, case.edges, codes)

    def originals() -> Original:
        assert torch.get_num_threads() == 1  # of PyTorch's own, or sums would come out by their number
        return original(case.source, summary, often=True)

    return part_costs.part_costs(part, case.source, originals, case.edges, codes, folder, threads)


def alone(case: Case, part: Part, codes: Path) -> tuple[str, float]:
    """The first matrix of a part, and what it costs when nothing else runs."""
    m = next(case.matrices(part))
    with safe_open(codes, framework="pt") as stored:
        values = QuantizedMatrix(*(stored.get_tensor(f"{m.path}.int4.{name}") for name in ("codes", "scale"))).values
    with TemporaryFile() as spool:
        costs = Costs(case.model, m.before, m.index, spool)
        if part.kind == "head":
            return m.path, costs.of_head(m.before, part.start, values)
        return m.path, costs.of_layer(m.before, m.index, as_stored(m.blocks, values, case.source))


@pytest.mark.thorough(but=["phi3-layers", "phi3-head", "lfm2-layers"])
@pytest.mark.parametrize("place", [0, -1], ids=["layers", "head"])
def test_any_number_of_threads_finds_the_same(case: Case, tmp_path: Path, place: int) -> None:
    """To the bit, in the matrices' order; and what a matrix by itself costs."""
    part, before = case.parts[place], torch.get_num_threads()
    one, several = (found(case, part, tmp_path, threads) for threads in (1, THREADS))
    assert one == several and [*one] == [*several]
    path, kl = alone(case, part, tmp_path / f"{part.name}.safetensors")
    limits.numbers_agree("a matrix's cost", several[path]["kl"], kl, limits.sums("fp64", 1000))
    assert kl > 0
    assert torch.get_num_threads() == before


@pytest.mark.thorough(but=["phi3", "lfm2"])
def test_threads_share_what_is_mapped(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's pages count once; only the model without weights, whose parts change, is each thread's own."""
    used: list[Original] = []
    beside = Costs.beside
    monkeypatch.setattr(Costs, "beside", lambda costs, model: used.extend((costs.model, model)) or beside(costs, model))
    found(case, case.parts[0], tmp_path, 2)
    first, other = used
    assert first.head is other.head and first.table is other.table and first.weights is other.weights
    assert first.reference is not other.reference


@pytest.mark.thorough(but=["phi3", "lfm2"])
def test_what_goes_wrong_in_one_thread_ends_the_others(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fails(*_: object) -> float:
        asked.append(1)
        raise MemoryError("no room")

    part = max(case.parts, key=lambda part: len(part.tensors))
    monkeypatch.setattr(part_costs, "_cost", fails)
    with pytest.raises(MemoryError, match="no room"):
        found(case, part, tmp_path, 2)
    assert len(asked) <= 2 < len(list(case.matrices(part)))
