"""From costs of single matrices to forms: which ones the search may take, and which sets are to be measured."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardmill.errors import ConfigError
from shardmill.forms.form import stored_bytes
from shardmill.plan import Part
from shardmill.precision.search import searched

SHAPES = {f"layers.{i}.{name}.weight": (64, 128) for i in range(4) for name in ("q", "down")} | {"layers.0.norm": (64,)}
HEAD = {"lm_head.weight": (96, 64)}
EXPERTS = {"experts.0.weight": (128, 128)}
NUMBERS = sum(prod(shape) for shape in (SHAPES | HEAD | EXPERTS).values() if len(shape) == 2)
ERRORS = {"int4": 0.01, "int8": 0.00001, "palette4": 0.005, "palette6/16": 0.0004, "palette8/1": 1e-6, "fp16": 1e-9}


def parts() -> list[Part]:
    """Parts of which the search reads nothing but the shapes; of the last, experts, no costs are known."""
    return [cast(Part, SimpleNamespace(shapes=shapes)) for shapes in (SHAPES, HEAD, EXPERTS)]


def costs() -> list[dict[str, Any]]:
    """Every matrix costs another amount."""
    found = []
    for part in parts():
        paths = [path for path, shape in part.shapes.items() if len(shape) == 2 and not path.startswith("experts")]
        found.append({path: {"kl": 0.001 * (i + 1) ** 3, "errors": ERRORS} for i, path in enumerate(paths)})
    return found


def found(budget: dict[str, float], *forms: str, points: int = 0) -> dict[str, Any]:
    return dict(searched(parts(), costs(), budget, forms or ("int4", "int8"), points))


def test_what_a_form_costs_is_in_proportion_to_its_error() -> None:
    every = found({"bits_per_weight": 16.0}, "int4", "int8", "palette4")
    row = every["costs"]["layers.0.q.weight"]
    assert row["int4"] == 0.001 and row["int8"] == pytest.approx(1e-6) and row["palette4"] == pytest.approx(0.0005)
    assert every["sizes"]["lm_head.weight"]["palette4"] == stored_bytes("palette4", (96, 64))


def test_a_matrix_that_int4_holds_exactly_has_no_free_palettes() -> None:
    """Its cost in INT4 says nothing of theirs, so an error of it is taken to cost what it costs the others."""
    rows = costs()
    path = "layers.0.q.weight"
    rows[0][path] = {"kl": 0.0, "errors": ERRORS | {"int4": 0.0}}
    result = searched(parts(), rows, {"bits_per_weight": 16.0}, ("int4", "int8", "palette4"))
    cost = result["costs"][path]
    assert cost["int4"] == 0 and 0 < cost["int8"] < cost["palette4"]
    assert result["forms"][path] == "int4"


def test_more_forms_never_cost_more_at_the_same_bytes() -> None:
    few = found({"bits_per_weight": 6.0})["estimate"]
    many = found({"bits_per_weight": 6.0}, "int4", "int8", "palette4", "palette6/16", "fp16")
    assert many["estimate"]["kl"] < few["kl"] and many["estimate"]["bits_per_weight"] <= 6.0
    assert {*many["forms"].values()} & {"palette4", "palette6/16"}


def test_a_form_is_not_taken_for_matrices_that_it_does_not_fit() -> None:
    """64 and 96 rows make no groups of 48; of the head, they do."""
    result = searched(
        parts(),
        [{p: {"kl": 0.01, "errors": ERRORS | {"palette4/48": 0.004}} for p in rows} for rows in costs()],
        {"perplexity": 2.0},
        ("int8", "palette4/48"),
    )
    assert result["forms"]["lm_head.weight"] == "palette4/48"
    assert {name for path, name in result["forms"].items() if path.startswith("layers")} == {"int8"}


def test_no_form_at_all_is_an_error_with_a_remedy() -> None:
    rows = [{p: {"kl": 0.01, "errors": ERRORS | {"palette4/48": 0.004}} for p in each} for each in costs()]
    with pytest.raises(ConfigError, match=r"forms: palette4/48: none of them fits layers\.0\.q\.weight; add int8"):
        searched(parts(), rows, {"perplexity": 2.0}, ("palette4/48",))


def test_nothing_larger_than_what_the_plan_goes_by_is_taken() -> None:
    """A table for each row is larger than INT8, and fits the plan only if fp16 is planned for."""
    assert "palette8/1" not in found({"perplexity": 1.5}, "int8", "palette8/1")["sizes"]["layers.0.q.weight"]
    assert stored_bytes("palette8/1", (64, 128)) > stored_bytes("fp16", (64, 128))
    assert "palette8/1" not in found({"perplexity": 1.5}, "fp16", "palette8/1")["sizes"]["layers.0.q.weight"]
    assert "fp16" in found({"perplexity": 1.5}, "fp16", "int8")["sizes"]["layers.0.q.weight"]


def test_points_run_along_the_front_beside_the_choice_and_uniform_forms() -> None:
    every = found({"bits_per_weight": 5.5}, points=5)
    points = every["points"]
    assert [*points] == ["chosen", "int4", "int8", *(f"front_{i}" for i in range(1, 6))]
    assert points["chosen"] == {"forms": every["forms"], "estimate": every["estimate"]}
    assert {name for path, name in points["int4"]["forms"].items()} == {"int4", "int8"}
    assert points["int4"]["forms"]["lm_head.weight"] == "int8"
    assert {*points["int8"]["forms"].values()} == {"int8"} and {*points["front_1"]["forms"].values()} == {"int4"}
    bits, losses = ([points[f"front_{i}"]["estimate"][key] for i in range(1, 6)] for key in ("bits_per_weight", "kl"))
    assert bits == sorted(bits) and losses == sorted(losses, reverse=True) and len({*bits}) == 5
    assert 0.005 * losses[0] < losses[-1] <= 0.01 * losses[0]  # INT8 would leave a thousandth


def test_points_end_at_the_least_loss_where_no_forms_leave_a_hundredth() -> None:
    """A palette of 6 bits leaves a twenty-fifth of what INT4 loses."""
    points = found({"bits_per_weight": 16.0}, "int4", "palette6/16", points=3)["points"]
    assert {*points["front_1"]["forms"].values()} == {"int4"}
    assert {*points["front_3"]["forms"].values()} == {"palette6/16"}


def test_points_of_the_front_do_not_depend_on_the_budget() -> None:
    one, other = (found({"bits_per_weight": bits}, points=3)["points"] for bits in (5.0, 7.0))
    assert one["chosen"] != other["chosen"]
    assert {k: v for k, v in one.items() if k != "chosen"} == {k: v for k, v in other.items() if k != "chosen"}


def test_uniform_points_are_there_whatever_the_search_may_take() -> None:
    points = found({"perplexity": 1.1}, "palette4", "fp16", points=2)["points"]
    assert points["int8"]["estimate"]["kl"] == pytest.approx(
        0.001 * found({"perplexity": 9.0}, "int4")["estimate"]["kl"]
    )


@pytest.mark.parametrize(("name", "limit"), [("bits_per_weight", 6.2), ("bytes_per_token", 70_000)])
def test_budgets_count_what_the_search_does_not_choose(name: str, limit: float) -> None:
    """A norm and the experts, which stay in INT8: all of it keeps to the budget, and comes close."""
    every = found({name: limit})
    shapes = {path: shape for part in parts() for path, shape in part.shapes.items()}
    size = sum(stored_bytes(every["forms"].get(path, "int8"), shape) for path, shape in shapes.items())
    assert every["estimate"]["bytes"] == size
    numbers = sum(rows[0] * rows[1] for rows in shapes.values() if len(rows) == 2)
    assert every["estimate"]["bits_per_weight"] == pytest.approx(8 * (size - 2 * 64) / numbers)
    assert 0.93 * limit < every["estimate"]["bytes" if name == "bytes_per_token" else name] <= limit


@pytest.mark.parametrize("name", ["bits_per_weight", "bytes_per_token", "perplexity"])
def test_a_budget_that_no_forms_keep_says_what_they_reach(name: str) -> None:
    """Which they do reach, if that is asked for."""
    tight = {"bits_per_weight": 0.1, "bytes_per_token": 1.0, "perplexity": 1 + 1e-9}[name]
    with pytest.raises(
        ConfigError, match=rf"convert\.budget\.{name}: no forms keep to .*: with int4, int8 it is "
    ) as error:
        found({name: tight})
    vectors, experts = 2 * 64, stored_bytes("int8", EXPERTS["experts.0.weight"])
    beside = {"bits_per_weight": f"{8 * experts / NUMBERS:.8g}", "bytes_per_token": f"{vectors + experts}"}
    told = f" at least, {beside[name]} of it for vectors and for experts" if name in beside else " at least"
    assert told in str(error.value) and ("experts" in str(error.value)) is (name in beside)
    reached = float(str(error.value).split(" it is ")[1].split()[0])
    assert found({name: reached})["estimate"]
    with pytest.raises(ConfigError):
        found({name: 1 + (reached - 1) / 2})
