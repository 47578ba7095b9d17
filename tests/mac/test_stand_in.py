"""The simulated Mac is one to whoever asks, and its native module is as strict as coremltools 9.0's."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes import succeeded

from mac import driver

pytestmark = driver.LINUX_ONLY
NOT_CONVERTIBLE = "RuntimeError: value type not convertible"


@dataclass(frozen=True)
class Seen:
    """What inside.py found, and what was logged meanwhile."""

    system: dict[str, Any]
    rules: dict[str, Any]
    log: Path


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """One process tries everything."""
    folder = tmp_path_factory.mktemp("inside")
    (folder / "tmp").mkdir()
    found = driver.run(
        str(driver.HERE / "inside.py"), str(folder), log=folder / "log", TMPDIR=str(folder / "tmp"), MAC_VERSION="15.6"
    )
    succeeded(found)
    return Seen(**json.loads(found.stderr.splitlines()[-1]), log=folder / "log")


def test_the_system_is_a_mac(seen: Seen) -> None:
    assert seen.system["platform"] == "darwin" and seen.system["is_darwin"]
    assert seen.system["names"] == ["Darwin", "arm64", "15.6", "Darwin"]
    assert seen.system["version"] == "15.6\n" and seen.system["chip"] == "Apple M4 (simulated)\n"
    assert seen.system["native"] == "libcoremlpython.py"


def test_what_macos_lacks_is_absent(seen: Seen) -> None:
    assert seen.system["absent"] == [False, False, False]
    *exist, opened = seen.system["proc"]
    assert exist == [False, False] and opened.startswith("FileNotFoundError")


def test_what_macos_does_otherwise(seen: Seen) -> None:
    assert seen.system["start"] == "spawn"
    assert seen.system["peak_in_bytes"]
    assert seen.system["threads"], "torch finds its own libraries"


def test_programs_for_x86_64_do_not_start(seen: Seen) -> None:
    """PuLP brings its solver for macOS as an x86_64 program, which needs Rosetta."""
    assert seen.system["solver"].startswith("OSError: [Errno 86] Bad CPU type in executable")
    assert driver.events(seen.log, "bad_cpu_type")


@pytest.mark.parametrize("given", ["fp16", "int64", "bool", "read-only", "reversed"])
def test_predict_refuses_arrays(seen: Seen, given: str) -> None:
    assert seen.rules[given] == NOT_CONVERTIBLE


def test_refused_arrays_are_logged(seen: Seen) -> None:
    found = [(row["why"], row.get("dtype")) for row in driver.events(seen.log, "rejected")]
    assert found == [
        ("dtype", "float16"),
        ("dtype", "int64"),
        ("dtype", "bool"),
        ("read-only", "float32"),
        ("strides", "float32"),
        ("dtype", "float16"),  # write_state
    ]


@pytest.mark.parametrize("given", ["fp32", "fp16 through coremltools", "hints", "read"])
def test_halves_come_back_as_floats(seen: Seen, given: str) -> None:
    assert seen.rules[given] == "float32"


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("list", "Feature x is required but not specified."),
        ("missing", "Feature x is required but not specified."),
        ("number", "The model expects input feature x to be an array"),
        ("too many tokens", "input 'x' has shape [1, 4, 5, 1]"),
        ("no state", "The input feature for kept must be an MLState"),
        ("no bundle", "A valid manifest does not exist at path"),
        ("no package", "Failed to compile"),
    ],
)
def test_errors_are_dictionaries_of_several_lines(seen: Seen, given: str, error: str) -> None:
    first, text, last = seen.rules[given].split("\n")
    assert first == "RuntimeError: {" and last == "}"
    assert text.startswith(f'    NSLocalizedDescription = "{error}') and text.endswith('";')


def test_features_that_no_input_names_are_ignored(seen: Seen) -> None:
    assert seen.rules["more"] == ["hidden"]


@pytest.mark.parametrize("given", ["names", "one argument", "hints are no dictionary"])
def test_signatures_are_exact(seen: Seen, given: str) -> None:
    assert seen.rules[given].startswith("TypeError")


def test_states(seen: Seen) -> None:
    assert seen.rules["class of states"] == "_State"
    assert seen.rules["write fp32"] is None
    assert seen.rules["write fp16"] == NOT_CONVERTIBLE
    assert seen.rules["write shape"].startswith("RuntimeError: The shapes of the source")
    assert seen.rules["read other"] == "RuntimeError: The state with name other is not found"


def test_hints_reach_the_native_module(seen: Seen) -> None:
    hints = [row["hints"] for row in driver.events(seen.log, "load")]
    assert hints == [{}, {"reshapeFrequency": "Infrequent"}]
    assert seen.rules["hint of a number"] == "RuntimeError: Unable to cast Python instance to C++ type"


def test_plans_name_operations_as_core_ml_does(seen: Seen) -> None:
    devices, evidence, after_its_plan = seen.rules["plan"]
    assert devices["ios18.add"] == "MLCPUComputeDevice" and devices["const"] is None
    assert not evidence, "only the portable engine predicts"
    assert after_its_plan is None, "operations end with their plan"


def test_a_compilation_without_a_destination_stays(seen: Seen) -> None:
    assert seen.rules["left"] == 1
    assert len(driver.events(seen.log, "compile")) == 2


def test_first_passes_are_logged_once_for_each_shape(seen: Seen) -> None:
    assert [row["tokens"] for row in driver.events(seen.log, "first_pass")] == [1, 2]


def test_linux_is_as_it_was() -> None:
    """Without the command nothing is simulated, whatever is on the path."""
    site = {"PYTHONPATH": str(driver.HERE / "site")}
    found = subprocess.check_output([sys.executable, "-c", "import sys; print(sys.platform)"], env=site, text=True)
    assert found == f"{sys.platform}\n"
