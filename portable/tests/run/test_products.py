"""Products with constant matrices: as exact as in float32, the same for every width, whatever the processor."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import limits
import pytest
import torch
from portable_coreml.run import products
from portable_coreml.run.stored import StoredMatrix
from torch import Tensor

OUT, IN = 192, 640
SUM = limits.sums("fp32", IN)


def matrix(half: bool = False) -> StoredMatrix:
    """Random int8 weights with scales that fp16 holds."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-128, 128, (OUT, IN), dtype=torch.int8, generator=generator)
    scale = torch.rand(OUT, 1, generator=generator).add(0.1).mul(0.01).half().float()
    return StoredMatrix(values, scale, half)


def columns(count: int = 5) -> Tensor:
    """Inputs of very different sizes, within a column and from one to the next."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(IN, count, generator=generator) * torch.exp(2 * torch.randn(IN, 1, generator=generator))
    return x * 10.0 ** torch.arange(count)


def exact(m: StoredMatrix, x: Tensor) -> Tensor:
    """The product in float64, its weights rounded where the matrix says so."""
    assert m.scale is not None
    weights = m.values.double() * m.scale.double()
    return (weights.half().double() if m.half else weights) @ x.double()


def error(found: Tensor, expected: Tensor) -> float:
    """The worst column's relative error."""
    return float(((found.double() - expected).norm(dim=0) / expected.norm(dim=0)).max())


