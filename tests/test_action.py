"""The GitHub Action that judges packages: its steps, run as GitHub would, on a package and on what is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from shardmill.imports import quiet_coremltools

ACTION = Path(__file__).parent.parent / "portable/action"


def _save(path: Path, factor: float) -> None:
    """Save a program that multiplies its input."""
    with quiet_coremltools():
        import coremltools as ct
        from coremltools.converters.mil import Builder as mb
        from coremltools.converters.mil.mil import types

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 4, 32), dtype=types.fp16)], opset_version=ct.target.iOS17)
    def program(x: Any) -> Any:
        return mb.mul(x=x, y=np.float16(factor), name="y")

    inputs = [ct.TensorType("x", (1, 8, 4, 32), np.float16)]
    model = ct.convert(program, convert_to="mlprogram", inputs=inputs, minimum_deployment_target=ct.target.iOS17)
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save(str(path))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with two packages, of which one overflows fp16 for inputs of its domain."""
    folder = tmp_path_factory.mktemp("repository")
    _save(folder / "models/deep/good one.mlpackage", 1.0)
    _save(folder / "models/deep/bad one.mlpackage", 4e4)
    (folder / "judge.toml").write_text("[range]\nx = [1, 2]\n")
    return folder


def acted(folder: Path, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the steps of the Action that are scripts, with its inputs where GitHub puts them."""
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    given = {name: inputs.pop(name, item.get("default", "")) for name, item in action["inputs"].items()}
    assert not inputs and not [
        name for name, item in action["inputs"].items() if item.get("required") and not given[name]
    ]
    (step,) = (step for step in action["runs"]["steps"] if "run" in step)

    def filled(text: str) -> str:
        return re.sub(r"\$\{\{ (\w+)\.(\w+) \}\}", lambda m: given[m[2]] if m[1] == "inputs" else str(folder), text)

    told = {name: filled(text) for name, text in step["env"].items()}
    surroundings = {
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTION_PATH": str(ACTION),
        "GITHUB_STEP_SUMMARY": str(folder / "summary"),
    }
    env = {**os.environ, **surroundings, **told, "VENV": sys.prefix}
    return subprocess.run(
        [step["shell"], "-c", step["run"]], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.mark.thorough
def test_the_action_judges_annotates_and_summarises(models: Path) -> None:
    """Its exit code fails the job; GitHub shows the lines, the summary and the SARIF."""
    done = acted(models, files="models/**/*.mlpackage", limits="judge.toml")
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("::error ")]
    assert len(lines) == 1
    assert lines[0].startswith("::error file=models/deep/bad one.mlpackage/Manifest.json,title=fp16-overflow")
    assert [line for line in (models / "summary").read_text().splitlines() if line.startswith("### ")] == [
        "### `models/deep/bad one.mlpackage`",
        "### `models/deep/good one.mlpackage`",
    ]
    results = json.loads((models / "judge.sarif").read_text())["runs"][0]["results"]
    assert [result["ruleId"] for result in results if result["level"] == "error"] == ["fp16-overflow"]
    assert acted(models, files="models/deep/good?one.mlpackage", limits="judge.toml").returncode == 0


def test_what_the_action_cannot_judge_fails_the_job_otherwise(models: Path) -> None:
    done = acted(models, files="models/*.mlmodelc")
    assert (done.returncode, "models/*.mlmodelc: no file matches" in done.stderr) == (2, True)
    assert acted(models, files="models/deep/good?one.mlpackage", limits="nowhere.toml").returncode == 2
    nothing = subprocess.run([ACTION / "judge.sh"], env=os.environ, capture_output=True, text=True, check=False)
    assert (nothing.returncode, "FILES names no package" in nothing.stderr) == (2, True)
