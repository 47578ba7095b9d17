"""What matrices cost does not depend on how many threads measure, and an error ends all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardmill.precision.original import original
from shardmill.precision.part_codes import write_part_codes
from shardmill.precision.part_costs import part_costs
from shardmill.precision.quantisers import Codes
from shardmill.precision.sensitivity import Costs, as_stored

from .cases import SLOTS, Case


def test_any_number_of_threads_finds_the_same(case: Case, tmp_path: Path) -> None:
    """To the bit, in the matrices' order; and as one matrix by itself costs."""
    summary = {"prefix": case.prefix, "context": SLOTS, "architecture": {"tied": case.model.head is case.model.table}}
    before = torch.get_num_threads()
    for part in (case.parts[0], case.parts[-1]):
        codes = tmp_path / f"{part.name}.safetensors"
        write_part_codes(part, case.source, case.model, case.edges, codes)
        made: list[int] = []

        def originals(made: list[int] = made) -> object:
            made.append(torch.get_num_threads())
            return original(case.source, summary)

        alone, several = (
            part_costs(part, case.source, originals, case.edges, codes, threads)  # type: ignore[arg-type]
            for threads in (1, 3)
        )
        assert alone == several and [*alone] == [*several] and alone
        assert {*made} == {1} and torch.get_num_threads() == before
        from safetensors import safe_open

        m = next(case.matrices(part))
        with safe_open(codes, framework="pt") as stored:
            values = Codes(*(stored.get_tensor(f"{m.path}.int4.{name}") for name in ("codes", "scale"))).values
        costs = Costs(case.model, m.before, m.index)
        single = (
            costs.of_head(m.before, part.start, values)
            if part.kind == "head"
            else costs.of_layer(m.before, m.index, as_stored(m.blocks, values, case.source))
        )
        assert several[m.path]["kl"] == pytest.approx(single, rel=1e-9) and single > 0


def test_what_goes_wrong_in_one_thread_is_raised(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part, codes = case.parts[0], tmp_path / "codes.safetensors"
    summary = {"prefix": case.prefix, "context": SLOTS, "architecture": {"tied": True}}
    write_part_codes(part, case.source, case.model, case.edges, codes)
    asked: list[int] = []

    def fails(*_: object) -> float:
        asked.append(1)
        raise MemoryError("no room")

    monkeypatch.setattr(Costs, "of_layer", fails)
    with pytest.raises(MemoryError, match="no room"):
        part_costs(part, case.source, lambda: original(case.source, summary), case.edges, codes, 2)
