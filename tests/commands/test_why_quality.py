"""`shardmill why-quality` names the matrices that cost most, whether a build searched for its forms or not."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from pipeline import driver
from pipeline.test_incremental import BENCHMARK, PARITY, loosen
from typer.testing import CliRunner

from shardmill import cli
from shardmill.errors import GateError
from shardmill.files import write_json
from shardmill.gates import by_bits
from shardmill.gates.thresholds import THRESHOLDS

WORST, OTHER = "layers.2.mlp.down_proj.weight", "layers.0.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build in INT8 but for one matrix in INT4."""
    root = tmp_path_factory.mktemp("quality")
    tiny.write_checkpoint(root / "checkpoint")
    (root / "sample.txt").write_text(tiny.sample_text())
    write_json(root / "recipe.json", {"schema": 1, "default": "int8", "matrices": {WORST: "int4"}})
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        loosen(patch)
        driver.run(root, settings())
    return root / "build" / settings()["model"]


def settings() -> dict[str, Any]:
    return tiny.settings("checkpoint", parity=PARITY, benchmark=BENCHMARK, convert={"precision": "recipe.json"})


def asked(build: Path) -> str:
    said = CliRunner().invoke(cli.app, ["why-quality", str(build)])
    assert said.exit_code == 0, said.stderr
    return said.stdout


def test_the_matrix_that_was_rounded_most_comes_first(build: Path) -> None:
    lines = asked(build).splitlines()
    assert [line for line in lines if line.startswith("kl 0.00")], lines
    rows = [line.split() for line in lines if re.match(r"\s*(layers|lm_head)\.", line)]
    assert rows[0][:2] == [WORST, "int4"] and {row[1] for row in rows[1:]} == {"int8"}
    db = [float(row[2]) for row in rows]
    assert db == sorted(db) and 10 < db[0] < 25 and db[1] > 35


def test_of_a_search_it_says_what_was_foreseen(build: Path) -> None:
    costs = {WORST: {"int4": 0.03, "int8": 0.001}, OTHER: {"int4": 0.01, "int8": 0.0}}
    sizes = {path: {"int4": 1000, "int8": 3000} for path in costs}
    write_json(build / "search.json", {"forms": {WORST: "int4", OTHER: "int8"}, "costs": costs, "sizes": sizes})
    try:
        rows = [line.split() for line in asked(build).splitlines() if re.match(r"\s*layers\.", line)]
        assert rows == [[WORST, "int4", "0.03", "100.0%", "0.029", "2.0", "kB"], [OTHER, "int8", "0", "0.0%"]]
    finally:
        (build / "search.json").unlink()


def test_a_search_whose_choice_the_build_no_longer_has_is_left_out(build: Path) -> None:
    """Its file stays when the config names a recipe in its place."""
    without = asked(build)
    search = {"forms": {WORST: "int8"}, "costs": {WORST: {"int8": 0.5}}, "sizes": {WORST: {"int8": 1}}}
    write_json(build / "search.json", search)
    try:
        assert asked(build) == without
    finally:
        (build / "search.json").unlink()


@pytest.mark.parametrize("content", ["{}", "[]", f'{{"forms": {{"{WORST}": "int4"}}, "costs": {{}}, "sizes": {{}}}}'])
def test_a_search_that_was_changed_is_one_line(build: Path, content: str) -> None:
    (build / "search.json").write_text(content)
    try:
        said = CliRunner().invoke(cli.app, ["why-quality", str(build)])
    finally:
        (build / "search.json").unlink()
    assert (said.exit_code, said.stdout) == (1, "")
    why = "another version made them, or they were changed"
    told = f"which `shardmill verify {build}` tells"
    assert said.stderr == f"shardmill: {build}: holds files that this version can't read: {why}, {told}\n"


def test_a_package_that_is_not_there_yet_is_named(build: Path) -> None:
    package = next((build / "packages").glob("*.mlpackage"))
    aside = package.rename(package.with_name("aside"))
    try:
        said = CliRunner().invoke(cli.app, ["why-quality", str(build)])
    finally:
        aside.rename(package)
    assert said.exit_code == 1 and said.stderr.startswith(f"shardmill: {package}: is not there (yet)")


def test_a_folder_that_is_no_build_is_told(tmp_path: Path) -> None:
    said = CliRunner().invoke(cli.app, ["why-quality", str(tmp_path)])
    assert (said.exit_code, said.stdout) == (1, "")
    assert said.stderr == f"shardmill: {tmp_path}: holds no plan.json; name a model's build folder\n"


def test_a_gate_that_missed_names_it(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the limit is: this one no program of INT8 weights keeps."""
    root = build.parents[1]
    monkeypatch.chdir(root)
    strict = THRESHOLDS | {"psnr": replace(THRESHOLDS["psnr"], limit=200.0)}
    monkeypatch.setattr(by_bits, "thresholds_of", lambda judged: strict)
    told = r"psnr is \d+\.\d, must be >= 200 \(layers\.1\.\S+ is stored furthest from the checkpoint's, 4\d\.\d dB\)"
    with pytest.raises(GateError, match=told):
        driver.run(root, settings() | {"parity": PARITY | {"positions": 24}})
