"""A built model through the real engine: every drafter and policy says what plain decoding and transformers say."""

import json
import sys
from pathlib import Path
from types import ModuleType

import limits
import numpy as np
import pytest
import tiny
from decode.test_mutants import bonus_from_the_wrong_row
from lab_script import load_script

from shardmill.plan import write_part
from shardmill.runtime.manifest import runtime_manifest

NEW = 20


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("exactness")


@pytest.fixture(scope="module")
def folder(built: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny build laid out as a finished one, packages in place of bundles."""
    root = tmp_path_factory.mktemp("exact")
    (root / "source").symlink_to(built.source)
    (root / "embedding.safetensors").symlink_to(built.table)
    for name in ("parts", "packages"):
        (root / name).mkdir()
    programs = {}
    for name, package in built.packages.items():
        (root / "packages" / f"{name}.mlpackage").symlink_to(package)
        write_part(root / "parts" / f"{name}.json", built.parts[name])
        programs[name] = {"path": f"packages/{name}.mlpackage"}
    content = runtime_manifest(built.plan, programs, {"path": "embedding.safetensors"})
    content["tokenizer"] = {"path": "source/tokenizer.json"}
    (root / "model.json").write_text(json.dumps(content))
    (root / "plan.json").write_text(json.dumps(built.plan))
    return root


@pytest.fixture(scope="module")
def tasks(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short prompt per task, some repeating themselves."""
    root = tmp_path_factory.mktemp("tasks")
    texts = ("def one(self):\n    return one", "the summary: the", "a = 1\nb = 2\na = ", "x, y, x, y, x,", "Once upon")
    for task, text in zip(bench.TASKS, texts, strict=True):
        (root / task).mkdir()
        (root / task / "1.txt").write_text(text + "\n")
    return root


def arguments(folder: Path, tasks: Path, *more: str) -> list[str]:
    return [str(folder), "--tasks", str(tasks), "--new-tokens", str(NEW), "--prompts", "6", *more]


@pytest.mark.usefixtures("fp32")
def test_all_say_the_same_as_plain_decoding_and_transformers(
    bench: ModuleType, folder: Path, tasks: Path, tmp_path: Path
) -> None:
    figures, record = tmp_path / "figures.json", tmp_path / "record.jsonl"
    assert bench.main(arguments(folder, tasks, "--json", str(figures), "--record", str(record))) == 0
    scores = {score["name"]: score for score in json.loads(figures.read_text())["scores"]}
    assert len(scores) == 1 + len(bench.DRAFTERS) * len(bench.POLICIES)
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert {row["task"] for row in rows} == set(bench.TASKS)
    assert all(score["tokens"] == NEW * len(rows) and not score["differences"] for score in scores.values())
    for name in bench.DRAFTERS:
        assert scores[f"{name}, always"]["drafted"] > scores[f"{name}, always"]["accepted"] > 0


@pytest.mark.usefixtures("fp32")
def test_a_wrong_acceptance_loop_is_found_out(
    bench: ModuleType, folder: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the first wrong token is named."""
    monkeypatch.setattr(sys.modules["drafted_decoding.generate"], "accept", bonus_from_the_wrong_row)
    assert bench.main(arguments(folder, tasks, "--drafters", "suffix")) == 1
    assert "suffix, always: code_edit prompt 0" in capsys.readouterr().out


@pytest.mark.usefixtures("fp32")
def test_other_weights_are_found_out(bench: ModuleType, folder: Path) -> None:
    """The witness speaks for the packages' weights: with one tensor changed it says something else."""
    engine, _ = bench.load(folder, "fp32")
    prompt = [5, 9, 5, 9, 12]
    case = bench.plain(bench.Session(engine), "task", prompt, 40)
    greedy = bench.witness(folder)
    assert greedy(prompt, 40) == list(case.tokens)
    engine.table = engine.table[::-1]
    assert list(bench.plain(bench.Session(engine), "task", prompt, 40).tokens) != greedy(prompt, 40)


def test_rows_of_both_widths_are_compared(bench: ModuleType, folder: Path) -> None:
    engine, _ = bench.load(folder, "fp32")
    found = bench.row_differences(engine, list(range(1, 31)))
    assert found["compared"] == 28
    assert 0 <= found["median"] <= found["largest"]
    rows = bench.fed(engine, list(range(1, 31)), 1)
    largest = limits.model(tiny.LAYERS, tiny.FFN).value * float(np.linalg.norm(rows, axis=-1).max())
    limits.agrees("rows of two widths", found["largest"], limits.Limit(largest, "model in fp32, of the largest row"))
    assert found["argmax_different"] == 0
