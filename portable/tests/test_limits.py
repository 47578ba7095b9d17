"""The limits: what is right stays under a quarter in whatever order it sums, and each fault is beyond the limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import limits
import pytest
import torch
from torch import Tensor

WIDTH, LAYERS, TOKENS = 128, 4, 24
FORMATS = {"fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@pytest.fixture(autouse=True)
def unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong on purpose is not noted."""
    monkeypatch.delenv(limits.SEEN, raising=False)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def product(x: Tensor, weight: Tensor, order: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows times a matrix, each sum rounded after every addition, in this order of columns: no processor does worse."""
    x, weight = x.to(dtype), weight.to(dtype)
    total = torch.zeros(len(x), len(weight), dtype=dtype)
    for column in order.tolist():
        total = total + x[:, column, None] * weight[None, :, column]
    return total


def forwards(n: int) -> Tensor:
    return torch.arange(n)


def backwards(n: int) -> Tensor:
    return torch.arange(n).flip(0)


def shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(9))


ORDERS: list[Callable[[int], Tensor]] = [forwards, backwards, shuffled]


def network(
    x: Tensor, order: Callable[[int], Tensor], dtype: torch.dtype, eps: float = 1e-3, dropped: int = 0, half: int = -1
) -> Tensor:
    """Layers of norm, attention over the rows, norm and gated MLP, as a transformer has them, and a head.

    Args:
        x: rows [n, WIDTH].
        order: the order of sums.
        dtype: what everything is rounded to.
        eps: the norms' epsilon.
        dropped: so many columns of the last layer's first projection are left out.
        half: the layer whose results are rounded to fp16.
    """

    def normed(rows: Tensor) -> Tensor:
        return rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)

    def projected(rows: Tensor, seed: int, columns: int = WIDTH) -> Tensor:
        weight = draw(WIDTH, WIDTH, seed=seed) / WIDTH**0.5
        return product(rows, weight, order(WIDTH)[:columns], dtype)

    x = x.to(dtype)
    for layer in range(LAYERS):
        at, first = 8 * layer, WIDTH - (dropped if layer == LAYERS - 1 else 0)
        y = normed(x)
        q, k, v = projected(y, at, first), projected(y, at + 1), projected(y, at + 2)
        weights = torch.softmax(product(q / WIDTH**0.5, k, order(WIDTH), dtype), -1)
        x = x + projected(product(weights, v.T, order(TOKENS), dtype), at + 3)
        y = normed(x)
        x = x + projected(torch.nn.functional.silu(projected(y, at + 4)) * projected(y, at + 5), at + 6)
        x = x.half().to(dtype) if layer == half else x
    return projected(normed(x), 99)


SUM = {form: limits.sums(form, WIDTH) for form in FORMATS}
X, MATRIX = draw(TOKENS, WIDTH), draw(WIDTH, WIDTH, seed=1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMATS)
def test_a_right_sum_is_under_a_quarter_of_its_limit(form: str, order: Callable[[int], Tensor]) -> None:
    x, weight = (one.to(FORMATS[form]).double() for one in (X, MATRIX))
    found = product(x, weight, order(WIDTH), FORMATS[form])
    exact = x @ weight.T if form != "fp64" else product(x, weight, forwards(WIDTH), torch.float64)
    assert limits.error(found, exact) <= SUM[form].value / 4


@pytest.mark.parametrize("form", ["fp32", "fp64"])
@pytest.mark.parametrize("fault", ["dropped column", "narrower format", "operands in the narrower format"])
def test_a_wrong_sum_is_beyond_its_limit(form: str, fault: str) -> None:
    narrower = {"fp32": torch.float16, "fp64": torch.float32}[form]
    exact = X @ MATRIX.T
    found = {
        "dropped column": X[:, 1:] @ MATRIX[:, 1:].T,
        "narrower format": product(X, MATRIX, forwards(WIDTH), narrower),
        "operands in the narrower format": X.to(narrower).double() @ MATRIX.to(narrower).double().T,
    }[fault]
    with pytest.raises(AssertionError, match="times the limit"):
        limits.rows_agree(fault, found, exact, SUM[form])
    assert limits.error(found, exact) > 4 * SUM[form].value


def test_another_epsilon_is_beyond_the_limit_of_a_sum() -> None:
    """As it is beside numbers of the size of 1, which hide it best: half of the difference is all that shows."""

    def normed(eps: float) -> Tensor:
        return X * torch.rsqrt(X.square().mean(-1, keepdim=True) + eps)

    assert limits.error(normed(1e-3), normed(1e-5)) > 4 * SUM["fp32"].value
    assert limits.error(normed(1e-4), normed(1e-5)) > 4 * SUM["fp32"].value


@pytest.mark.parametrize("form", ["fp32", "fp64"])
def test_numbers_that_are_rounded_one_by_one(form: str) -> None:
    """A chain of four operations is under a quarter; another format or an approximation is beyond."""
    dtype, x = FORMATS[form], X.abs() + 0.1

    def chain(x: Tensor) -> Tensor:
        return (x * 1.7).sqrt() / 0.3 + 1

    limit = limits.roundings(form, 4)
    exact = chain(x.to(dtype).double()) if form == "fp32" else chain(x)
    other = chain(x.to(dtype)) if form == "fp32" else (x * 1.7) ** 0.5 * (1 / 0.3) + 1
    assert float(((other - exact).abs() / exact).max()) <= limit.value / 4
    narrower = {"fp32": torch.float16, "fp64": torch.float32}[form]
    for wrong in (chain(x.to(narrower)).double(), exact * (1 + 1e-5)):
        with pytest.raises(AssertionError, match="times the limit"):
            limits.numbers_agree("a chain", wrong, exact, limit, size=exact)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_a_right_model_is_under_a_quarter_of_its_limit(order: Callable[[int], Tensor]) -> None:
    """Against the same model in fp64, and against itself in another order."""
    limit = limits.model(LAYERS, WIDTH)
    found, exact = network(X, order, torch.float32), network(X, forwards, torch.float64)
    assert limits.error(found, exact) <= limit.value / 4
    assert limits.error(found, network(X, forwards, torch.float32)) <= limit.value / 4


FAULTS = {
    "an epsilon of 1e-5 in place of 1e-3": {"eps": 1e-5},
    "a dropped column": {"dropped": 1},
    "one layer in fp16": {"half": LAYERS - 1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_model_is_beyond_its_limit(fault: str) -> None:
    found = network(X, forwards, torch.float64, **FAULTS[fault])  # type: ignore[arg-type]
    assert limits.error(found, network(X, forwards, torch.float64)) > 4 * limits.model(LAYERS, WIDTH).value


def test_a_model_in_fp16_is_beyond_the_limit_of_a_measured_one() -> None:
    """However it amplifies: what moves fp32's roundings moves fp16's by 8,192 times as much."""
    exact = network(X, forwards, torch.float64)
    noise = 2.0**-17
    by = limits.error(network(X * (1 + noise * draw(*X.shape, seed=5)), forwards, torch.float64), exact)
    limit = limits.moved(by * limits.UNITS["fp32"] / noise, WIDTH)
    assert limits.error(network(X, shuffled, torch.float32), exact) <= limit.value / 4
    assert limits.error(network(X, forwards, torch.float16).double(), exact) > 4 * limit.value


def test_log_probabilities() -> None:
    """Of right logits they are under a quarter; without a label, in fp16 or at another temperature beyond."""
    logits, dropped = network(X, forwards, torch.float64), 7
    size = float(logits.square().mean().sqrt())
    limit = limits.logprobs(limits.model(LAYERS, WIDTH), size, WIDTH)
    exact = logits.log_softmax(-1)
    found = network(X, shuffled, torch.float32).log_softmax(-1)
    assert float((found - exact).abs().max()) <= limit.value / 4
    kept = [i for i in range(WIDTH) if i != dropped]
    for wrong, right in (
        (logits[:, kept].log_softmax(-1), exact[:, kept]),
        (logits.half().double().log_softmax(-1), exact),
        ((logits * 1.001).log_softmax(-1), exact),
    ):
        assert float((wrong - right).abs().max()) > 4 * limit.value
    assert limits.logprobs(limits.model(LAYERS, WIDTH), size, WIDTH, 5).value == pytest.approx(5 * limit.value)


def test_a_divergence() -> None:
    """Between logits and the same after one changed matrix: a second one that is left out is beyond."""
    logits = network(X, forwards, torch.float64)

    def kl(before: Tensor, after: Tensor) -> float:
        p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
        return float((p.exp() * (p - q)).sum(-1).mean())

    noise = 0.05 * draw(*logits.shape, seed=7)
    exact, size = kl(logits, logits + noise), float(logits.square().mean().sqrt())
    limit = limits.divergence(limits.model(LAYERS, WIDTH), size, exact)
    rounded = network(X, shuffled, torch.float32)
    assert abs(kl(rounded, rounded + noise.float()) / exact - 1) <= limit.value / 4
    assert abs(kl(logits, logits + 0.9 * noise) / exact - 1) > 4 * limit.value


def test_a_limit_grows_with_formats_sums_and_depth() -> None:
    assert limits.sums("fp16", 64).value == 8192 * limits.sums("fp32", 64).value
    assert limits.sums("fp32", 64, 4).value == 2 * limits.sums("fp32", 64).value == limits.sums("fp32", 256).value
    assert limits.model(2, 64).value < limits.model(3, 64).value < limits.model(3, 65).value
    assert limits.roundings("fp32", 3).value == 3 * limits.roundings("fp32").value


# The assertions.


def test_the_first_line_says_what_broke_the_value_and_the_limit() -> None:
    with pytest.raises(AssertionError) as failure:
        limits.rows_agree("logits of 4 tokens", [[1.0, 1.0]], [[1.0, 0.0]], limits.model(2, 64))
    first = str(failure.value).splitlines()[0]
    assert first.startswith("logits of 4 tokens: the error 1 is ") and " times the limit 2.02e-05 " in first
    assert "(model of 2 layers, sums of 64 in fp32)" in first


def test_the_worst_row_and_the_worst_number_count() -> None:
    limit = limits.Limit(0.5, "half")
    rows, good = [[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.4, 0.0]]
    limits.rows_agree("rows", good, rows, limit)
    with pytest.raises(AssertionError):
        limits.rows_agree("rows", [[1.0, 0.0], [1.0, 0.6]], rows, limit)
    limits.numbers_agree("numbers", [10.0, 1.0], [10.0, 5.9], limit)  # relative to the largest
    with pytest.raises(AssertionError):
        limits.numbers_agree("numbers", [10.0, 1.0], [10.0, 5.9], limit, size=[10.0, 5.9])
    with pytest.raises(AssertionError):
        limits.numbers_agree("numbers", [10.0, 5.3], [10.0, 5.9], limit, size=1)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_what_is_not_finite_is_beyond_every_limit(wrong: float) -> None:
    limit = limits.Limit(1e30, "none")
    with pytest.raises(AssertionError):
        limits.rows_agree("rows", [[wrong, 1.0]], [[1.0, 1.0]], limit)
    with pytest.raises(AssertionError):
        limits.numbers_agree("numbers", [wrong, 1.0], [1.0, 1.0], limit)
    limits.numbers_agree("numbers", [-torch.inf, 1.0], [-torch.inf, 1.0], limit)  # masked in both


def test_other_shapes_and_names_are_no_agreement() -> None:
    limit = limits.Limit(1e30, "none")
    for found, expected in (([1.0], [1.0, 2.0]), ({"a": 1.0}, {"b": 1.0}), ([], [])):
        with pytest.raises(AssertionError):
            limits.numbers_agree("numbers", found, expected, limit)
    limits.numbers_agree("numbers", {"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}, limit)
    with pytest.raises(AssertionError):
        limits.rows_agree("rows", [[1.0], [1.0]], [[1.0]], limit)


def test_shares_are_noted_where_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(limits.SEEN, str(tmp_path / "seen"))
    limits.agrees("one", 0.25, limits.Limit(1.0, "of one"))
    with pytest.raises(AssertionError):
        limits.agrees("two", 2.0, limits.Limit(1.0, "of one"))
    rows = [line.split("\t") for line in (tmp_path / "seen").read_text().splitlines()]
    assert [row[1:] for row in rows] == [["of one", "0.25"], ["of one", "2"]]
    assert rows[0][0].endswith("::test_shares_are_noted_where_a_file_is_named")


def close() -> None:
    limits.agrees("one", 0.5, limits.Limit(1.0, "of one"))


def by_itself() -> None:
    limits.agrees("one", 0.5, limits.Limit(1.0, "of one"))


def through_another() -> None:
    def inner() -> None:
        close()

    inner()


def without() -> None:
    assert TOKENS


def test_tests_that_judge_numbers_are_known() -> None:
    """Whatever they call in their file; .ci/matrix chooses them so."""
    assert limits.judges(by_itself) and limits.judges(through_another) and not limits.judges(without)
