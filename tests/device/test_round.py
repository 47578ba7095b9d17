"""From end to end: a kit made here, measured by a process that has no shardmill, and taken in here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import coremltools as ct
import jsonschema
import pytest
from processes import succeeded
from typer.testing import CliRunner

from shardmill import machine
from shardmill.cli import app
from shardmill.device.kit import write_kit
from shardmill.device.rank import rank_builds
from shardmill.device.recording import import_result
from shardmill.errors import ShardmillError
from shardmill.files import load_json, sealed, write_json
from shardmill.gates import residency

from .measuring import PORTABLE, environment, lines, measured, result, unpacked

pytestmark = pytest.mark.slow

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/device.schema.json").read_text())
runner = CliRunner()


def on_a_mac(file: Path, target: Path, chip: str = "Apple M4 Max", slower: float = 1.0) -> Path:
    """A result as if Core ML had given it: no Mac is at hand."""
    content = load_json(file)
    content["engine"], content["machine"]["chip"], content["machine"]["os"] = {"name": "coreml"}, chip, "macOS"
    for line in lines(content).values():
        if "ms" in line["timing"]:
            line["timing"]["ms"] *= slower
        if "evidence" in line["value"]:
            line["value"]["evidence"] = "measured"
    write_json(target, sealed(content))
    return target


@pytest.fixture
def own(build: Path, tmp_path: Path) -> Path:
    """A copy of the build, to put evidence into."""
    return Path(shutil.copytree(build, tmp_path / "own"))


@pytest.mark.skipif(sys.platform == "darwin", reason="the portable engine runs where Core ML is not")
def test_from_kit_to_evidence_on_the_portable_engine(kit: Path, own: Path) -> None:
    """And a process that measures has no shardmill: an import of it fails there."""
    env = environment(kit, PORTABLE)
    without = subprocess.run(
        [sys.executable, "-c", "import shardmill"], env=env, capture_output=True, text=True, check=False
    )
    assert "shardmill is not to be had here" in without.stderr
    command = [sys.executable, str(kit / "measure.py"), "--engine", "portable_coreml", "--passes", "2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    succeeded(done)
    jsonschema.validate(result(kit), SCHEMA)
    found = lines(result(kit))
    assert {line["status"] for key, line in found.items() if not key.startswith("energy")} == {"ok"}
    for key, line in found.items():
        if "/parity." in key:  # here the same engine computes as when the kit was made
            assert line["value"]["psnr"] == line["value"]["psnr_expected"] > 60
    assert found["widths.T=4"]["value"]["width_error_fp16"] == 0  # in fp16 it computes every width alike
    assert found["pass.T=1"]["value"]["agree"] == found["pass.T=4"]["value"]["agree"] == 8
    said = runner.invoke(app, ["device", "import", str(kit / "result.json"), str(own)])
    assert said.exit_code == 0, said.output
    (file,) = (own / "evidence").iterdir()
    assert file.read_bytes() == (kit / "result.json").read_bytes() and file.name.endswith("-portable-coreml.json")
    (row,) = rank_builds([own])
    assert row["place"] == 1 and row["system"].endswith("portable_coreml")


def test_the_same_builds_give_the_same_kit(build: Path, packed: Path, tmp_path: Path) -> None:
    write_kit([build], tmp_path / "again.zip")
    assert (tmp_path / "again.zip").read_bytes() == packed.read_bytes()


def test_a_kit_that_is_made_on_a_mac_is_the_same(
    build: Path, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The portable engine runs the packages there too, and Core ML is what it was afterwards."""
    native = ModuleType("coremltools.libcoremlpython")
    monkeypatch.setitem(sys.modules, native.__name__, native)
    monkeypatch.setattr(ct.models.model, "_MLModelProxy", None)  # Core ML's would run something else
    monkeypatch.setattr("coremltools.models._compiled_model._MLModelProxy", None)
    monkeypatch.setattr(machine, "is_portable", lambda: False)
    monkeypatch.setattr(sys, "platform", "darwin")
    write_kit([build], tmp_path / "mac.zip")
    assert (tmp_path / "mac.zip").read_bytes() == packed.read_bytes()
    assert sys.modules[native.__name__] is native and ct.models.model._MLModelProxy is None


