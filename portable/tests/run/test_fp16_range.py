"""The fp16 range audit of one program."""

from __future__ import annotations

import torch
from portable_coreml.files.read_text import read_text
from portable_coreml.run.fp16_range import RangeAudit

MASKED = """program(1.3){ func main<ios18>(tensor<fp16, [1, 4]> mask, tensor<fp16, [2, 4]> x) {
    tensor<fp16, [2, 4]> both = concat(axis = int32(0), interleave = bool(false), values = (mask, mask));
    tensor<fp16, [2, 4]> mixed = concat(axis = int32(0), interleave = bool(false), values = (mask, x));
    tensor<fp16, [2, 4]> y = add(x = x, y = both);
    tensor<fp16, [2, 4]> z = add(x = x, y = x);
} -> (y); }"""


def test_the_worst_of_all_predictions_is_kept() -> None:
    """Largest magnitude over calls, headroom to 65504, overflows counted, with the prediction of the first."""
    audit = RangeAudit()
    for value in (2.0, -32752.0, 1.0):
        audit.begin({})
        audit("a", "mul", torch.tensor([value, 0.5]))
        audit("b", "add", torch.tensor([float("inf") if value < 0 else value]))
    first, second = audit.rows()
    assert (first.largest, first.headroom, first.overflows, first.first) == (32752.0, 2.0, 0, None)
    assert (second.overflows, second.largest, second.first) == (1, 2.0, 1)


def test_entries_that_a_mask_hides_do_not_count() -> None:
    """The mask itself and copies of it have no row; a sum with one counts where it is 0; other sums count whole."""
    audit = RangeAudit(read_text(MASKED).functions["main"], ["mask"])
    mask, x = torch.tensor([[0.0, -1e4, 0.0, -1e4]]), torch.tensor([[1.0, 2.0, -3.0, 40.0]]).repeat(2, 1)
    both = mask.repeat(2, 1)
    audit.begin({"mask": mask})
    audit("both", "concat", both)
    audit("mixed", "concat", torch.cat([mask, x[:1]]))
    audit("y", "add", x + both)
    audit("z", "add", x + x)
    assert {row.output: row.largest for row in audit.rows()} == {"mixed": 1e4, "y": 3.0, "z": 80.0}


def test_an_overflow_that_a_mask_hides_does_not_count_either() -> None:
    """Where a slot is hidden, whatever the score was is lost anyway."""
    audit = RangeAudit(read_text(MASKED).functions["main"], ["mask"])
    mask = torch.tensor([[0.0, -1e4]])
    audit.begin({"mask": mask})
    audit("both", "concat", mask)
    audit("y", "add", torch.tensor([[1.0, float("-inf")]]))
    assert [row.overflows for row in audit.rows()] == [0]
    audit("y", "add", torch.tensor([[float("-inf"), 1.0]]))
    assert [(row.output, row.overflows, row.first) for row in audit.rows()] == [("y", 1, 0)]
