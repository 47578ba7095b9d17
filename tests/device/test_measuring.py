"""What measure.py promises: whatever an engine does is a line of the result; a killed run goes on where it was."""

from __future__ import annotations

import ast
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from kit_runner import kit as runner
from kit_runner.kit import sealed
from kit_runner.packages import operations
from kit_runner.plan import PlannedMeasurement, seconds_left
from patience import PATIENCE

from shardmill import files

from .measuring import HERE, command, environment, lines, measured, result, timeless

LAYERS, HEAD = "layers_00_02", "head_0"


@pytest.fixture
def operation(kit: Path) -> str:
    """The output of the last convolution of the layers' program, which has operations behind it."""
    found = operations(kit / f"variants/tiny/packages/{LAYERS}.mlpackage")
    return next(output for kind, output in reversed(found[:-1]) if kind == "conv")


def test_a_sound_engine_gives_a_line_for_everything(measured_kit: Path) -> None:
    found = lines(result(measured_kit))
    statuses = {key: line["status"] for key, line in found.items()}
    assert {key for key, status in statuses.items() if status != "ok"} == {"energy.T=1", "energy.T=4"}
    for unit in (LAYERS, HEAD):
        for width in (1, 4):
            assert found[f"{unit}/parity.T={width}"]["value"]["psnr"] > 60
            assert found[f"{unit}/speed.T={width}"]["timing"]["ms"] > 0
            assert found[f"{unit}/residency.T={width}"]["value"]["evidence"] == "predicted"
    assert found["pass.T=4"]["value"] == {"programs": 2, "tokens": 8, "agree": 8}
    assert found["energy.T=1"]["detail"] == "energy is read on a Mac only"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("hang", "timeout", f"no end of load within {PATIENCE:g} s"),
        ("kill", "crashed", "killed by SIGKILL in load"),
        ("refuse", "refused", "load: Unable to build the MPSGraph: -14"),
    ],
)
def test_a_load_that_fails_is_a_line_with_the_operation_and_the_rest_goes_on(
    kit: Path, operation: str, fault: str, status: str, words: str
) -> None:
    found = lines(measured(kit, "--timeout", f"{PATIENCE:g}", FAULT=f"{fault}:{operation}"))
    assert (found[f"{LAYERS}/load.first"]["status"], words in found[f"{LAYERS}/load.first"]["detail"]) == (status, True)
    bisected = found[f"{LAYERS}/bisect"]
    assert (bisected["value"]["output"], bisected["value"]["layer"]) == (operation, 1)
    assert {*bisected["value"]["probes"].values()} == {"ok", status}
    assert found[f"{LAYERS}/speed.T=1"]["status"] == found["pass.T=1"]["status"] == "not_run"
    assert found[f"{HEAD}/speed.T=4"]["status"] == "ok"


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "words"), [("nan", "not finite"), ("wrong", "dB against fp32, must be at least 30")])
def test_numbers_that_are_wrong_are_a_line(kit: Path, fault: str, words: str) -> None:
    found = lines(measured(kit, FAULT=f"{fault}:{HEAD}"))
    for width in (1, 4):
        line = found[f"{HEAD}/parity.T={width}"]
        assert line["status"] == "wrong" and words in line["detail"]
    assert found[f"{LAYERS}/parity.T=4"]["status"] == "ok"
    if fault == "nan":
        assert found["pass.T=1"]["status"] == "wrong"


