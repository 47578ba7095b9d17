"""Kits of models that are not a plain decoder: routed experts, which a pass may leave out, and encoders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import encoders
import heads
import program_forms
import pytest
import routed
import tiny
from models import tiny_encoders

from shardmill.convert import package
from shardmill.convert.table import write_table
from shardmill.device.kit import write_kit
from shardmill.device.rank import rank_builds
from shardmill.files import load_json, write_json

from .finished import LAYERS, SETTINGS, finish
from .measuring import lines, measured, unpacked

pytestmark = pytest.mark.slow


def packed_and_measured(build: Path, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """kit.json's variant, and what the fake engine gives."""
    write_kit([build], folder / "kit.zip")
    kit = unpacked(folder / "kit.zip", folder / "kit")
    (variant,) = load_json(kit / "kit.json")["variants"]
    return variant, lines(measured(kit))


def test_experts_that_the_host_routes_to_are_measured_one_by_one(tmp_path: Path) -> None:
    """A program that no recorded token takes is loaded all the same, and what can't be compared says so."""
    source = routed.checkpoint("lfm2_moe", tmp_path)
    made = routed.build(source, tmp_path / "made", routed.GROUPS["lfm2_moe"])
    build = finish(made.plan, made.packages, made.table, source, tmp_path / "routed")
    variant, found = packed_and_measured(build, tmp_path)
    kinds = {part["name"]: part["kind"] for part in variant["parts"]}
    called = {part for row in variant["recorded"]["1"] for part in row}
    for name in kinds:
        line = found[f"{name}/parity.T=1"]
        assert line["status"] == ("ok" if name in called else "not_run"), name
        assert found[f"{name}/load.warm"]["status"] == "ok"
    assert "experts" in {kinds[name] for name in called}
    assert found["load.whole"]["status"] == found["pass.T=1"]["status"] == "not_run"
    assert "chained by a runtime only" in found["load.whole"]["detail"]


@pytest.mark.parametrize("topology", [[[0, 3]], [[0, 1], [1, 3]]])
def test_an_encoder_is_one_program_for_each_width_or_a_chain(tmp_path: Path, topology: list[list[int]]) -> None:
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint")
    source, parts, plan = encoders.parts_of(checkpoint, tmp_path, topology=topology)
    write_table(parts.pop("embedding"), source, tmp_path / "embedding.safetensors", 1)
    packages = {}
    for name, part in parts.items():
        packages[name] = tiny.convert(part, source, tmp_path / f"{name}.mlpackage", "fp16")
    build = finish(plan, packages, tmp_path / "embedding.safetensors", source, tmp_path / "encoder")
    variant, found = packed_and_measured(build, tmp_path)
    widths = [width for width in plan["buckets"] for _ in topology]
    assert [part["programs"][0]["widths"] for part in variant["parts"]] == [[width] for width in widths]
    for part, width in zip(variant["parts"], widths, strict=True):
        assert found[f"{part['name']}/parity.T={width}"]["value"]["psnr"] > 40
        assert found[f"pass.T={width}"]["value"] == {"programs": len(topology)}
    assert rank_builds([build]) == []  # nothing was imported


