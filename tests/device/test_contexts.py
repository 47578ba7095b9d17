"""A kit of a build with shorter contexts: passes are measured in each, and come back as figures of the one build."""

from __future__ import annotations

from pathlib import Path

import program_forms
import pytest
import tiny
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.device.kit import write_kit
from shardmill.device.rank import rank_builds
from shardmill.device.recording import import_result
from shardmill.evidence.file import of_build
from shardmill.files import load_json, sealed, write_json
from shardmill.report.residency import device_sections

from .finished import LAYERS, SETTINGS, finish
from .measuring import measured, unpacked

pytestmark = pytest.mark.slow

SHORT, WHOLE = 16, 64
MS = {"laddered": {1: 8.0, 4: 9.0}, f"laddered@{SHORT}": {1: 2.0, 4: 3.0}}


def test_passes_are_measured_in_each_context(tmp_path: Path) -> None:
    source = tiny.fetched(tiny.write_checkpoint(tmp_path / "checkpoint", layers=LAYERS), tmp_path / "source")
    program = {"shapes": "fixed", "state": "host", "contexts": [SHORT]}
    made = program_forms.build(source, tmp_path, program, **SETTINGS)
    build = finish(made.plan, made.packages, made.table, source, tmp_path / "laddered")
    write_kit([build], tmp_path / "kit.zip")
    kit = unpacked(tmp_path / "kit.zip", tmp_path / "kit")
    whole, short = load_json(kit / "kit.json")["variants"]
    assert [one["described"]["context"] for one in (whole, short)] == [WHOLE, SHORT]
    assert short["described"]["state_bytes"] * WHOLE == whole["described"]["state_bytes"] * SHORT

    content = measured(kit)
    lines = {name: variant["measurements"] for name, variant in content["variants"].items()}
    assert [*lines] == [*MS]
    for found in lines.values():
        assert {line["status"] for key, line in found.items() if not key.startswith("energy")} == {"ok"}
        for width in (1, 4):
            assert found[f"pass.T={width}"]["value"] == {"programs": 2, "tokens": 8, "agree": 8}
    functions = {row["function"] for row in lines[f"laddered@{SHORT}"]["layers_00_02.1/residency.T=4"]["value"]["rows"]}
    assert functions == {f"c{SHORT}_t4"}
    head = [key for key in lines[f"laddered@{SHORT}"] if key.startswith("head")]
    assert not head  # the same functions as of the whole context, whose lines they are

    for name, taken in MS.items():  # as if a Mac had measured it
        for width, ms in taken.items():
            lines[name][f"pass.T={width}"]["timing"]["ms"] = ms
    write_json(kit / "result.json", sealed({**content, "engine": {"name": "coreml"}}))
    import_result(kit / "result.json", [build])
    (row,) = rank_builds([build])
    assert (row["ms"], row["shorter"], row["place"]) == (MS["laddered"], {SHORT: MS[f"laddered@{SHORT}"]}, 1)
    printed = CliRunner().invoke(app, ["device", "rank", str(build)], env={"COLUMNS": "300"}).stdout
    assert f"T=4 in {SHORT} slots: 3.00" in printed
    evidence = of_build(kit / "result.json", load_json(kit / "result.json"), load_json(build / "model.json"))
    assert evidence is not None
    (device,) = device_sections([evidence], [])
    assert [(one.slots, one.width) for one in device.passes] == [(WHOLE, 1), (WHOLE, 4), (SHORT, 1), (SHORT, 4)]