@pytest.mark.slow
def test_killed_at_ten_random_points_it_goes_on_and_comes_to_the_same(kit: Path) -> None:
    chance, env = random.Random(14), environment(kit, HERE / "fake")
    for _ in range(10):
        run = subprocess.Popen(command(kit), env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert run.stdout is not None
        for _ in range(chance.randint(2, 7)):
            run.stdout.readline()
        run.send_signal(signal.SIGKILL)
        run.communicate()
        with open(kit / "results.jsonl", "a") as torn:
            torn.write('{"key": "tiny/la')  # as a line that was being written
    again = subprocess.run(command(kit), check=True, env=env, capture_output=True, text=True)
    assert "going on: " in again.stdout
    kept = [json.loads(line) for line in (kit / "results.jsonl").read_text().splitlines()]
    keys = [line["key"] for line in kept[1:] if line["status"] != "not_run"]
    assert len(keys) == len(set(keys)) == 40  # what was finished was not measured again, and no torn line is left
    killed = timeless(result(kit))
    (kit / "results.jsonl").unlink()
    assert killed == timeless(measured(kit))


def hanging(kit: Path, operation: str) -> subprocess.Popen[str]:
    """A run that is at a load without an end."""
    env = environment(kit, HERE / "fake", FAULT=f"hang:{operation}")
    run = subprocess.Popen(command(kit), env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert any("load.first ..." in line for line in run.stdout)
    return run


def test_ctrl_c_says_how_to_go_on_and_leaves_no_child(kit: Path, operation: str) -> None:
    run = hanging(kit, operation)
    (child,) = psutil.Process(run.pid).children()
    run.send_signal(signal.SIGINT)
    _, complaints = run.communicate(timeout=PATIENCE)
    assert (run.returncode, "the same command goes on from here" in complaints) == (130, True)
    assert "Traceback" not in complaints and not child.is_running()


@pytest.mark.thorough
def test_a_child_ends_when_its_parent_is_killed(kit: Path, operation: str) -> None:
    """Or a load that hangs would hold the engine for ever."""
    run = hanging(kit, operation)
    (child,) = psutil.Process(run.pid).children()
    run.kill()
    run.communicate(timeout=PATIENCE)
    psutil.wait_procs([child], timeout=PATIENCE)
    assert not child.is_running()


@pytest.mark.thorough
def test_what_was_measured_is_not_measured_again(measured_kit: Path) -> None:
    before = lines(result(measured_kit))
    again = lines(measured(measured_kit, FAULT=f"kill:{HEAD}"))
    assert {key: line for key, line in again.items() if not key.startswith("energy")} == {
        key: line for key, line in before.items() if not key.startswith("energy")
    }


def test_results_of_another_kit_or_system_are_refused(kit: Path) -> None:
    (kit / "results.jsonl").write_text('{"kit": "another"}\n')
    done = subprocess.run(
        command(kit), check=False, env=environment(kit, HERE / "fake"), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "is of another kit, engine or system; move it away and start again" in done.stderr


@pytest.mark.parametrize("change", ["changed", "missing"])
def test_a_file_that_is_not_as_packed_ends_the_run_before_it_begins(kit: Path, change: str) -> None:
    file = next((kit / "variants").rglob("weight.bin"))
    if change == "missing":
        file.unlink()
    else:
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    done = subprocess.run(
        command(kit), check=False, env=environment(kit, HERE / "fake"), capture_output=True, text=True
    )
    assert done.returncode == 1 and str(file) in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (kit / "results.jsonl").exists()


def test_without_core_ml_it_says_what_to_do(kit: Path) -> None:
    done = subprocess.run(
        command(kit)[:2], check=False, env=environment(kit, HERE / "fake"), capture_output=True, text=True
    )
    assert done.returncode == 1 and "run it on a Mac" in done.stderr


def test_the_runner_is_python_3_10_and_takes_nothing_but_numpy_and_coremltools() -> None:
    for file in Path(runner.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(), feature_version=(3, 10))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                known = name.split(".")[0] in {"numpy", "coremltools", *sys.stdlib_module_names} - {"tomllib"}
                assert known or name.startswith("kit_runner"), f"{file.name} imports {name}"


def test_the_seal_is_that_of_every_record() -> None:
    content = {"b": [1, 2.5, "é"], "a": None}
    assert sealed(content) == files.sealed(content)


def test_the_estimate_goes_by_kind_and_weights() -> None:
    known = [
        PlannedMeasurement(f"m/{unit}/{kind}", (), size) for unit, size in (("a", 10), ("b", 30)) for kind in ("x", "y")
    ]
    done = {"m/a/x": {"timing": {"seconds": 2.0}}, "m/a/y": {"timing": {"seconds": 5.0}}}
    assert seconds_left([known[2]], done, known) == 6.0
    assert seconds_left(known[2:], done, known) == 21.0
    assert seconds_left([PlannedMeasurement("m/a/z", (), 10)], done, known) == 3.5
    assert seconds_left(known, {}, known) == 0.0
