"""`shardmill diff`: each kind of difference between two builds is told by its name, and none where there is none."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
from pipeline import driver

from shardmill.release.compare import compare_builds, reasons

from .signed import run

TEXT = {"text": "text.txt", "positions": 16, "perplexity_positions": 48}


def built(root: Path, checkpoint: Path, **changes: Any) -> Path:
    """A tiny build up to its attestations."""
    settings = tiny.settings(str(checkpoint), topology=[[0, 2]], head={"slices": 1}, parity=TEXT) | changes
    driver.run(root, settings, ("benchmark", "report"))
    return root / "build/tiny"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_checkpoint(tmp_path_factory.mktemp("diff") / "checkpoint", layers=2)


@pytest.fixture(scope="module")
def first(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text(tiny.sample_text())
        return built(folder, checkpoint)


@pytest.fixture(scope="module")
def second(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with weights in fp16, cut into two parts."""
    folder = tmp_path_factory.mktemp("second")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("text.txt").write_text(tiny.sample_text())
        return built(folder, checkpoint, topology=[[0, 1], [1, 2]], convert={"precision": "fp16"})


def test_a_build_does_not_differ_from_itself(first: Path) -> None:
    assert (compare_builds(first, first), reasons(first, first)) == ([], [])
    assert run("diff", first, first) == (0, "no difference\n")


def test_model_json_is_compared_as_it_lies_there(first: Path, tmp_path: Path) -> None:
    """It is what a runtime reads, whatever the attestation says of it."""
    other = tmp_path / "tiny"
    shutil.copytree(first, other, symlinks=True)
    file = other / "model.json"
    content = json.loads(file.read_text())
    file.unlink()
    file.write_text(json.dumps(content | {"vocab": content["vocab"] + 1}))
    assert [(each.kind, each.name) for each in compare_builds(first, other)] == [("bytes", "model.json")]
    for damaged in ("", "[" * 100_000, "{}"):
        file.write_text(damaged)
        code, said = run("diff", first, other)
        assert code == 1 and "model.json" in said and said.count("\n") == 1
    file.unlink()
    assert run("diff", first, other)[0] == 1


@pytest.mark.thorough
def test_what_was_chosen_and_what_came_of_it(first: Path, second: Path) -> None:
    found = compare_builds(first, second)
    by_name = {(each.kind, each.name): (each.before, each.after) for each in found}
    assert by_name["config", "convert.precision"] == ("int8", "fp16")
    assert by_name["config", "topology"] == ([[0, 2]], [[0, 1], [1, 2]])
    assert by_name["part", "layers_00_02"] == ("layers 0 to 2", None)
    assert by_name["part", "layers_01_02"] == (None, "layers 1 to 2")
    (before, after) = by_name["weights", "head_0 int8"]
    assert "tensors" in before and after is None
    (before, after) = by_name["operations", "head_0 main: constexpr_blockwise_shift_scale"]
    assert before > 0 and after is None
    (before, after) = by_name["verdict", "parity/stack.kl (must be <= 0.02)"]
    assert before > after >= 0
    assert not {kind for kind, _ in by_name} & {"checkpoint", "package", "tensor", "workflow", "figure"}


def test_the_steps_that_explain_it_come_first(first: Path, second: Path) -> None:
    why = reasons(first, second)
    assert "packages/head_0: params.forms differ" in why
    assert why.index("packages/head_0: params.forms differ") < why.index("compiled/head_0: other inputs (package)")


