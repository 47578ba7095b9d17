"""What inputs are fed with: what a program does with an input says what the input may hold."""

from __future__ import annotations

import numpy as np
import pytest
from portable_coreml.errors import InputError
from portable_coreml.files.features import Feature
from portable_coreml.files.read_text import read_text
from portable_coreml.judge.feed import Domain, arrays, domains, probes
from portable_coreml.judge.rule import Subject

TEXT = """program(1.3){ func main<ios18>(tensor<int32, [1, 4]> ids, tensor<fp16, [1, 4]> mask, tensor<fp16, [1, 4]>
    power, tensor<int32, [1]> count, tensor<fp16, [1, 4]> x, tensor<fp16, [1, 4]> bias) {
    tensor<fp16, [7, 2]> table = const()[val = tensor<fp16, [7, 2]>([0,0,0,0,0,0,0,0,0,0,0,0,0,0])];
    tensor<int32, [1, 4]> zero = const()[val = tensor<int32, [1, 4]>([0, 0, 0, 0])];
    int32 rows = const()[val = int32(7)];
    int32 first = const()[val = int32(0)];
    tensor<bool, [1, 4]> low = greater_equal(x = ids, y = zero);
    tensor<int32, [1, 4]> up = add(x = ids, y = rows);
    tensor<int32, [1, 4]> index = select(a = ids, b = up, cond = low);
    tensor<fp16, [1, 4, 2]> row = gather(axis = first, indices = index, x = table);
    tensor<fp16, [1, 4]> eps = const()[val = tensor<fp16, [1, 4]>([1, 1, 1, 1])];
    tensor<fp16, [1, 4]> above = add(x = power, y = eps);
    tensor<fp16, [1, 4]> logs = log(epsilon = first, x = above);
    tensor<fp16, [1, 4]> both = add(x = logs, y = x);
} -> (both, row, count, mask, bias); }"""


def subject() -> Subject:
    function = read_text(TEXT).functions["main"]
    shapes = {"ids": (1, 4), "mask": (1, 4), "power": (1, 4), "count": (1,), "x": (1, 4), "bias": (1, 4)}
    features = [
        Feature(n, "int32" if n in ("ids", "count") else "fp16", s, optional=n == "bias") for n, s in shapes.items()
    ]
    return Subject(function, tuple(features), (), 9, 1, 0)


class Nothing:
    """A description without images."""

    input = ()


def fed(**stated: tuple[float, float]) -> dict[str, Domain]:
    return {domain.name: domain for domain in domains(subject(), Nothing, stated, ())}


def test_a_domain_follows_from_what_the_program_does() -> None:
    """Ids count a table's rows, through what coremltools puts in between; what a logarithm takes is not negative."""
    made = fed()
    assert (made["ids"].low, made["ids"].high) == (0, 6) and "7 rows" in made["ids"].why
    assert made["mask"].kind == "ones" and made["power"].kind == "positive"
    assert (made["x"].kind, made["bias"].kind) == ("normal", "left out")
    assert made["count"].high == 1 and made["count"].why.startswith("assumed")
    assert [name for name, domain in made.items() if domain.assumed] == ["power", "x"]


def test_what_is_stated_counts() -> None:
    made = fed(x=(-2.0, 3.0), ids=(2.0, 2.0))
    values = arrays(made.values(), 0)
    assert set(values) == {"ids", "mask", "power", "count", "x"}
    assert values["x"].min() >= -2 and values["x"].max() <= 3 and values["x"].std() > 0
    assert values["ids"].dtype == np.int32 and (values["ids"] == 2).all()
    assert (values["power"] >= 0).all() and (values["mask"] == 1).all()
    with pytest.raises(InputError, match="'ids' is int32: there is no such number"):
        fed(ids=(2.2, 2.8))


def test_arrays_are_the_same_each_time_and_differ_by_seed() -> None:
    made = fed()
    one, again, other = (arrays(made.values(), seed)["x"] for seed in (0, 0, 1))
    assert np.array_equal(one, again) and not np.array_equal(one, other)


def test_probes_stand_at_the_edges() -> None:
    """Probes lie at the ends of a stated domain; without a statement, at numbers that the program may never get."""
    loose = {probe.name: probe for probe in probes(fed().values(), 0)}
    assert list(loose) == ["probe-zeros", "probe-least", "probe-largest"] and not loose["probe-largest"].inside
    assert (loose["probe-zeros"].arrays["x"] == 0).all() and not loose[
        "probe-zeros"
    ].inside  # log(0) is outside for `power`
    assert np.abs(loose["probe-largest"].arrays["x"]).max() > 20 and loose["probe-largest"].arrays["ids"].max() == 6
    stated = list(probes(fed(x=(1.0, 2.0), power=(0.0, 9.0)).values(), 0))
    assert [probe.inside for probe in stated] == [True, True, True]
    assert [float(probe.arrays["x"].mean()) for probe in stated] == [1, 1, 2]


def test_an_input_without_a_shape_is_asked_for() -> None:
    whole = subject()
    bare = Subject(whole.function, (Feature("elsewhere", "fp16", ()),), (), 9, 1, 0)
    with pytest.raises(InputError, match="'elsewhere' has no default shape"):
        domains(bare, Nothing, {})
