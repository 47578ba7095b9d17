"""Products in fixed point have the same bits by every kernel; a processor takes only those that are exact on it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator

import limits
import numpy as np
import pytest
import torch
from portable_coreml.run import fixed_point, products
from portable_coreml.run.fixed_point import FixedPoint, to_fixed_point
from portable_coreml.run.packed import Packed
from portable_coreml.run.stored import StoredMatrix
from torch import Tensor

OUT, IN = 192, 640


def matrix(size: int = IN) -> tuple[Tensor, Tensor]:
    """Random int8 values with the least among them, and scales."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randint(-128, 128, (OUT, size), dtype=torch.int8, generator=generator)
    return values, torch.rand(OUT, 1, generator=generator).add(0.1)


def rows(count: int, size: int = IN) -> Tensor:
    """Inputs of very different sizes, within a row and from one to the next."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(count, size, generator=generator) * torch.exp(2 * torch.randn(1, size, generator=generator))
    return x * 10.0 ** torch.arange(count)[:, None].remainder(5)


def fixed(x: Tensor) -> FixedPoint:
    found = to_fixed_point(x)
    assert found is not None
    return found


def sums(values: Tensor, scale: Tensor, x: FixedPoint) -> Tensor:
    """Return the product by whole numbers, which Python does not round, and one rounding at the end."""
    whole = values.numpy().astype(object) @ x.integers.astype(object).T  # [out, n]
    exact = torch.from_numpy(whole.astype(np.float64) * np.exp2(x.exponent.astype(np.float64)))
    return (exact * scale.double()).float().t()


@pytest.fixture(params=["oneDNN", "FBGEMM", "float64"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each kernel, fast here or not, with pieces and blocks that end within the matrix."""
    if request.param == "FBGEMM" and not fixed_point.fbgemm_bits():
        pytest.skip("this processor has no FBGEMM")
    if request.param == "oneDNN" and not fixed_point.int8_products_are_exact():
        pytest.skip("this processor's int8 products are not exact")
    monkeypatch.setattr(fixed_point, "vnni_is_used", lambda: request.param == "oneDNN")
    monkeypatch.setattr(fixed_point, "packs", lambda: request.param == "FBGEMM")
    monkeypatch.setattr(fixed_point, "EARNED", 0)
    monkeypatch.setattr(fixed_point, "TILE", 3)
    for name in ("_PIECE", "_BLOCK"):
        monkeypatch.setattr(fixed_point, name, 70 * IN)
    yield request.param


@pytest.mark.parametrize("size", [IN, IN - 1, 2100])
def test_each_kernel_gives_the_bits_of_whole_numbers(kernel: str, size: int) -> None:
    """For every number of rows, and for an odd length, which kernels pad."""
    (values, scale), x = matrix(size), rows(8, size)
    for count in (1, 2, 3, 5, 8):
        some = fixed(x[:count])
        found = fixed_point.fixed_point_product(values, scale, Packed(), some)
        assert torch.equal(found, sums(values, scale, some)), count


@pytest.mark.parametrize("value", [-128, 127])
def test_sums_that_float32_does_not_hold_are_exact_too(kernel: str, value: int) -> None:
    """A row of equal numbers against equal weights: all its digits' products have one sign."""
    values, scale = torch.full((OUT, 4099), value, dtype=torch.int8), torch.full((OUT, 1), 0.3)
    for number in (0.9999999, -0.9921875, 0.123456789):
        x = fixed(torch.full((2, 4099), number))
        found = fixed_point.fixed_point_product(values, scale, Packed(), x)
        assert torch.equal(found, sums(values, scale, x)), number


def test_a_matrix_held_by_columns_gives_the_same(kernel: str) -> None:
    """As the weight of matmul(x, y) is: [in, out]."""
    (values, scale), x = matrix(), fixed(rows(3))
    found = fixed_point.fixed_point_product(values.t().contiguous().t(), scale, Packed(), x)
    assert torch.equal(found, sums(values, scale, x))


@pytest.mark.parametrize("bits", [7, 8])
def test_digits_make_the_integer(bits: int) -> None:
    """Also the largest and the least one; each digit fits its bits."""
    edge = np.array([[1 << 30, -(1 << 30), 0, 1, -1, (1 << 30) - 1, 127, 128, -128, -129, 64, -65]], np.int32)
    found = FixedPoint(edge, np.array([0]))
    digits, weights = found.digits(bits), found.weights(bits)
    assert digits.min() >= -(1 << bits - 1) and digits.max() < 1 << bits - 1
    np.testing.assert_array_equal((weights.numpy()[0] @ digits[0]), edge.astype(np.float64))


def test_rows_in_fixed_point_are_as_near_as_31_bits_allow() -> None:
    """Half a unit of the last place, of the row's largest number."""
    x = rows(6)
    found = fixed(x)
    back = found.integers * np.exp2(found.exponent.astype(np.float64))[:, None]
    nearest = np.abs(x.double().numpy()).max(1) * 2.0**-30
    assert (np.abs(back - x.double().numpy()).max(1) <= nearest).all()
    assert np.abs(found.integers).max(1).min() >= 1 << 29


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_has_no_fixed_point(value: float) -> None:
    x = rows(3)
    x[1, 5] = value
    assert to_fixed_point(x) is None
    assert to_fixed_point(x[:0]) is None and to_fixed_point(torch.zeros(1, (1 << 16) + 1)) is None