def test_other_tensors_are_named(first: Path, checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from safetensors.torch import load_file, save_file

    changed = tiny.copied_checkpoint(checkpoint, tmp_path / "changed")
    (file,) = [file for file in changed.glob("*.safetensors") if "model.norm.weight" in load_file(file)]
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2
    file.unlink()
    save_file(tensors, file, {"format": "pt"})
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(tiny.sample_text())
    found = compare_builds(first, built(tmp_path, changed))
    assert [each.name for each in found if each.kind == "tensor"] == ["model.norm.weight"]
    assert [each.name for each in found if each.kind == "checkpoint"] == [f"source/{file.name}"]


def test_a_person_reads_a_few_lines_and_a_program_all(first: Path, second: Path) -> None:
    code, text = run("diff", first, second)
    assert code == 0 and "different in the config:\n  convert.precision: int8 -> fp16" in text
    assert "more (--all shows them)" in text and "more" not in run("diff", first, second, "--all")[1]
    content = json.loads(run("diff", first, second, "--json")[1])
    assert {"kind", "name", "before", "after"} == content["differences"][0].keys() and content["reasons"]
    counts = Counter(row["kind"] for row in content["differences"]).values()
    assert sorted(re.findall(r"and (.*) more", text)) == sorted(str(count - 12) for count in counts if count > 12)


def test_measured_figures_differ_as_well(first: Path, second: Path) -> None:
    for build, seconds in ((first, 0.5), (second, 0.25)):
        (build / "benchmark").mkdir()
        (build / "benchmark/speed.json").write_text(json.dumps({"pass_seconds": {"1": seconds}}))
    found = [each for each in compare_builds(first, second) if each.kind == "figure"]
    assert [(each.name, each.before, each.after) for each in found] == [("pass_seconds.1", 0.5, 0.25)]


@pytest.mark.parametrize("content", ["{}", "null", '{"gate": [{}]}', '{"gate": [null]}', '{"gate": 7}'])
def test_a_verdict_that_is_none_is_named(first: Path, tmp_path: Path, content: str) -> None:
    other = tmp_path / "tiny"
    shutil.copytree(first, other, symlinks=True)
    (other / "parity/stack.json").unlink()
    (other / "parity/stack.json").write_text(content)
    code, said = run("diff", first, other)
    assert code == 1 and "parity/stack.json: is no verdict of a gate; build again" in said and said.count("\n") == 1


# What versions before did not know, by the table of a part's file that lacks it: "" for the whole.
LATER = {"": ("lent", "taps", "drafter"), "graph": ("delta", "mamba", "output_gate"), "calls": ("contexts", "adapters")}


def changed(build: Path, folder: Path, change: Any) -> Path:
    """The build with a change of every part's file."""
    other = folder / "tiny"
    shutil.copytree(build, other, symlinks=True)
    for file in (other / "parts").glob("*.json"):
        content = json.loads(file.read_text())
        change(content)
        file.unlink()
        file.write_text(json.dumps(content))
    return other


def without_spec(part: dict[str, Any]) -> None:
    """Write a part as versions did that had no spec in it."""
    spec, layer, first = part.pop("spec"), part.pop("layer"), part.pop("first")
    layers, rows = spec.pop("layers"), spec.pop("rows")
    start = layers[0][0] if layers else first
    part.update(spec, kinds=[kind for _, kind in layers], start=start, end=start + (len(layers) or rows))
    part["layer"] = layer or 0


@pytest.mark.parametrize("less", [False, True])
def test_parts_of_a_version_before_are_compared(first: Path, tmp_path: Path, less: bool) -> None:
    def before(content: dict[str, Any]) -> None:
        without_spec(content)
        for table, keys in LATER.items() if less else ():
            for key in keys:
                del (content[table] if table else content)[key]

    assert run("diff", first, changed(first, tmp_path, before)) == (0, "no difference\n")


def test_parts_of_a_version_that_knows_more_are_named(first: Path, tmp_path: Path) -> None:
    other = changed(first, tmp_path, lambda content: content["spec"]["graph"].update(quantum=1))
    code, said = run("diff", first, other)
    assert (code, said.count("\n")) == (1, 1)
    why = "another version of shardmill made it, or it was changed; build again to read it"
    assert said == f"shardmill: {other / 'parts/embedding.json'}: {why}\n"
