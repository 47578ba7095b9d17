"""The precision "ane" against what its sources publish: each figure is theirs, and named after it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from portable_coreml.files.read_text import read_text
from portable_coreml.program import Blob, Value
from portable_coreml.run.ane import DEFAULT, OPTIONS, fixed_sums, options_of, table
from portable_coreml.run.execute import Executable
from torch import Tensor

LINE = "program(1.3){{ func main<ios18>(tensor<fp16, [1, {n}, 1, 1]> x) {{ {line} }} -> (y); }}"
CODES, SCALE = np.array([[100, 100], [1, -3]], np.int8), np.array([[0.5], [0.01]], np.float16)
CONV = (
    "tensor<fp16, [2, 2, 1, 1]> w = constexpr_blockwise_shift_scale("
    'data = tensor<int8, [2, 2, 1, 1]>(BLOBFILE(path = string("w"), offset = uint64(0))), '
    'scale = tensor<fp16, [2, 1, 1, 1]>(BLOBFILE(path = string("w"), offset = uint64(1)))); '
    "tensor<fp16, [1, 2, 1, 1]> y = conv(x = x, weight = w, strides = tensor<int32, [2]>([1, 1]), pad_type = string("
    '"valid"), pad = tensor<int32, [4]>([0, 0, 0, 0]), dilations = tensor<int32, [2]>([1, 1]), groups = int32(1));'
)


def loaded(line: str, precision: str, n: int = 2) -> Executable:
    def load(value: Value) -> np.ndarray:
        if not isinstance(value.data, Blob):
            return np.asarray(value.data)
        stored = (CODES, SCALE)[value.data.offset]
        return stored.reshape([size or 0 for size in value.type.shape])  # type: ignore[union-attr]

    return Executable(read_text(LINE.format(n=n, line=line)).functions["main"], load, precision)


def run(line: str, values: list[float], precision: str) -> list[float]:
    """Results of the first run, which interprets, and of the second, which is planned: the same."""
    program, x = loaded(line, precision, len(values)), torch.tensor(values)[None, :, None, None]
    (first,), (second,) = program.run({"x": x}, {}), program.run({"x": x}, {})
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    return [float(value) for value in first.flatten()]


def elementwise(op: str, n: int) -> str:
    return f"tensor<fp16, [1, {n}, 1, 1]> y = {op};"


def error(op: str, exact: Tensor, x: Tensor) -> Tensor:
    found = run(elementwise(f"{op}(x = x)", len(x)), x.tolist(), "ane:tables")
    return (torch.tensor(found).double() - exact).abs()


X = torch.arange(-12, 12, 2**-6)


@pytest.mark.parametrize(("op", "published"), [("silu", 1.491e-2), ("sigmoid", 3.355e-3), ("tanh", 1.613e-3)])
def test_the_largest_error_of_a_table_is_the_published_one(op: str, published: float) -> None:
    """751K, M6 report, data/06_numerics/f3_lut_m6.txt: within a fifth."""
    exact = getattr(torch.nn.functional, op)(X.double())
    assert float(error(op, exact, X).max()) == pytest.approx(published, rel=0.2)


def test_the_table_of_silu_has_the_published_number() -> None:
    """751K, notes/numerics.md, F3b: 0.296 at 0.5, where silu is 0.311; and 33 numbers from -8 to 8."""
    first, step, numbers = table("silu")
    assert (first, step, len(numbers), float(numbers[16])) == (-8.0, 0.5, 33, 0.0)
    assert round(float(numbers[17]), 3) == 0.296


def test_silu_is_off_as_far_as_published_and_from_tanh_it_is_not() -> None:
    """Forge, ANE_DELTANET_NUMERICS.md: 5 to 6 % where the median magnitude is 0.1, and 0.14 % from tanh."""
    drawn = torch.distributions.Laplace(0.0, 0.144).icdf(torch.linspace(0.0005, 0.9995, 1000)).half()
    x, exact = drawn.float(), torch.nn.functional.silu(drawn.double())
    half = "tensor<fp16, [1, 1000, 1, 1]> h = mul(x = x, y = fp16(0x1p-1)); "
    tanh = elementwise("tanh(x = h)", 1000).replace("> y =", "> t =") + " "
    tanh += elementwise("add(x = t, y = fp16(0x1p+0))", 1000).replace("> y =", "> s =") + " "
    lines = elementwise("silu(x = x)", 1000), half + tanh + elementwise("mul(x = h, y = s)", 1000)
    native, spelled = (torch.tensor(run(line, x.tolist(), "ane:tables")).double() for line in lines)
    off = [float((found - exact).norm() / exact.norm()) for found in (native, spelled)]
    assert 0.055 / 2 < off[0] < 0.055 * 2 and off[1] < 0.0014


FIXED = {  # 751K, notes/numerics.md: inputs, weights, what the device gives
    "the largest number": ([32752.0], [1.0], 32752.0),
    "over the range": ([16384.0, 16384.0], [1.0, 1.0], np.inf),
    "half of the least": ([2.0**-17], [1.0], 2.0**-16),
    "a quarter of the least": ([2.0**-18], [1.0], 0.0),
    "dropped by its exponents": ([1.875 * 2.0**-14], [1.875 * 2.0**-3], 0.0),
    "kept by its exponents": ([1.5 * 2.0**-13], [0.125], 2.0**-15),
    "a subnormal, kept": ([0.5 * 2.0**-14], [0.25], 2.0**-16),
    "a subnormal, dropped": ([0.984375 * 2.0**-14], [0.2], 0.0),
}


@pytest.mark.parametrize("case", FIXED)
def test_sums_are_the_published_ones(case: str) -> None:
    x, weights, published = FIXED[case]
    assert float(fixed_sums(torch.tensor([x]).half(), torch.tensor(weights).half()[:, None])[0, 0]) == published


@pytest.mark.parametrize(("factor", "published"), [(1, 0.0395), (16, 0.0022), (64, 0.0006)])
def test_small_probabilities_lose_about_what_is_published(factor: int, published: float) -> None:
    """cadamcat, attention-product-precision: the emulation finds half of the error, and factors help it as much."""
    generator = torch.Generator().manual_seed(0)
    p = (0.000244 + 0.000004 * torch.rand(2, 4096, generator=generator)).half()
    v = torch.randn(4096, 8, generator=generator).half()
    found = fixed_sums(p * factor, v).half().double() / factor
    exact = p.double() @ v.double()
    assert published / 2.5 < float((found - exact).norm() / exact.norm()) < published


def test_very_small_products_are_all_lost() -> None:
    """cadamcat, attention-product-precision: zeros for values of 0.0005."""
    assert not fixed_sums(torch.full((1, 4096), 2.0**-12).half(), torch.full((4096, 1), 0.0005).half()).any()


def test_scales_come_after_the_sums() -> None:
    """Sums of codes, not results, leave the range; with scales first they do not."""
    assert run(CONV, [200.0, 200.0], "fp16") == run(CONV, [200.0, 200.0], "ane:scales") == [20000.0, -4.0]
    assert run(CONV, [200.0, 200.0], "ane:sums,scales") == [np.inf, -4.0]
    assert run(CONV, [200.0, 200.0], "ane:sums")[0] == 20000.0


def test_subnormal_results_are_zero_only_if_asked() -> None:
    line = elementwise("mul(x = x, y = fp16(0x1p-2))", 2)
    assert run(line, [2.0**-13, 2.0**-12], "ane") == [2.0**-15, 2.0**-14]
    assert run(line, [2.0**-13, 2.0**-12], "ane:subnormals") == [0.0, 2.0**-14]


def test_values_that_are_no_numbers_stay_so() -> None:
    for op in ("silu", "sigmoid", "tanh"):
        high, low, none = run(elementwise(f"{op}(x = x)", 3), [np.inf, -np.inf, np.nan], "ane")
        assert (high, low) == {"silu": (np.inf, 0.0), "sigmoid": (1.0, 0.0), "tanh": (1.0, -1.0)}[op] and np.isnan(none)


def test_an_option_alone_changes_what_it_names() -> None:
    assert options_of("ane") == DEFAULT < OPTIONS.keys() and options_of("ane:tables") == {"tables"}
    assert options_of("fp16") == options_of("fp32") == frozenset()
    assert run(elementwise("silu(x = x)", 1), [0.25], "ane:sums") == run(elementwise("silu(x = x)", 1), [0.25], "fp16")


@pytest.mark.parametrize("precision", ["fp8", "ane:table", "fp16:tables", "ane:tables,"])
def test_what_there_is_not_is_refused(precision: str) -> None:
    with pytest.raises(ValueError, match="precision"):
        options_of(precision)
