"""Questions that only a Mac answers: how else a program may be loaded, and what passes do beside their usual work."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from kit_runner.kit import read_kit
from kit_runner.main import option_parser
from kit_runner.plan import groups
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.device.rank import rank_builds
from shardmill.device.recording import import_result

from .measuring import HERE, command, environment, lines, measured
from .test_round import SCHEMA, on_a_mac, own  # noqa: F401 (a fixture)

UNITS = ("layers_00_02", "head_0")
HINTED = "CPU_AND_NE {'reshapeFrequency': 'Infrequent'}"


@pytest.mark.thorough
def test_a_program_is_loaded_with_its_hint_and_without_on_the_cpu_and_from_another_compiler(kit: Path) -> None:
    found = measured(kit, LOADS=str(kit / "loads"))
    jsonschema.validate(found, SCHEMA)
    done = set((kit / "loads").read_text().splitlines())
    ways = (HINTED, "CPU_AND_NE", "CPU_ONLY {'reshapeFrequency': 'Infrequent'}", "portable")
    assert done == {f"{unit}: {way}" for unit in UNITS for way in ways}
    for unit in UNITS:
        for name in ("load.unhinted", "load.cpu", "load.portable"):
            assert lines(found)[f"{unit}/{name}"]["timing"]["load_seconds"] >= 0
        for name in ("speed.unhinted.T=4", "speed.cpu.T=1", "switch", "switch.unhinted"):
            assert lines(found)[f"{unit}/{name}"]["timing"]["ms"] > 0
        assert lines(found)[f"{unit}/load.portable"]["value"]["psnr"] > 60
        plan = lines(found)[f"{unit}/residency.T=4"]["timing"]
        assert plan["plan_seconds"] > 0 and plan["peak_bytes"] >= plan["peak_bytes_before"] > 0
    apart = lines(found)["widths.T=4"]["value"]
    assert apart["programs_apart"].keys() == set(UNITS) and apart["tokens"] == apart["agree"] == 8
    assert 0 < apart["width_error_fp16"] < 1e-2 and 0 <= apart["margin"] < 1


@pytest.mark.thorough
def test_what_was_found_stands_on_the_terminal(kit: Path) -> None:
    done = subprocess.run(
        command(kit, "--only", "widths"),
        check=True,
        env=environment(kit, HERE / "fake"),
        capture_output=True,
        text=True,
    )
    assert re.search(r"tiny/widths\.T=4: ok, [0-9.]+ s, width_error_fp16 [0-9.e-]+, margin [0-9.e-]+", done.stdout)
    assert re.search(r"tiny/head_0/load\.first: ok, [0-9.]+ s, load_seconds [0-9.e-]+", done.stdout)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["CPU_AND_NE", "portable"])
def test_what_fails_only_if_it_is_loaded_otherwise_is_no_trouble_of_the_build(
    kit: Path,
    own: Path,  # noqa: F811
    tmp_path: Path,
    way: str,
) -> None:
    found = lines(measured(kit, FAULT=f"way:{way}"))
    failed = {key for key, line in found.items() if line["status"] == "refused"}
    assert failed == {f"{unit}/load.{'portable' if way == 'portable' else 'unhinted'}" for unit in UNITS}
    import_result(on_a_mac(kit / "result.json", tmp_path / "mac.json"), [own])
    (row,) = rank_builds([own])
    assert (row["place"], row["trouble"]) == (1, "")
    assert not any("bisect" in key for key in found)


@pytest.mark.thorough
def test_the_crash_of_arrays_that_core_ml_alone_holds_is_told_and_nothing_else_has_it(kit: Path) -> None:
    """The fake engine crashes at any pass whose inputs nobody else holds, where Core ML may crash a second later."""
    found = lines(measured(kit, "--soak", "0.5", FAULT="crash:fresh"))
    line = found.pop("soak.fresh")
    assert line["status"] == "crashed" and "killed by SIGSEGV in passes" in line["detail"]
    assert found["soak.kept"]["timing"]["passes"] > 0
    assert {line["status"] for key, line in found.items() if not key.startswith("energy")} == {"ok"}


def asked(kit: Path, *names: str) -> Iterator[str]:
    """The measurements of a run for some names, beside those that they need."""
    found = lines(measured(kit, "--only", *names))
    yield from sorted(key for key in found if key.rsplit("/", 1)[-1].startswith(names))
    yield from sorted({key.rsplit("/", 1)[-1] for key in found if not key.rsplit("/", 1)[-1].startswith(names)})


@pytest.mark.thorough
def test_a_question_is_answered_alone(kit: Path) -> None:
    assert list(asked(kit, "load.portable")) == [f"{unit}/load.portable" for unit in reversed(UNITS)]
    assert list(asked(kit, "widths")) == ["widths.T=4", "compile", "load.first", "load.portable", "load.whole"]
    done = subprocess.run(
        command(kit, "--only", "sped"), check=False, env=environment(kit, HERE / "fake"), capture_output=True, text=True
    )
    assert done.returncode == 1 and "--only sped: no such measurement; choose from compile, " in done.stderr


def test_a_build_that_is_loaded_with_another_hint_is_another_build(kit: Path, own: Path, tmp_path: Path) -> None:  # noqa: F811
    """Their packages are the same. A kit that says nothing of hints is of an older shardmill."""
    measured(kit, "--only", "compile")
    manifest = json.loads((own / "model.json").read_text())
    (own / "model.json").write_text(json.dumps({**manifest, "reshape_frequency": "frequent"}))
    said = CliRunner().invoke(app, ["device", "import", str(kit / "result.json"), str(own)])
    assert said.exit_code == 1 and "its programs (tiny) are not those of" in said.output


def test_each_question_of_the_page_is_a_command_of_measure_py(kit: Path) -> None:
    """And each measurement that an answer is told by is made by it, or with it."""
    section = (
        (Path(__file__).parents[2] / "docs/on-a-mac.md").read_text().partition("## Questions for the first Mac\n")[2]
    )
    commands = re.findall(r"`measure\.py (--only [^`]*)`", section)
    assert len(commands) >= 8
    every = {m.kind for group in groups(read_kit(kit), soaks=True) for m in group.measurements}
    for row in (row for row in section.splitlines() if row.startswith("|") and "--only" in row):
        options = option_parser().parse_args(re.findall(r"`measure\.py (--only [^`]*)`", row)[0].split())
        made = {
            m.kind
            for group in groups(read_kit(kit), soaks=options.soak > 0, only=options.only)
            for m in group.measurements
        }
        told = {name.partition(".T=")[0] for name in re.findall(r"`([a-z.]+(?:\.T=N)?)`", row)} & every
        assert told <= made | {"parity", "load.first"}, row
