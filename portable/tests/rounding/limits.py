"""How far apart two correct computations of the same numbers may be, from number formats, longest sums and depth.

No limit here was read off a machine. Two correct computations differ where each rounds, and in which order it sums. One
rounding is off by at most the format's unit. Roundings one after the other are off in either direction, so the error of
n of them is typically the square root of n units; this is the typical case of each kind below. A limit is `MARGIN`
times the typical case, so that a correct computation comes to a quarter of its limit at most, in whatever order a
processor sums. The kinds, by what they know of a computation:

- `roundings`: numbers that are rounded one by one, without sums;
- `sums`: sums of products, `steps` of them one after the other;
- `model`: a transformer of so many layers, which is `sums` with the steps of its layers;
- `moved`: a model whose own amplification of errors was found by disturbing it (shardmill/gates/disturbed.py);
- `logprobs` and `divergence`: what inherits the error of logits.

An error of four times the limit fails with each. Each kind says which faults are larger than that, and test_limits.py
makes them. If the environment variable LIMITS_SEEN names a file, every judged number is noted there as a share of its
limit: test, limit, share, separated by tabs.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import pytest

SEEN = "LIMITS_SEEN"
# The largest relative error of one rounding to nearest.
UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}
MARGIN = 4.0
# Roundings one after the other in a layer of a transformer: norm, projection, rotation, scores, softmax, weighted sum,
# projection, addition to the stream; norm, gate and its activation, projection, addition. In a head: norm, projection.
LAYER, HEAD = 13, 2


@dataclass(frozen=True)
class Limit:
    """A limit of relative errors, and what it was derived from."""

    value: float
    name: str


def roundings(form: str, count: int = 1) -> Limit:
    """Limit numbers that are rounded `count` times, one by one: activations, rotations, tables, conversions.

    Derivation: the error of a chain of `count` roundings is at most `count` units.
    What it still catches: numbers in the next narrower format (fp32 in place of fp64, fp16 in place of fp32), an
    approximation that is good to some digits only (1e-5 in fp32), another constant.
    """
    return Limit(MARGIN * UNITS[form] * count, f"{_times(count, 'rounding')} in {form}")


def sums(form: str, longest: int, steps: int = 1) -> Limit:
    """Limit sums of up to `longest` products, where `steps` sums or other roundings follow each other.

    Derivation: a sum in the worst order is rounded once for each product, so `steps` sums are `longest * steps`
    roundings one after the other.
    What it still catches: a dropped column (one part in the square root of `longest`), a narrower format, operands
    rounded to fp16, an epsilon that is another by a unit times `MARGIN` squared of what is summed.
    """
    return Limit(MARGIN * UNITS[form] * math.sqrt(longest * steps), f"sums of {longest} in {form}, depth {steps}")


def model(layers: int, longest: int, form: str = "fp32") -> Limit:
    """Limit what a transformer of so many layers computes, whose longest sum has `longest` products.

    Derivation: `sums`, with the roundings of a layer, LAYER, for each layer and those of the LM head once, and twice
    that: both of two models that are compared round, and the worst of many tokens counts, not the typical one. A layer
    adds about as much to the stream as it gets, so errors are neither damped nor amplified along the way.
    What it still catches: every mistake of a graph that the mutants of tests/models make (1e-4 and more), one layer in
    fp16, one dropped column of one projection, an epsilon of 1e-5 in place of 1e-3.
    """
    steps = LAYER * layers + HEAD
    return Limit(
        2 * sums(form, longest, steps).value, f"model of {_times(layers, 'layer')}, sums of {longest} in {form}"
    )


def moved(by: float, longest: int) -> Limit:
    """Limit what a model computes that amplifies errors by itself, as large scores and large adapters do.

    Derivation: `sums`, with the measured error that one rounding of each module's inputs and outputs makes at the end,
    `by`, in place of the unit times the root of the steps. It is measured on the reference and follows neither from
    the processor nor from the program that is judged.
    What it still catches: fp16 in place of fp32, which is larger by 2^13 however errors are amplified; a scale or a
    rank that is wrong in one module.
    """
    return Limit(MARGIN * by * math.sqrt(longest), f"model that rounding moves by {by:.2g}, sums of {longest}")


def logprobs(logits: Limit, size: float, vocab: int, tokens: int = 1) -> Limit:
    """Limit sums of `tokens` log-probabilities, not relative to them but in nats.

    Derivation: logits whose root mean square is `size` are off by `logits.value * size`, and so is the logarithm of
    their exponentials' sum, which has `vocab` terms in fp32; both errors add up. It bounds a probability's, too.
    What it still catches: a left-out token or label, logits of the narrower format, another temperature.
    """
    each = 2 * logits.value * size + sums("fp32", vocab).value
    return Limit(each * tokens, f"{_times(tokens, 'log-probability')} of logits of {size:.3g}, {logits.name}")


def divergence(logits: Limit, size: float, kl: float) -> Limit:
    """Limit a mean KL divergence of about `kl` nats between two computed distributions, relative to it.

    Derivation: a divergence is about half the mean square of what logits move by, which is the root of `2 * kl` then.
    Logits of the root mean square `size` that are off by `logits.value * size` change it by that root times as much.
    What it still catches: a matrix that was left out or took another form, which changes a divergence by percents.
    """
    return Limit(logits.value * size * math.sqrt(2 / kl), f"divergence of {kl:.2g} nats, {logits.name}")


def error(found: Any, expected: Any) -> float:
    """Return the largest |found - expected| / |expected| of any row, in the Euclidean norm. NaN stays NaN."""
    a, b = _as_fp64(found), _as_fp64(expected)
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    norms = np.maximum(np.linalg.norm(b, axis=-1), np.finfo(np.float64).tiny)
    return float(np.max(np.linalg.norm(a - b, axis=-1) / norms))


def rows_agree(what: str, found: Any, expected: Any, limit: Limit) -> None:
    """Fail if any row is further off than the limit, in the Euclidean norm and relative to the expected row."""
    __tracebackhide__ = True
    agrees(what, error(found, expected), limit)


def numbers_agree(what: str, found: Any, expected: Any, limit: Limit, size: Any = None) -> None:
    """Fail if any single number is further off than the limit, relative to `size`.

    Args:
        what: what is compared, for the failure's first line.
        found: the numbers to judge, by name or in an array.
        expected: what they must be.
        limit: the limit.
        size: the size of the numbers, or one for each; the largest expected magnitude by default. 1 for a limit that is
            absolute.
    """
    __tracebackhide__ = True
    if isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), f"{what}: names differ: {[*found]} and {[*expected]}"
    a, b = _as_fp64(found), _as_fp64(expected)
    assert a.shape == b.shape, f"{what}: shapes differ: {a.shape} and {b.shape}"
    assert a.size, f"{what}: there are no numbers to compare"
    sizes = np.abs(b).max() if size is None else _as_fp64(size)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))  # infinities are as good as any number where both have them
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(equal, 0.0, np.abs(a - b) / sizes)
    agrees(what, float(np.max(shares)), limit)


def agrees(what: str, value: float, limit: Limit) -> None:
    """Fail if an error is beyond the limit or NaN. The failure's first line has what broke, the value and the limit."""
    __tracebackhide__ = True
    share = float(value) / limit.value
    if file := os.environ.get(SEEN):
        test = os.environ.get("PYTEST_CURRENT_TEST", "no test").rpartition(" (")[0]
        with open(file, "a", encoding="utf-8") as seen:
            seen.write(f"{test}\t{limit.name}\t{share:.4g}\n")
    if not share <= 1:
        raise AssertionError(
            f"{what}: the error {value:.3g} is {share:.3g} times the limit {limit.value:.3g} ({limit.name})"
        )


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what a limit judges, for a conftest.py that has this name; each of them gets all items of a run."""
    for item in items:
        if isinstance(item, pytest.Function) and not item.get_closest_marker("numeric") and judges(item.function):
            item.add_marker(pytest.mark.numeric)


@functools.cache  # each test has many cases, and each conftest.py asks for all of them
def judges(test: Any) -> bool:
    """Return whether a test uses a limit, itself or in a function of its file that it calls."""
    function = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    return _names_limits(function.__code__, function.__globals__, set())


def _names_limits(code: CodeType, scope: Mapping[str, Any], seen: set[str]) -> bool:
    if {"limits", "verdicts"} & {*code.co_names}:
        return True
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    for name in {*code.co_names} - seen:
        seen.add(name)
        if isinstance(scope.get(name), FunctionType) and scope[name].__globals__ is scope:
            inner.append(scope[name].__code__)
    return any(_names_limits(each, scope, seen) for each in inner)


def _as_fp64(value: Any) -> Any:
    """Return a tensor, an array, a mapping's values, a list or a number as an array in fp64."""
    if isinstance(value, Mapping):
        value = [value[name] for name in sorted(value)]
    if hasattr(value, "detach"):
        value = value.detach().double().cpu().numpy()
    return np.asarray(value, np.float64)


def _times(count: int, word: str) -> str:
    plural = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{count} {word if count == 1 else plural}"
