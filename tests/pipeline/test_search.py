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

from shardmill import plan
from shardmill.files import read_json
from shardmill.gates import limits
from shardmill.gates.weights import PackageWeights

from . import driver
from .test_incremental import BENCHMARK, PARITY
from .test_incremental import loosen as loosen_limits

CALIBRATION = {"text": "calibration.txt", "seen": 2, "held": 1, "window": 16}
LEFT_OUT = tuple(name for name in driver.AFTER if name not in ("original", "measured"))
BUDGET = {"bits_per_weight": 6.0}  # about half of the numbers in four bits
SEARCH = {"calibration", "search", "precision"}


def settings(**convert: Any) -> dict[str, Any]:
    """The tiny config with a search."""
    chosen = {"precision": "search", "calibration": CALIBRATION, "budget": BUDGET} | convert
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
        worked = set(driver.run(root, settings()))
        assert worked >= SEARCH and {name.split("/")[0] for name in worked} >= {"codes", "sensitivity"}
    return root


@pytest.fixture
def root(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(first, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    loosen(monkeypatch)
    yield tmp_path / "copy"


def loosen(patch: pytest.MonkeyPatch) -> None:
    """What four bits cost a random model of this size is not what these tests are about."""
    loosen_limits(patch)
    patch.setattr(limits, "budget", lambda growth: {})


def build_of(root: Path) -> Path:
    """The folder of the build."""
    (found,) = (root / "build").glob("*/search.json")
    return found.parent


def parts_of(build: Path) -> list[plan.Part]:
    """The parts that are programs."""
    names = [row["name"] for row in read_json(build / "plan.json")["parts"]]
    return [plan.load_part(build / f"parts/{name}.json") for name in names if name != "embedding"]


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


def test_nothing_works_twice(root: Path) -> None:
    assert driver.run(root, settings()) == []


def test_another_budget_costs_the_search_and_the_parts_whose_forms_change(root: Path) -> None:
    before = read_json(build_of(root) / "search.json")["forms"]
    worked = driver.run(root, settings(budget={"bits_per_weight": 5.9}))
    after = read_json(build_of(root) / "search.json")["forms"]
    changed = {path for path in before if before[path] != after[path]}
    assert changed
    packages = {f"packages/{part.name}" for part in parts_of(build_of(root)) if changed & part.shapes.keys()}
    assert {name for name in worked if name.startswith("packages/")} == packages
    assert {"search", "precision"} <= set(worked)
    assert not any(name.split("/")[0] in ("calibration", "codes", "sensitivity") for name in worked)


def test_another_text_makes_new_codes(root: Path) -> None:
    (root / "calibration.txt").write_text(tiny.sample_text() * 2)
    worked = driver.run(root, settings())
    assert "calibration" in worked and any(name.startswith("codes/") for name in worked)


def test_too_short_a_text_is_refused_by_its_name(root: Path) -> None:
    (root / "calibration.txt").write_text("short")
    with pytest.raises(Exception, match=r"convert\.calibration\.text: calibration\.txt has \d+ tokens"):
        driver.run(root, settings())


def test_a_budget_that_no_forms_keep_is_refused(root: Path) -> None:
    with pytest.raises(Exception, match=r"convert\.budget: no forms keep to \{'bits_per_weight': 3\.0\}"):
        driver.run(root, settings(budget={"bits_per_weight": 3.0}))


def test_a_build_without_calibration_has_no_such_steps(root: Path) -> None:
    worked = driver.run(root, settings(precision="int8", calibration=None, budget=None))
    assert not any(name.split("/")[0] in ("codes", "sensitivity", "search", "calibration") for name in worked)