def test_a_copy_is_made_once_it_is_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is run once or twice shall not wait for it, nor a wide pass have any use for it."""
    if not fixed_point.fbgemm_bits():
        pytest.skip("this processor has no FBGEMM")
    monkeypatch.setattr(fixed_point, "packs", lambda: True)
    (values, scale), packed = matrix(), Packed()
    found = []
    for turn in range(fixed_point.EARNED + 2):
        found.append(fixed_point.fixed_point_product(values, scale, packed, fixed(rows(1))))
        assert bool(packed.pieces) is (turn >= fixed_point.EARNED)
    assert all(torch.equal(found[0], other) for other in found)
    other = Packed()
    for _ in range(fixed_point.EARNED + 2):
        fixed_point.fixed_point_product(values, scale, other, fixed(rows(fixed_point.FEW + 1)))
    assert not other.pieces


@pytest.mark.parametrize("waits", ["oneDNN", "FBGEMM"])
def test_the_kernel_is_chosen_by_the_processors_time_alone(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that others keep busy a kernel may wait for long, whichever is the faster one."""
    monkeypatch.setattr(fixed_point, "vnni_is_used", lambda: True)
    monkeypatch.setattr(fixed_point, "fbgemm_bits", lambda: 8)
    monkeypatch.setattr(fixed_point, "_pack", lambda values: ())

    def way(name: str) -> None:
        if name == waits:
            time.sleep(0.02)
        else:
            end = time.thread_time() + 0.002
            while time.thread_time() < end:
                pass

    monkeypatch.setattr(fixed_point, "_by_onednn", lambda *_: way("oneDNN"))
    monkeypatch.setattr(fixed_point, "_by_fbgemm", lambda *_: way("FBGEMM"))
    fixed_point.packs.cache_clear()
    try:
        assert fixed_point.packs() is (waits == "FBGEMM")
    finally:
        fixed_point.packs.cache_clear()


def test_wide_passes_take_fixed_point_only_with_vnni(monkeypatch: pytest.MonkeyPatch) -> None:
    m = StoredMatrix(*matrix(), half=False)
    for vnni, bits, few, many in ((True, 0, True, True), (False, 7, True, False), (False, 0, False, False)):
        monkeypatch.setattr(fixed_point, "vnni_is_used", lambda answer=vnni: answer)
        monkeypatch.setattr(fixed_point, "fbgemm_bits", lambda answer=bits: answer)
        assert products.takes_fixed_point(m, fixed_point.FEW) is few
        assert products.takes_fixed_point(m, fixed_point.FEW + 1) is many
        assert not products.takes_fixed_point(StoredMatrix(m.values, m.scale, half=True), 1)
        assert not products.takes_fixed_point(StoredMatrix(m.values.half(), None, half=False), 1)
        assert not products.takes_fixed_point(m.values.float(), 1)


def test_a_plain_loop_over_int8_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has no int8 kernel where VNNI is missing, and its loop made a model 4 to 160 times slower there."""
    monkeypatch.setattr(fixed_point, "int8_products_are_exact", lambda: True)
    monkeypatch.setattr(fixed_point, "int8_products_are_fast", fixed_point.int8_products_are_fast.__wrapped__)
    for has_vnni in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda answer=has_vnni: answer)
        assert fixed_point.vnni_is_used.__wrapped__() is has_vnni


@pytest.mark.thorough(but=["AVX2"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have no int8 products that saturate")
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE_VNNI"])
def test_int8_products_that_saturate_are_not_taken(instructions: str) -> None:
    """Without VNNI oneDNN's int8 product is wrong for large values, or slow: it is left alone."""
    code = (
        "import torch; from portable_coreml.run import fixed_point, products\n"
        "from portable_coreml.run.stored import StoredMatrix\n"
        "q = torch.full((512, 4096), 127, dtype=torch.int8); x = torch.full((4096, 4), 1.0);"
        "m = StoredMatrix(q, torch.ones(512, 1), False)\n"
        "right = all(bool((products.product(m, x, False) == 127 * 4096).all()) for _ in range(4))\n"
        "print(fixed_point.vnni_is_used(), right)"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": instructions}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    vnni_is_used, is_right = run.stdout.split()
    assert is_right == "True", "a sum saturated"
    assert instructions != "AVX2" or vnni_is_used == "False"
    assert "Warning" not in run.stderr, run.stderr.splitlines()[0]


def test_a_product_is_nearer_than_float32_s(kernel: str) -> None:
    (values, scale), x = matrix(), rows(5)
    exact = x.double() @ (values.double() * scale.double()).t()

    def error(found: Tensor) -> float:
        return float(((found.double() - exact).norm(dim=1) / exact.norm(dim=1)).max())

    found = error(fixed_point.fixed_point_product(values, scale, Packed(), fixed(x)))
    limits.agrees("the product", found, limits.sums("fp32", IN))
    assert found < error(x @ (values.float() * scale).t())
