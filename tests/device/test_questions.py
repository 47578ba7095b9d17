"""Questions about a system, from the kit to what is said of them here, on the portable engine with small programs."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import portable_coreml
import pytest
from kit_runner import probes
from kit_runner.job import MeasurementJob, WrongError
from kit_runner.kit import Kit, read_kit
from typer.testing import CliRunner

from shardmill.cli import app
from shardmill.device.kit import write_kit
from shardmill.device.questions import questions, told
from shardmill.errors import ShardmillError
from shardmill.evidence.folder import LIMITS
from shardmill.files import load_json, sealed, write_json

from .measuring import unpacked

ROOT = Path(__file__).parents[2]
runner = CliRunner()


def small() -> list[dict[str, Any]]:
    """The questions, with programs that take no time."""
    found = copy.deepcopy(questions())
    for probe in (probe for question in found for probe in question["probes"]):
        for name in {"queries", "keys", "inputs", "outputs"} & probe.keys():
            probe[name] //= 16
        if "bytes" in probe:
            probe |= {"bytes": probe["bytes"] >> 14, "width": 64}
        if "window" in probe:
            probe["window"] = 8
    return found


EVERY = [(question["name"], place) for question in questions() for place in range(len(question["probes"]))]


def job(folder: Path, name: str) -> MeasurementJob:
    kit = Kit(folder, "", {"questions": small(), "variants": []})
    task = {"variant": "questions", "unit": name, "engine": "portable_coreml", "passes": 1}
    return MeasurementJob(kit, folder / "work", task, lambda stage: None)


@pytest.mark.parametrize(("name", "place"), EVERY)
def test_each_program_computes_what_numpy_says(name: str, place: int, tmp_path: Path) -> None:
    with portable_coreml.emulated(), portable_coreml.loading_as("fp16"):
        found = probes.probe(job(tmp_path, name), place)
    assert found.value["evidence"] == "predicted" and found.value["of"] > 0
    assert found.value["error"] < probes.ERROR / 4
    assert ("ms_cpu" in found.timing) is (name == "weights")
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("name", ["weights", "scores", "deep"])
def test_a_wrong_row_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of several, with all other numbers right."""
    predict = MeasurementJob.predict

    def wrong(self: MeasurementJob, model: Any, inputs: Any, state: Any) -> Any:
        out = {key: np.array(value) for key, value in predict(self, model, inputs, state).items()}
        out["y"][:, :, 1] = out["y"][:, :, 0]
        return out

    monkeypatch.setattr(MeasurementJob, "predict", wrong)
    with portable_coreml.emulated(), portable_coreml.loading_as("fp16"), pytest.raises(WrongError, match="off by"):
        probes.probe(job(tmp_path, name), 0)


def test_a_kit_may_hold_questions_alone(tmp_path: Path) -> None:
    """It is small enough to send to anybody; without questions and builds there is nothing to measure."""
    done = runner.invoke(app, ["device", "kit", "--questions", "-o", str(tmp_path / "kit.zip")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "kit.zip").stat().st_size < 1 << 20
    assert read_kit(unpacked(tmp_path / "kit.zip", tmp_path)).questions == questions()
    nothing = runner.invoke(app, ["device", "kit", "-o", str(tmp_path / "no.zip")])
    assert nothing.exit_code == 1 and "name builds to measure" in nothing.output


def test_no_variant_is_called_as_the_questions_are(build: Path, tmp_path: Path) -> None:
    shutil.copytree(build, tmp_path / "questions")
    with pytest.raises(ShardmillError, match="rename the folder"):
        write_kit([tmp_path / "questions"], tmp_path / "kit.zip")


def answered(system: str, *placed: int) -> dict[str, Any]:
    """A result of a Mac, of whose programs of growing size so many operations were placed."""
    asked = [{**one, "probes": one["probes"][: len(placed)]} for one in questions() if one["name"] == "weights"]
    value = {"evidence": "measured", "of": 2, "error": 0.0}
    lines = {
        f"questions/weights/probe#{i}": {
            "status": "ok",
            "value": {**value, "placed": count},
            "timing": {"ms": 1.0, "ms_cpu": 3.0},
            "detail": "",
        }
        for i, count in enumerate(placed)
    }
    machine = {"chip": "M5", "os": "macOS", "system": system, "build": "26A1", "memory_bytes": 1 << 34}
    machine |= {"python": "3.12.1", "packages": {}}  # type: ignore[dict-item]
    content = {
        "format": 1,
        "kind": "shardmill device measurements",
        "kit": "0" * 64,
        "machine": machine,
        "variants": {},
    }
    return {**content, "engine": {"name": "coreml"}, "questions": {"asked": asked, "measurements": lines}}


@pytest.mark.parametrize(
    ("system", "placed", "expected"),
    [
        ("27.0.1", (0, 2, 0, 0), []),
        ("27.1", (2, 2, 0, 0), ["macOS 27: takes 1.01 GiB, while the limit is 1.00 GiB here (rule W1, confidence C)"]),
        ("26.2", (0, 2, 0, 2), ["macOS 26: does not take 1.01 GiB, while the limit is 2.00 GiB here"]),
        ("30.0", (2, 2, 2, 2), []),
    ],
)
def test_an_answer_that_contradicts_a_limit_is_named(
    system: str, placed: tuple[int, ...], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = sealed(answered(system, *placed))
    jsonschema.validate(content, load_json(ROOT / "docs/device.schema.json"))
    write_json(tmp_path / "result.json", content)
    done = runner.invoke(app, ["device", "import", str(tmp_path / "result.json")])
    assert done.exit_code == 0, done.output
    first, *others = (line for line in done.output.splitlines() if not line.startswith(LIMITS))
    assert first.startswith("Programs of what size run on the Neural Engine?")
    assert [line[: len(wanted)] for line, wanted in zip(others, expected, strict=True)] == expected
    assert list(told(SimpleNamespace(get=lambda name: None))) == []  # type: ignore[arg-type]
