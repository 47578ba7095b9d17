"""Products with fp16 weights: by the kernel or in blocks, as exact as in float32, and the same for every width."""

from __future__ import annotations

from collections.abc import Iterator

import limits
import pytest
import torch
from portable_coreml.run import fp16_weights, products
from portable_coreml.run.packed import Packed
from portable_coreml.run.stored import StoredMatrix
from torch import Tensor

OUT, IN = 192, 640
SUM = limits.sums("fp32", IN)


def matrix(largest: float = 0.01) -> StoredMatrix:
    """Random int8 weights, and scales with which no weight is an fp16 number before it is rounded."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8, generator=generator)
    scale = torch.rand(OUT, 1, generator=generator).add(0.1).mul(largest).half().float()
    return StoredMatrix(values, scale, half=True)


def fp16_matrix() -> StoredMatrix:
    values = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)).half()
    values[5], values[6, ::2] = 6e-8, 65504.0  # the least number, and the largest
    return StoredMatrix(values, None, half=False)


MATRICES = {"int8": matrix, "fp16": fp16_matrix}


def rows(count: int) -> Tensor:
    return torch.randn(count, IN, generator=torch.Generator().manual_seed(4))


def weights(m: StoredMatrix) -> Tensor:
    """The matrix in float64, its weights rounded."""
    return m.values.double() if m.scale is None else (m.values * m.scale).half().double()


@pytest.fixture(params=["kernel", "blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways, with pieces that end within the matrix."""
    if request.param == "kernel" and not fp16_weights.fp16_copies_are_right():
        pytest.skip("this processor has no FBGEMM")
    monkeypatch.setattr(fp16_weights, "fp16_copies_are_right", lambda: request.param == "kernel")
    monkeypatch.setattr(fp16_weights, "_PIECE", 70 * IN)
    monkeypatch.setattr(Packed, "is_mapped", True)
    yield request.param


@pytest.mark.parametrize("kind", MATRICES)
def test_a_product_is_as_exact_as_in_float32(way: str, kind: str) -> None:
    m, x = MATRICES[kind](), rows(6)
    found = products.product(m, x.t(), steady=True)
    assert bool(m.packed.pieces) is (way == "kernel")
    expected = weights(m) @ x.t().double()
    wrong = (found.double() - expected).norm(dim=1) / expected.norm(dim=1)  # by outputs, whose sizes differ
    limits.agrees("the product", float(wrong.max()), SUM)


@pytest.mark.parametrize("kind", MATRICES)
def test_a_row_does_not_depend_on_how_many_there_are_nor_on_how_often(way: str, kind: str) -> None:
    m, x = MATRICES[kind](), rows(67).t()
    together = products.product(m, x, steady=True)
    for count in (1, 2, 3, 4, 5, 6, 8, 32, 64):
        first, last = (products.product(m, some, steady=True) for some in (x[:, :count], x[:, -count:]))
        assert torch.equal(first, together[:, :count]) and torch.equal(last, together[:, -count:]), count
    assert torch.equal(products.product(m, x, steady=True), together)


def test_an_infinite_weight_stays_one(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's copy would hold the largest fp16 number in its place. That no copy can be made is found out once."""
    m, pack, asked = matrix(largest=1000.0), fp16_weights._pack, list[int]()
    monkeypatch.setattr(fp16_weights, "_pack", lambda *given: asked.append(1) or pack(*given))
    assert 0 < int(weights(m).isinf().any(1).sum()) < OUT
    found = products.product(m, torch.ones(IN, 1), steady=True)[:, 0]
    assert torch.equal(found.isfinite(), weights(m).isfinite().all(1))
    assert torch.equal(products.product(m, torch.ones(IN, 1), steady=True)[:, 0].isfinite(), found.isfinite())
    assert not m.packed.pieces and len(asked) == (way == "kernel")


def test_a_matrix_that_would_stay_beside_its_copy_has_none() -> None:
    """A palette's numbers are in memory already, in fp16, and jobs declare one copy of a weight."""
    m = fp16_matrix()
    products.product(m, rows(4).t(), steady=True)
    assert not m.packed.pieces


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_an_input_that_is_not_finite_spoils_its_own_row(way: str, value: float) -> None:
    x = rows(5)
    x[1, 7] = value
    found = products.product(fp16_matrix(), x.t(), steady=True)
    assert not found[:, 1].isfinite().any()
    assert found[:, [0, 2, 3, 4]].isfinite().all()


def test_a_kernel_that_adds_up_wrongly_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that torch no longer has."""
    asked = fp16_weights.fp16_copies_are_right.__wrapped__
    right = asked()
    multiplied = fp16_weights._multiplied
    monkeypatch.setattr(fp16_weights, "_multiplied", lambda x, piece: multiplied(x, piece).mul_(1 + 2.0**-20))
    assert not asked()

    def missing(x: Tensor, piece: object) -> Tensor:
        raise AttributeError

    monkeypatch.setattr(fp16_weights, "_multiplied", missing)
    assert not asked()
    monkeypatch.undo()
    assert asked() is right
