"""A build that searches for forms: what it makes, what a package then holds, and what each change costs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file

from shardmill import config, plan
from shardmill.files import read_json, write_json
from shardmill.gates import by_bits
from shardmill.gates.weights import PackageWeights
from shardmill.pipeline import why
from shardmill.pipeline.cache.store import Store
from shardmill.precision.windows import halves

from . import driver
from .proof import faults
from .test_incremental import BENCHMARK, PARITY
from .test_incremental import loosen as loosen_limits

CALIBRATION = {"text": "calibration.txt", "seen": 2, "held": 1, "window": 16}
LEFT_OUT = tuple(name for name in driver.AFTER if name not in ("original", "measured"))
BUDGET = {"bits_per_weight": 6.0}  # about half of the numbers in four bits
SEARCH = {"calibration", "search", "precision", "measured/original"}
POINTS = {f"measured/{name}" for name in ("chosen", "int4", "int8", "front_1", "front_2")}
FEW = {"measured": 2, "windows": 1}


def settings(**convert: Any) -> dict[str, Any]:
    """The tiny config with a search."""
    chosen = {"precision": "search", "calibration": CALIBRATION, "budget": BUDGET, "search": FEW} | convert
    return tiny.settings("checkpoint", parity=PARITY, benchmark=BENCHMARK, convert=chosen)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished build; tests copy it."""
    root = tmp_path_factory.mktemp("search")
    tiny.write_checkpoint(root / "checkpoint")
    (root / "sample.txt").write_text(tiny.sample_text())
    (root / "calibration.txt").write_text(tiny.sample_text()[::-1] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        loosen(patch)
        worked = set(run(root, settings()))
        assert worked >= SEARCH and worked & POINTS
        assert {name.split("/")[0] for name in worked} >= {"codes", "sensitivity"}
    return root


@pytest.fixture
def root(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(first, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    loosen(monkeypatch)
    yield tmp_path / "copy"


def run(root: Path, content: dict[str, Any]) -> list[str]:
    """Builds, and measures points; names of the jobs that worked."""
    return driver.run(root, content, LEFT_OUT)


def loosen(patch: pytest.MonkeyPatch) -> None:
    """What four bits cost a random model of this size is not what these tests are about."""
    loosen_limits(patch)
    patch.setattr(by_bits, "budget", lambda growth: {})


def build_of(root: Path) -> Path:
    """The folder of the build."""
    (found,) = (root / "build").glob("*/search.json")
    return found.parent


def parts_of(build: Path) -> list[plan.Part]:
    """The parts that are programs."""
    names = [row["name"] for row in read_json(build / "plan.json")["parts"]]
    return [plan.load_part(build / f"parts/{name}.json") for name in names if name != "embedding"]


def test_the_build_verifies(root: Path) -> None:
    driver.run(root, settings(), ("benchmark", "original", "measured", "report"))
    assert [fault for fault in faults(build_of(root)) if not fault[0].startswith("measured/")] == []


def test_the_budget_is_kept_and_used(first: Path) -> None:
    found = read_json(build_of(first) / "search.json")
    assert 5.0 < found["estimate"]["bits_per_weight"] <= 6.0
    assert {*found["forms"].values()} == {"int4", "int8"}
    sizes, losses = ([point[key] for point in found["front"]] for key in ("bytes", "kl"))
    assert sizes == sorted(sizes) and losses == sorted(losses, reverse=True)


def test_a_package_holds_the_codes_that_were_chosen_in_int4_and_rounds_the_rest(first: Path) -> None:
    build = build_of(first)
    forms = read_json(build / "search.json")["forms"]
    seen = set()
    for part in parts_of(build):
        stored = PackageWeights(build / f"packages/{part.name}.mlpackage", part)
        codes = load_file(build / f"codes/{part.name}.safetensors")
        for path in part.shapes:
            if path in forms:
                kept = stored.stored(path).values.numpy()
                assert np.array_equal(kept, codes[f"{path}.int4.codes"]) == (forms[path] == "int4"), path
                seen.add(forms[path])
    assert seen == {"int4", "int8"}


def test_gates_hold_each_package_to_the_codes_that_were_chosen(first: Path) -> None:
    build, judged = build_of(first), 0
    forms = read_json(build / "search.json")["forms"]
    for part in parts_of(build):
        rows = {row["name"]: row for row in read_json(build / f"parity/{part.name}.json")["gate"]}
        assert rows["weight_steps"]["threshold"] == "<= 0.6"
        assert ("codes_differ" in rows) == ("int4" in {forms.get(path) for path in part.shapes})
        judged += "codes_differ" in rows
    assert judged


def test_nothing_works_twice(root: Path) -> None:
    assert run(root, settings()) == []


@pytest.mark.thorough
def test_another_budget_costs_the_search_and_the_parts_whose_forms_change(root: Path) -> None:
    before = read_json(build_of(root) / "search.json")["forms"]
    worked = run(root, settings(budget={"bits_per_weight": 5.9}))
    after = read_json(build_of(root) / "search.json")["forms"]
    changed = {path for path in before if before[path] != after[path]}
    assert changed
    packages = {f"packages/{part.name}" for part in parts_of(build_of(root)) if changed & part.shapes.keys()}
    assert {name for name in worked if name.startswith("packages/")} == packages
    assert {"search", "precision"} <= set(worked)
    assert not any(name.split("/")[0] in ("calibration", "codes", "sensitivity") for name in worked)
    assert [name for name in worked if name.startswith("measured/")] == ["measured/chosen"]


@pytest.mark.thorough
def test_another_text_makes_new_codes(root: Path) -> None:
    (root / "calibration.txt").write_text(tiny.sample_text()[::-1].swapcase() * 2)
    worked = driver.run(root, settings())
    assert "calibration" in worked and any(name.startswith("codes/") for name in worked)


def test_too_short_a_text_is_refused_by_its_name(root: Path) -> None:
    (root / "calibration.txt").write_text("short")
    with pytest.raises(Exception, match=r"convert\.calibration\.text: half of calibration\.txt gives 0 windows of 16"):
        driver.run(root, settings())


@pytest.mark.thorough
def test_a_budget_that_no_forms_keep_is_refused(root: Path) -> None:
    with pytest.raises(
        Exception, match=r"convert\.budget\.perplexity: no forms keep to 1\.0000001: with int4, int8 it is 1\."
    ):
        driver.run(root, settings(budget={"perplexity": 1.0000001}))


@pytest.mark.thorough
def test_a_build_without_calibration_has_no_such_steps(root: Path) -> None:
    worked = run(root, settings(precision="int8", calibration=None, budget=None, search={}))
    gone = ("codes", "sensitivity", "search", "calibration", "measured")
    assert not any(name.split("/")[0] in gone for name in worked)


def test_points_are_what_was_foreseen_and_what_was_measured_of_it(first: Path) -> None:
    build = build_of(first)
    found = {name: read_json(build / f"{name}.json") for name in POINTS}
    known = read_json(build / "search.json")["points"]
    assert {name.removeprefix("measured/") for name in found} == known.keys()
    for name, point in found.items():
        assert point["foreseen"] == known[name.removeprefix("measured/")]["estimate"]
        assert point["measured"]["tokens"] == CALIBRATION["window"] and point["measured"]["kl"] > 0
    assert {*known["int8"]["forms"].values()} == {"int8"}
    least, most = (found[f"measured/{name}"] for name in ("front_1", "int8"))
    assert least["foreseen"]["bytes"] < most["foreseen"]["bytes"]
    assert least["measured"]["kl"] > 10 * most["measured"]["kl"]


def test_points_are_measured_on_windows_that_nothing_else_has_seen(first: Path) -> None:
    build = build_of(first)
    tokens = load_file(build / "measured/original.safetensors")["tokens"]
    _, second = halves(build / "source", (first / "calibration.txt").read_text(), CALIBRATION["window"])
    assert tokens.tolist() == second[CALIBRATION["held"] : CALIBRATION["held"] + FEW["windows"]]


@pytest.mark.thorough
def test_no_points_are_measured_where_none_are_wanted(root: Path) -> None:
    assert run(root, settings(search={"measured": 0})) == ["plan", "search"]


def test_windows_that_the_text_does_not_have_are_refused(root: Path) -> None:
    with pytest.raises(Exception, match=r"convert\.search\.windows: half of calibration\.txt gives \d+ windows of 16"):
        run(root, settings(search=FEW | {"windows": 10_000}))


@pytest.mark.thorough
def test_a_search_may_take_fp16_and_palettes(root: Path) -> None:
    """Codes, costs and packages follow; what is stored in a palette are the codes of its file."""
    forms = ["fp16", "int8", "palette4", "palette6/16"]
    run(root, settings(search=FEW | {"forms": forms}, budget={"bits_per_weight": 7.0}))
    build = build_of(root)
    found = read_json(build / "search.json")
    assert {*found["forms"].values()} <= {*forms} and found["estimate"]["bits_per_weight"] <= 7.0
    seen = set()
    for part in parts_of(build):
        stored = PackageWeights(build / f"packages/{part.name}.mlpackage", part)
        codes = load_file(build / f"codes/{part.name}.safetensors")
        for path in part.shapes.keys() & found["forms"]:
            name = found["forms"][path]
            seen.add(name)
            if name.startswith("palette"):
                kept = stored.stored(path)
                assert np.array_equal(kept.values.numpy(), codes[f"{path}.{name}.codes"])
                assert kept.tables is not None and np.array_equal(kept.tables.numpy(), codes[f"{path}.{name}.lut"])
    assert any(name.startswith("palette") for name in seen) and len(seen) > 1, seen
    assert read_json(build / "measured/chosen.json")["measured"]["kl"] > 0


@pytest.mark.thorough
def test_the_usual_forms_leave_codes_as_they_were(root: Path) -> None:
    """Another set of forms has codes of its own, and back again none are made."""
    run(root, settings(search=FEW | {"forms": ["int8", "int4", "palette4"]}))
    assert not any(name.startswith("codes/") for name in run(root, settings()))


@pytest.mark.thorough
def test_a_part_in_int8_does_not_depend_on_codes(root: Path) -> None:
    """Nor does its gate; another text leaves both as they are."""
    write_json(root / "recipe.json", {"schema": 1, "default": "int8", "matrices": {"lm_head.weight": "int4"}})
    mixed = settings(precision="recipe.json", budget=None, search={})
    run(root, mixed)
    (root / "calibration.txt").write_text(tiny.sample_text()[::-1].swapcase() * 2)
    worked = run(root, mixed)
    assert any(name.startswith("codes/layers") for name in worked)
    assert {name for name in worked if name.startswith(("packages/", "parity/layers"))} == {
        f"packages/{part.name}" for part in parts_of(root / "build/tiny") if part.kind == "head"
    }


@pytest.mark.thorough
def test_why_foresees_points(root: Path) -> None:
    """All is as it was; with another budget, points depend on what the search will find."""
    store = Store(root / "build/.store")

    def foreseen(content: dict[str, Any]) -> dict[str, str]:
        found = why.forecast(config.parse(content), build_of(root), store)
        return {verdict.step: verdict.status for verdict in found if verdict.step != "benchmark/speed"}  # not run

    same = foreseen(settings())
    assert {*same.values()} == {"unchanged"} and same.keys() >= {*POINTS, "measured/original", "search"}
    other = foreseen(settings(budget={"bits_per_weight": 5.9}))
    assert other["search"] == "works" and {other[point] for point in POINTS} == {"depends"}
    assert other["measured/original"] == "unchanged"