@pytest.fixture(params=["fixed point", "in blocks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each of the two ways, whether this processor is fast at it or not; blocks are small."""
    monkeypatch.setattr(products, "takes_so_many", lambda count: request.param == "fixed point")
    monkeypatch.setattr(products, "BLOCK", 7 * IN)
    yield request.param


def test_a_product_is_that_of_the_expanded_matrix(way: str) -> None:
    """Within float32's rounding of it; in fixed point well below, outliers and all."""
    m, x = matrix(), columns()
    assert m.scale is not None
    found = products.product(m, x, steady=False)
    dense = error(m.values.float() * m.scale @ x, exact(m, x))
    limits.agrees("the expanded matrix", dense, SUM)
    limits.agrees("the product", error(found, exact(m, x)), SUM)
    assert way == "in blocks" or error(found, exact(m, x)) < dense


def test_a_column_does_not_depend_on_the_others(way: str) -> None:
    m, x = matrix(), columns(5)
    steady = way == "in blocks"  # digits are so in any case
    together = products.product(m, x, steady=steady)
    for width in (1, 2, 3, 4):
        assert torch.equal(products.product(m, x[:, :width], steady=steady), together[:, :width])


UNSTEADY: dict[str, Callable[[int], Tensor]] = {
    "among many": lambda n: torch.full((n, 1), float(n)),
    "in another place": lambda n: torch.arange(n).remainder(2).unsqueeze(1),
}


@pytest.mark.parametrize("kind", UNSTEADY)
def test_nor_where_blas_adds_up_a_row_in_another_way(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MKL's kernels without AVX do. Then each row is multiplied alone."""
    mm, called = torch.mm, list[int]()

    def unsteady(tokens: Tensor, rows: Tensor, *, out: Tensor | None = None) -> Tensor:
        called.append(len(tokens))
        found = mm(tokens, rows, out=out)
        return found.mul_(1 + UNSTEADY[kind](len(tokens)) * 2.0**-20)

    monkeypatch.setattr(torch, "mm", unsteady)
    assert not (steady := products.blas_is_steady.__wrapped__())
    monkeypatch.setattr(products, "blas_is_steady", lambda: steady)
    monkeypatch.setattr(products, "takes_so_many", lambda count: False)
    called.clear()
    x = columns(9)
    for held in (matrix(), matrix(half=True), products.by_columns(matrix().values.float())):
        together = products.product(held, x, steady=True)
        for width in (1, 3, 4, 5, 8):
            assert torch.equal(products.product(held, x[:, :width], steady=True), together[:, :width]), width
    assert called == []


@pytest.mark.parametrize("outputs", [1, 5, 6, 7, 9, 11, 15, 17])
def test_nor_where_outputs_are_few(outputs: int) -> None:
    x = columns(9)
    for held in (matrix().values[:outputs].float(), products.by_columns(matrix().values[:outputs].float())):
        together = products.product(held, x, steady=True)
        for first, end in ((0, 1), (1, 2), (1, 4), (2, 6), (3, 9)):
            assert torch.equal(products.product(held, x[:, first:end], steady=True), together[:, first:end]), first


def test_a_row_turned_into_a_column_is_one(way: str) -> None:
    """Its memory is the same; torch takes any stride of an axis of size 1 for contiguous."""
    m, x = matrix(), columns(1)
    turned = x.flatten()[None].t()
    assert turned.stride() == (1, IN) and turned.is_contiguous()
    assert torch.equal(products.product(m, turned, steady=False), products.product(m, x, steady=False))


def test_a_matrix_held_by_columns_gives_the_same(way: str) -> None:
    """As the weight of matmul(x, y) is: [in, out]."""
    m, x = matrix(), columns()
    turned = StoredMatrix(m.values.t().contiguous().t(), m.scale, m.half)
    limits.agrees("the product", error(products.product(turned, x, steady=False), exact(m, x)), SUM)


def test_fp16_mode_rounds_every_weight() -> None:
    """So the product is the rounded matrix's, which is another by more than float32's rounding."""
    m, x = matrix(half=True), columns()
    found = products.product(m, x, steady=True)
    limits.agrees("the product", error(found, exact(m, x)), SUM)
    assert error(found, exact(matrix(), x)) > 4 * SUM.value


def test_an_fp16_matrix_is_multiplied_as_it_is() -> None:
    values, x = torch.randn(OUT, IN, generator=torch.Generator().manual_seed(1)).half(), columns()
    found = products.product(StoredMatrix(values, None, half=True), x, steady=True)
    limits.agrees("the product", error(found, values.double() @ x.double()), SUM)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = columns(3)
    x[5, 1] = value
    found = products.product(matrix(), x, steady=False)
    assert not found[:, 1].isfinite().any()
    assert found[:, [0, 2]].isfinite().all()


def test_a_thread_s_memory_serves_a_wide_matrix_after_a_narrow_one() -> None:
    """The narrow product is made in inference mode, in which a program runs, and the wide one outside it."""
    sums: list[Tensor] = []

    def work() -> None:
        for size, inside in ((8, True), (3 * products.BLOCK, False), (8, True)):
            values = torch.arange(2 * size).remainder(7).to(torch.float16).view(2, size)
            with torch.inference_mode(inside):
                sums.append(products.product(StoredMatrix(values, None, half=True), torch.ones(size, 1), steady=False))
            sums.append(values.double().sum(1, keepdim=True))

    thread = threading.Thread(target=work)  # a new one keeps nothing yet
    thread.start()
    thread.join()
    assert len(sums) == 6
    for found, expected in zip(sums[::2], sums[1::2], strict=True):
        assert torch.equal(found.double(), expected)  # sums of small integers are exact


def test_zeros_and_the_ends_of_float32() -> None:
    """A column of zeros gives zeros; tiny and huge columns keep their digits."""
    m, x = matrix(), torch.zeros(IN, 4)
    x[:, 1:] = columns(1) / columns(1).abs().max()
    x[:, 2] *= 2.0**-85
    x[:, 3] *= 2.0**110
    found = products.product(m, x, steady=False)
    assert not found[:, 0].any()
    limits.agrees("tiny and huge columns", error(found[:, 1:], exact(m, x[:, 1:])), SUM)
    least = products.product(m, x[:, 1:2] * 2.0**-140, steady=False)
    assert float((least.double() - exact(m, x[:, 1:2] * 2.0**-140)).abs().max()) < 2.0**-100


def stored_forms() -> dict[str, StoredMatrix | Tensor]:
    """A matrix of several blocks, with a last one that is not full, in each form that a product takes."""
    generator = torch.Generator().manual_seed(6)
    values = torch.randint(-128, 128, (1500, 2100), dtype=torch.int8, generator=generator)
    scale = torch.rand(1500, 1, generator=generator).half().float()
    return {
        "int8 in fp32 mode": StoredMatrix(values, scale, half=False),
        "int8 in fp16 mode": StoredMatrix(values, scale, half=True),
        "int8 without scales": StoredMatrix(values, None, half=True),
        "int8 by columns": StoredMatrix(values.t().contiguous().t(), scale, half=True),
        "fp16": StoredMatrix(values.half(), None, half=True),
        "expanded": products.by_columns(values.float()),
    }


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    """A server chooses it by a stop-watch, and the same seed shall give the same tokens."""
    before, differing = torch.get_num_threads(), []
    for form, held in stored_forms().items():
        for width, steady in ((1, False), (1, True), (4, False), (5, True), (64, False), (64, True)):
            x, found = torch.randn(2100, width, generator=torch.Generator().manual_seed(7)), []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found.append(products.product(held, x, steady))
            torch.set_num_threads(before)
            if not all(torch.equal(found[0], other) for other in found[1:]):
                differing.append(f"{form}, {width} columns")
    assert not differing, f"other bits with another number of threads: {differing}"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="MKL's kernels can be chosen on x86_64 alone")
def test_nor_where_blas_cuts_products_for_its_threads() -> None:
    """MKL's oldest kernels, which any processor has, add up the rows at each cut in another order."""
    code = f"import runpy; runpy.run_path({__file__!r})['test_bits_do_not_depend_on_the_number_of_threads']()"
    environment = {
        **os.environ,
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr.splitlines()[-1]


@pytest.mark.parametrize("sizes", [(160, 96), (96, 256), (40, 64), (768, 512)])
def test_a_steady_product_with_a_tensor_is_the_same_for_every_width(sizes: tuple[int, int]) -> None:
    """In fp16 mode the last bits decide how a value is rounded, and so what is drafted and what is not."""
    generator = torch.Generator().manual_seed(2)
    weight = products.by_columns(torch.randn(*sizes, generator=generator))
    x = torch.randn(sizes[1], 4, generator=generator).half().float()
    together = products.product(weight, x, steady=True)
    limits.numbers_agree("the product", together, weight @ x, limits.sums("fp32", sizes[1]))
    for width in (1, 2, 3):
        assert torch.equal(products.product(weight, x[:, :width], steady=True), together[:, :width])


def test_by_columns_changes_the_memory_and_nothing_else() -> None:
    weight = torch.randn(6, 4, 1, 1)
    held = products.by_columns(weight)
    assert torch.equal(held, weight) and held.shape == weight.shape
    assert held.flatten(1).t().is_contiguous()
    assert products.by_columns(held).data_ptr() == held.data_ptr()