@pytest.mark.parametrize("bundles", ["one", "each"])
def test_each_function_of_a_program_is_measured_by_itself(tmp_path: Path, bundles: str) -> None:
    """Loaded by its name, or as the only one of its bundle."""
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS), tmp_path / "source")
    made = program_forms.build(source, tmp_path, program_forms.FORMS["fixed, host"], **SETTINGS)
    build = finish(made.plan, made.packages, made.table, source, tmp_path / "fixed")
    if bundles == "each":
        manifest = load_json(build / "model.json")
        for part in manifest["parts"]:
            part["program"]["bundles"] = {name: f"{part['program']['path']}/{name}.mlmodelc" for name in ("t1", "t4")}
        write_json(build / "model.json", manifest)
    variant, found = packed_and_measured(build, tmp_path)
    assert (variant["described"]["shapes"], variant["described"]["bundles"]) == ("fixed", bundles)
    compiled = [package.load_spec(path).mlProgram for path in (tmp_path / "kit").glob("**/compiled/fixed/*.mlmodelc")]
    expected = {"main"} if bundles == "each" else {"t1", "t4"}
    assert [set(program.functions) for program in compiled] == 4 * [expected]
    for part in variant["parts"]:
        assert [(one["function"], one["widths"]) for one in part["programs"]] == [("t1", [1]), ("t4", [4])]
        for place, width in enumerate((1, 4)):
            assert found[f"{part['name']}.{place}/parity.T={width}"]["value"]["psnr"] > 40
            rows = found[f"{part['name']}.{place}/residency.T={width}"]["value"]["rows"]
            assert {row["function"] for row in rows} == {f"t{width}"}
    assert found["pass.T=4"]["value"]["programs"] == 2
    assert found["pass.T=4"]["value"]["agree"] == found["pass.T=4"]["value"]["tokens"]


@pytest.mark.parametrize("state", ["graph", "host"])
def test_programs_that_take_adapters_are_measured_with_zeros(tmp_path: Path, state: str) -> None:
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS), tmp_path / "source")
    made = program_forms.build(source, tmp_path, {"shapes": "fixed", "state": state, "adapters": 8}, **SETTINGS)
    build = finish(made.plan, made.packages, made.table, source, tmp_path / "adapted")
    variant, found = packed_and_measured(build, tmp_path)
    assert variant["parts"][0]["kind"] == "layers"
    for place, width in enumerate((1, 4)):
        assert found[f"{variant['parts'][0]['name']}.{place}/parity.T={width}"]["value"]["psnr"] > 40
    assert found["pass.T=4"]["value"]["agree"] == found["pass.T=4"]["value"]["tokens"]


def test_labels_rows_of_the_head_are_measured_and_no_pass_runs_them(tmp_path: Path) -> None:
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS), tmp_path / "source")
    made = program_forms.build(source, tmp_path, {"labels": [" return", "None"]}, **SETTINGS)
    build = finish(made.plan, made.packages, made.table, source, tmp_path / "labelled")
    variant, found = packed_and_measured(build, tmp_path)
    assert [part["kind"] for part in variant["parts"]] == ["layers", "head", "labels"]
    for width in (1, 4):
        assert found[f"labels/parity.T={width}"]["value"]["psnr"] > 40
        assert found[f"labels/residency.T={width}"]["status"] == "ok"
    assert found["pass.T=4"]["value"]["agree"] == found["pass.T=4"]["value"]["tokens"]
    assert found["pass.T=4"]["value"]["programs"] == 2  # of three
    assert found["widths.T=4"]["value"]["programs_apart"].keys() == {part["name"] for part in variant["parts"]}


def test_a_pass_leaves_a_drafter_out(tmp_path: Path) -> None:
    """The drafter's programs are loaded, and what a recorded pass would tell says why it was not run."""
    source, head = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint"), tmp_path / "source"), tmp_path / "head"
    tiny.fetched(heads.write_head(head), source / "drafter")
    made = tiny.converted(source, tmp_path, topology="auto", head={"slices": 1}, drafter={"path": str(head)})
    build = finish(made.plan, made.packages, made.table, source, tmp_path / "drafted")
    variant, found = packed_and_measured(build, tmp_path)
    names = [part["name"] for part in variant["parts"]]
    drafts = [name for name in names if name.startswith("draft_")]
    assert drafts and found["pass.T=1"]["value"]["programs"] == len(names) - len(drafts)
    for name in drafts:
        assert (found[f"{name}/load.warm"]["status"], found[f"{name}/parity.T=1"]["status"]) == ("ok", "not_run")
    assert not {*drafts} & found["widths.T=4"]["value"]["programs_apart"].keys()
