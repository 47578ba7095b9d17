"""What gates have said of a build without model.json, from its records alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from reciter import shardmill

from shardmill.errors import ShardmillError
from shardmill.files import write_json
from shardmill.runtime.judged import MISSED, OPEN, PASSED, failed_gates, judged
from shardmill.runtime.manifest import read_manifest

PARTS = ("layers_00_02", "head_0")
GATES = [f"{gate} {part}" for part in PARTS for gate in ("residency", "parity")] + ["parity stack"]
LINE = "residency head_0: ineligible is 4, must be <= 0 (first: ios18.silu a)"


def inputs(*parts: str) -> dict[str, str]:
    return {f"{kind} {part}": f"{kind} of {part}" for part in parts for kind in ("package", "bundle")}


def receipt(build: Path, step: str, **content: object) -> None:
    write_json(build / f"{step}.receipt.json", content)


def passes(build: Path, step: str, *parts: str) -> None:
    receipt(build, step, inputs=inputs(*parts))
    write_json(build / f"{step}.json", {"gate": []})


def misses(build: Path, step: str, **content: object) -> None:
    """As a job leaves it: neither verdict nor receipt."""
    for suffix in (".json", ".receipt.json"):
        (build / f"{step}{suffix}").unlink(missing_ok=True)
    write_json(build / f"{step}.failed.json", {"gate": [{"name": "ineligible", "passed": False}], **content})


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A build of two parts, which all gates have passed, and whose model.json is gone."""
    folder = tmp_path / "tiny"
    rows = [{"name": name, "kind": name.partition("_")[0]} for name in (*PARTS, "embedding")]
    write_json(folder / "plan.json", {"parts": rows})
    for part in PARTS:
        for step, output in (("packages", "package"), ("compiled", "bundle")):
            receipt(folder, f"{step}/{part}", outputs={output: f"{output} of {part}"})
        for gate in ("residency", "parity"):
            passes(folder, f"{gate}/{part}", part)
    passes(folder, "parity/stack", *PARTS)
    return folder


def states(build: Path) -> dict[str, str]:
    return {f"{one.gate} {one.part}": one.state for one in judged(build)}


def test_gates_that_passed(build: Path) -> None:
    assert states(build) == dict.fromkeys(GATES, PASSED)
    assert failed_gates(build) == []


def converted(build: Path) -> None:
    receipt(build, "packages/head_0", outputs={"package": "another"})


def logged(build: Path, text: str) -> None:
    (build / "residency/head_0.receipt.json").unlink()
    (build / "logs").mkdir()
    (build / "logs/residency_head_0.log").write_text(text)


HEAD = ("residency head_0", "parity head_0", "parity stack")
OPENED: dict[str, tuple[Callable[[Path], object], dict[str, str], list[str]]] = {
    "missed": (
        lambda build: misses(build, "residency/head_0", missed=LINE, inputs=inputs("head_0")),
        {"residency head_0": MISSED},
        [LINE],
    ),
    "missed, said by an earlier version": (
        lambda build: misses(build, "residency/head_0"),
        {"residency head_0": MISSED},
        ["residency head_0: missed ineligible"],
    ),
    "missed by an earlier package": (
        lambda build: misses(build, "residency/head_0", missed=LINE, inputs={"package": "old", "bundle": "old"}),
        {"residency head_0": OPEN},
        [],
    ),
    "all parts together": (
        lambda build: misses(build, "parity/stack", missed="parity stack: kl is 1", inputs=inputs(*PARTS)),
        {"parity stack": MISSED},
        ["parity stack: kl is 1"],
    ),
    "converted since": (converted, dict.fromkeys(HEAD, OPEN), []),
    "a verdict is gone": (
        lambda build: (build / "parity/head_0.json").unlink(),
        {"parity head_0": OPEN},
        [],
    ),
    "a damaged receipt": (
        lambda build: (build / "parity/head_0.receipt.json").write_text("{"),
        {"parity head_0": OPEN},
        [],
    ),
    "an error": (
        lambda build: logged(build, "INFO worked\nERROR a.mlmodelc can't be loaded: -14\nDEBUG peak\n"),
        {"residency head_0": OPEN},
        ["residency head_0: a.mlmodelc can't be loaded: -14"],
    ),
    "interrupted": (lambda build: logged(build, "ERROR interrupted\n"), {"residency head_0": OPEN}, []),
}


@pytest.mark.parametrize(("change", "expected", "lines"), OPENED.values(), ids=OPENED)
def test_gates_that_have_not(
    change: Callable[[Path], object], expected: dict[str, str], lines: list[str], build: Path
) -> None:
    change(build)
    assert states(build) == dict.fromkeys(GATES, PASSED) | expected
    assert [one.line for one in failed_gates(build)] == lines


def test_the_witness_counts_where_it_was_asked(build: Path) -> None:
    (build / "witness").mkdir()
    assert states(build) == dict.fromkeys(GATES, PASSED) | {f"witness {part}": OPEN for part in PARTS}


def test_a_build_that_no_gate_has_seen(build: Path) -> None:
    for gate in ("residency", "parity"):
        shutil.rmtree(build / gate)
    assert states(build) == dict.fromkeys(GATES, OPEN)


def test_labels_are_no_part_of_the_stack(build: Path) -> None:
    rows = [{"name": name, "kind": name.partition("_")[0]} for name in (*PARTS, "labels", "embedding")]
    write_json(build / "plan.json", {"parts": rows})
    receipt(build, "packages/labels", outputs={"package": "package of labels"})
    assert states(build)["parity stack"] == PASSED and states(build)["parity labels"] == OPEN


def test_nothing_is_known_without_a_plan(tmp_path: Path) -> None:
    assert judged(tmp_path) == []


def test_who_misses_model_json_reads_which_gate_failed_and_how_to_go_on(build: Path) -> None:
    """In one line, whatever the command; one gate stands for the others."""
    misses(build, "residency/head_0", missed=LINE, inputs=inputs("head_0"))
    misses(build, "parity/stack", missed="parity stack: kl is 1", inputs=inputs(*PARTS))
    with pytest.raises(ShardmillError) as caught:
        read_manifest(build)
    said = str(caught.value)
    assert said.startswith(f"{build}: a gate failed, so there is no model.json: {LINE} ({build}/residency/head_0")
    assert "head_0.failed.json" in said and "logs/residency_head_0.log), and 1 more; " in said and "--ungated" in said
    for command in (("generate", "--prompt", "a"), ("warm",), ("verify",), ("bench",), ("label", "--text", "a")):
        ran = shardmill(command[0], build, *command[1:])
        assert ran.exit_code == 1 and f"shardmill: {said}" in " ".join(ran.stderr.split()), command
