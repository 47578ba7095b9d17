"""What a budget can be kept to at least is said so that it may be set to just that."""

from __future__ import annotations

import math

import pytest

from shardmill.forms.recipe import at_least, unreachable


@pytest.mark.parametrize("value", [4.15972219, 4.159722201, 4.0, 0.123456789123, 15.99999999, 9.99999999999])
def test_the_least_is_rounded_up(value: float) -> None:
    said = float(at_least("bits_per_weight", value))
    assert value <= said < value + 10.0 ** (math.floor(math.log10(value)) - 6)  # it has eight digits
    assert float(at_least("bytes_per_token", 1000 * value)) >= 1000 * value


def test_what_a_refusal_names_is_not_refused() -> None:
    constants = {"layers.0.q.weight": (7, 13), "layers.1.q.weight": (11, 3), "norm": (13,)}
    for name in ("bits_per_weight", "bytes_per_token"):
        (problem,) = unreachable({name: 0.5}, ("int4", "int8"), constants)
        least = float(problem.split("it is ")[1].split()[0])
        assert not unreachable({name: least}, ("int4", "int8"), constants)
        assert unreachable({name: least * 0.999}, ("int4", "int8"), constants)


def test_the_least_is_what_the_smallest_fitting_forms_take() -> None:
    """Worked out by hand: a table for each 8 rows fits the first matrix only, and a vector is no matrix."""
    constants = {"layers.0.q.weight": (8, 16), "layers.0.o.weight": (7, 16), "layers.0.norm": (16,)}
    first = 8 * 16 // 2 + 2 * 16  # indices of 4 bits, and a table
    second = 7 * 16 + 2 * 7  # INT8 with a scale for each row
    forms = ("int8", "palette4/8")
    for name, least in (
        ("bits_per_weight", 8 * (first + second) / (15 * 16)),
        ("bytes_per_token", first + second + 32),
    ):
        (problem,) = unreachable({name: least - 0.25, "perplexity": None}, forms, constants)
        assert problem.endswith(f"less than any forms reach: with int8, palette4/8 it is {least:g} at least")
        assert unreachable({name: least}, forms, constants) == []