def test_a_build_that_is_not_as_it_was_made_is_not_packed(own: Path, tmp_path: Path) -> None:
    file = next((own / "packages").rglob("weight.bin"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(ShardmillError, match=r"weight\.bin: not the file that was made and judged"):
        write_kit([own], tmp_path / "kit.zip")
    assert not (tmp_path / "kit.zip").exists()


def test_two_builds_of_one_name_are_not_packed_together(build: Path, tmp_path: Path) -> None:
    with pytest.raises(ShardmillError, match="two of the builds are called tiny"):
        write_kit([build, build], tmp_path / "kit.zip")


def test_several_builds_make_one_kit_and_each_gets_its_evidence(build: Path, own: Path, tmp_path: Path) -> None:
    """Builds of the same packages are told apart by nothing, so both get it."""
    write_kit([build, own], tmp_path / "two.zip")
    kit = unpacked(tmp_path / "two.zip", tmp_path / "two")
    assert sorted(path.name for path in (kit / "variants").iterdir()) == ["own", "tiny"]


def test_what_is_of_another_build_is_refused(measured_kit: Path, own: Path) -> None:
    manifest = load_json(own / "model.json")
    manifest["packages"]["head_0"]["files"]["Manifest.json"] = "0" * 64
    write_json(own / "model.json", manifest)
    refused = runner.invoke(app, ["device", "import", str(measured_kit / "result.json"), str(own)])
    assert refused.exit_code == 1 and "its programs (tiny) are not those of" in refused.output
    assert not (own / "evidence").exists()


def test_another_run_of_the_same_device_does_not_take_the_place_of_the_first(
    measured_kit: Path, own: Path, tmp_path: Path
) -> None:
    first = on_a_mac(measured_kit / "result.json", tmp_path / "first.json")
    second = on_a_mac(measured_kit / "result.json", tmp_path / "second.json", slower=2)
    import_result(first, [own])
    import_result(first, [own])  # the same once more is nothing new
    with pytest.raises(ShardmillError, match="holds another run on that chip and system"):
        import_result(second, [own])
    import_result(on_a_mac(measured_kit / "result.json", tmp_path / "m3.json", chip="Apple M3"), [own])
    assert len(list((own / "evidence").iterdir())) == 2


def test_the_fastest_build_of_a_checkpoint_wins_on_each_chip(
    measured_kit: Path, build: Path, own: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(own, tmp_path / "other"))
    import_result(on_a_mac(measured_kit / "result.json", tmp_path / "a.json", slower=5), [own])
    import_result(on_a_mac(measured_kit / "result.json", tmp_path / "b.json"), [other])
    import_result(on_a_mac(measured_kit / "result.json", tmp_path / "c.json", chip="Apple M3"), [own])
    rows = rank_builds([own, other])
    assert [(row["system"][:12], Path(row["build"]).name, row["place"]) for row in rows] == [
        ("Apple M3, ma", "own", 1),
        ("Apple M4 Max", "other", 1),
        ("Apple M4 Max", "own", 2),
    ]
    shown = json.loads(runner.invoke(app, ["device", "rank", str(own), str(other), "--json"]).stdout)
    assert [row["place"] for row in shown] == [1, 1, 2]
    assert "Apple M4" in runner.invoke(app, ["device", "rank", str(own), str(other)]).stdout


def test_what_was_not_measured_in_its_narrowest_passes_has_no_place(
    measured_kit: Path, own: Path, tmp_path: Path
) -> None:
    """A token of a wide pass is cheaper, so a build of which nothing else is known would win."""
    other = Path(shutil.copytree(own, tmp_path / "other"))
    import_result(on_a_mac(measured_kit / "result.json", tmp_path / "a.json"), [own])
    content = load_json(on_a_mac(measured_kit / "result.json", tmp_path / "b.json"))
    lines(content)["pass.T=1"] = {"status": "not_run", "value": {}, "timing": {}, "detail": "the disk was full"}
    write_json(tmp_path / "b.json", sealed(content))
    import_result(tmp_path / "b.json", [other])
    assert [(Path(row["build"]).name, row["place"]) for row in rank_builds([own, other])] == [
        ("own", 1),
        ("other", None),
    ]


def test_what_fails_on_a_device_has_no_place(kit: Path, own: Path, tmp_path: Path) -> None:
    measured(kit, FAULT="nan:head_0")
    import_result(on_a_mac(kit / "result.json", tmp_path / "a.json"), [own])
    (row,) = rank_builds([own])
    assert (row["place"], row["trouble"]) == (None, "head_0/parity.T=1 wrong")


def test_diff_residency_takes_a_result(measured_kit: Path, own: Path, tmp_path: Path) -> None:
    """The fake engine's plan puts everything on the Neural Engine, as the rules foresee but for what has no device."""
    file = on_a_mac(measured_kit / "result.json", tmp_path / "mac.json")
    rows, _ = residency.predict(own / "packages/head_0.mlpackage", 4)
    plain = [{"function": row.function, "output": row.output, "status": row.status, "rules": row.rules} for row in rows]
    wrong = next(row for row in plain if row["status"] == "eligible")
    wrong |= {"status": "ineligible", "rules": ["O3"]}
    report = {"part": "head_0", "evidence": "predicted", "rows": plain}
    write_json(own / "residency/head_0.json", report)
    said = runner.invoke(app, ["diff-residency", str(own / "residency/head_0.json"), str(file)])
    assert said.exit_code == 1
    assert f"main {wrong['output']}: predicted ineligible (O3), measured eligible" in said.output
    assert "1 operations differ" in said.output
    other = runner.invoke(
        app, ["diff-residency", str(own / "residency/head_0.json"), str(measured_kit / "result.json")]
    )
    assert other.exit_code == 1 and "holds no measured residency of head_0" in other.output
