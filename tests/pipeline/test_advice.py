"""What a person reads after gates have failed: which, where, and lines for the config that the config takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import yaml
from models import tiny_encoders

from shardmill import config
from shardmill.config import Config
from shardmill.files import write_json
from shardmill.gates.measurement import Measurement, compare
from shardmill.pipeline import advice
from shardmill.pipeline.batch import Batch
from shardmill.runtime.judged import MISSED, OPEN, Judgement

SOURCE = {"repo": "acme/tiny", "revision": "0" * 40}  # nobody asks the hub
LAYERS, HEAD = "layers_00_02", "head_0"
# Constants have no device, and what is not chosen counts only if the number has missed its threshold.
COUNTED = {"const": "no_device", "ios18.conv": "ane", "ios18.mul": "not_chosen", "ios18.silu": "ineligible"}
SILU = [{"operation": operation, "status": status} for operation, status in COUNTED.items()]
SOFTMAX = [*SILU, {"operation": "ios18.softmax", "status": "ineligible"}]
TOO_LARGE = {"findings": [{"rule": "W1", "severity": "error"}, {"rule": "S11", "severity": "warn"}]}


def judgement(gate: str, part: str, number: str, value: float, engine: str = "coreml", **content: Any) -> Judgement:
    rows = {"gate": compare([Measurement(number, value)]), "engine": {"name": engine}, **content}
    return Judgement(gate, part, MISSED, f"{number} is {value}", Path("log"), Path(f"{part}.failed.json"), rows)


def placed(part: str = LAYERS, rows: Any = SOFTMAX, number: str = "ineligible", **content: Any) -> Judgement:
    return judgement("residency", part, number, 1, rows=rows, **content)


UNLOADED = Judgement("parity", LAYERS, OPEN, "a.mlmodelc can't be loaded: -14", Path("log"), Path("a.json"))
FORMED = {"shapes": "fixed", "state": "host"}
HOST = {**FORMED, "silu": "tanh"}
HALVES = {"topology": [[0, 1], [1, 2], [2, 4]]}
AWAY, APART, NONE_LEFT = "Not all would run", "passes of some width otherwise", "No other is left. A kit"
WRONG = "No key of the config"
BOTH = {"shapes": "fixed", "silu": "tanh"}
# What a decoder's config says of its form, what failed, what is said of it, and what to put into the config.
DECODER: dict[str, tuple[dict[str, Any], Judgement, str, dict[str, Any]]] = {
    "an operation": ({}, placed(), AWAY, {"program": {"shapes": "fixed"}}),
    "the head": ({}, placed(HEAD), AWAY, {"program": {"shapes": "fixed"}}),
    "a program that does not load": ({}, UNLOADED, AWAY, {"program": {"shapes": "fixed"}}),
    "SiLU, and what is not chosen": (
        {}, placed(rows=SILU, number="not_chosen"), AWAY, {"program": {"shapes": "fixed"}},
    ),
    "SiLU alone": ({}, placed(rows=SILU), AWAY, {"program": {"silu": "tanh"}}),
    "SiLU, in fixed shapes": ({"shapes": "fixed"}, placed(rows=SILU), AWAY, {"program": BOTH}),
    "tanh in its place": ({"silu": "tanh"}, placed(rows=SILU), AWAY, {"program": BOTH}),
    "a hint on shapes": ({"reshape_frequency": "frequent"}, placed(), AWAY, {"program": {"shapes": "fixed"}}),
    "fixed": ({"shapes": "fixed"}, placed(), AWAY, {"program": FORMED}),
    "fixed, with contexts": (
        {"shapes": "fixed", "contexts": [32]}, placed(), AWAY, {"program": {**FORMED, "contexts": [32]}},
    ),
    "host": ({"state": "host"}, placed(), AWAY, {"program": FORMED}),
    "both": (FORMED, placed(), AWAY, HALVES),
    "both, the head": (FORMED, placed(HEAD), AWAY, {"head": {"slices": 2}}),
    "both, a part of one layer": (FORMED, placed("layers_09_10"), NONE_LEFT, {}),
    "all, SiLU": (HOST, placed(rows=SILU), AWAY, HALVES),
    "too large": ({}, placed(rows=[], number="program_findings", **TOO_LARGE), AWAY, HALVES),
    "too large, and an operation": ({}, placed(**TOO_LARGE), AWAY, {"program": {"shapes": "fixed"}}),
    "a width": ({}, judgement("parity", LAYERS, "width_error_fp16", 1), APART, {"program": {"shapes": "fixed"}}),
    "a width, on Linux": ({}, judgement("parity", LAYERS, "width_error", 1, "portable"), WRONG, {}),
    "another function": ({}, judgement("parity", "stack", "argmax_mismatches", 1, "portable"), WRONG, {}),
    "another on Apple's": ({}, judgement("witness", LAYERS, "witness_error", 1, "portable"), WRONG, {}),
    "quality": ({}, judgement("parity", "stack", "kl", 1), "more bits", {"convert": {"precision": "fp16"}}),
}  # fmt: skip


@pytest.fixture
def build(tmp_path: Path) -> Path:
    write_json(tmp_path / "plan.json", {"architecture": {"vocab": 256}})
    return tmp_path


def settings(**changes: Any) -> dict[str, Any]:
    return tiny.settings("", source=SOURCE, topology=[[0, 2], [2, 4]], head={"slices": 1}) | changes


def decoder(program: Mapping[str, Any], **changes: Any) -> Config:
    return config.parse(settings(program=dict(program), **changes))


@pytest.mark.parametrize(("program", "failed", "says", "lines"), DECODER.values(), ids=DECODER)
def test_the_next_thing_to_try(
    program: dict[str, Any], failed: Judgement, says: str, lines: dict[str, Any], build: Path
) -> None:
    """The lines are YAML, which replaces a key of the config, and the config is one that can be built."""
    (found,) = advice.remedies(build, decoder(program), [failed])
    assert says in found.words and (yaml.safe_load(found.lines) or {}) == lines
    (key,) = lines or ["none"]
    assert f"in place of its `{key}`" in found.words or not lines
    config.parse(settings(program=program) | lines)


def test_of_several_parts_those_are_cut_that_can_be(build: Path) -> None:
    """One of them has a single layer."""
    model = config.parse(settings(program=FORMED, topology=[[0, 1], [1, 3], [3, 4]]))
    failed = [placed(name) for name in ("layers_00_01", "layers_01_03")]
    (found,) = advice.remedies(build, model, failed)
    assert yaml.safe_load(found.lines) == {"topology": [[0, 1], [1, 2], [2, 3], [3, 4]]}


@pytest.mark.parametrize(("precision", "finer"), [("int4", "int8"), ("int8", "fp16"), ("fp16", None)])
def test_more_bits_where_there_are_any(precision: str, finer: str | None, build: Path) -> None:
    model = decoder({}, convert={"precision": precision, "embedding": "int8"})
    (found,) = advice.remedies(build, model, [judgement("parity", "stack", "kl", 1)])
    expected = {"convert": {"embedding": "int8", "precision": finer}} if finer else None
    assert yaml.safe_load(found.lines) == expected and ("audit-range" in found.words) is (finer is None)


def test_each_kind_of_failure_has_its_advice_and_a_form_is_advised_once(build: Path) -> None:
    width, kl = judgement("parity", LAYERS, "width_error_fp16", 1), judgement("parity", "stack", "kl", 1)
    wrong = judgement("parity", HEAD, "weight_steps", 2)
    found = [*advice.remedies(build, decoder({}), [placed(), placed(HEAD), width, kl, wrong])]
    assert [one.lines.partition(":")[0] for one in found] == ["program", "convert", ""]
    assert found[2].words.startswith(f"parity {HEAD}: the program does not compute")


@pytest.mark.parametrize(
    ("silu", "rows", "parts", "says"),
    [
        ("native", SILU, {"encoder_64": [[0, 3]]}, {"program": {"silu": "tanh"}}),
        ("tanh", SILU, {"encoder_64": [[0, 3]]}, {"topology": [[0, 1], [1, 3]]}),
        ("native", SOFTMAX, {"encoder_64_01_03": [[0, 1], [1, 3]]}, {"topology": [[0, 1], [1, 2], [2, 3]]}),
        ("native", SOFTMAX, {"encoder_64_00_01": [[0, 1], [1, 3]]}, None),
    ],
)
def test_an_encoder_has_fixed_shapes_and_no_states(
    silu: str, rows: Any, parts: dict[str, Any], says: Any, build: Path
) -> None:
    """Its parts may be smaller, in all buckets alike."""
    ((name, topology),) = parts.items()
    chosen = {"source": SOURCE, "program": {"silu": silu}, "topology": topology}
    (found,) = advice.remedies(build, config.parse(tiny_encoders.settings("") | chosen), [placed(name, rows)])
    assert yaml.safe_load(found.lines) == says and ("kit" in found.words) is (says is None)


def finished(build: Path, missed: bool) -> Path:
    """A build of one part that residency judges, as a job that missed or was killed leaves it."""
    rows = [{"name": LAYERS, "kind": "layers"}]
    write_json(build / "plan.json", {"parts": rows, "architecture": {"vocab": 256}})
    if missed:
        content = placed().content | {"missed": f"residency {LAYERS}: ineligible is 1\x1b[2J"}
        write_json(build / f"residency/{LAYERS}.failed.json", content)
    return build


def test_lines_name_gate_file_and_command(build: Path) -> None:
    lines = [*advice.told(finished(build, missed=True), decoder({}))]
    assert lines[0] == f"shardmill: {build}: 1 of 3 gates failed, so there is no model.json:"
    assert lines[1:3] == [f"  residency {LAYERS}: ineligible is 1?[2J", f"    {build}/residency/{LAYERS}.failed.json"]
    assert lines[-5:-1] == ["", "program:", "  shapes: fixed", ""]  # not indented, so that they can be pasted
    assert lines[-1].endswith(f'shardmill generate {build} --ungated --prompt "def "')


def test_a_gate_that_was_killed_is_named_with_its_log(build: Path) -> None:
    finished(build, missed=False)
    lines = [*advice.told(build, decoder({}), {build / f"residency/{LAYERS}.json"})]
    assert lines[1:3] == [f"  residency {LAYERS}: not judged", f"    {build}/logs/residency_{LAYERS}.log"]


def job(rule: str) -> Any:
    output = SimpleNamespace(verdict=f"build/tiny/residency/{LAYERS}.json")
    return SimpleNamespace(rule=SimpleNamespace(name=rule), wildcards=SimpleNamespace(model="tiny"), output=output)


@pytest.mark.parametrize(
    ("failed", "listed", "speaks"),
    [(["residency"], False, True), (["convert"], False, False), ([], False, False), (["residency"], True, False)],
)
def test_only_gates_of_one_model_are_spoken_of(
    failed: list[str], listed: bool, speaks: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a group of jobs for a cluster, too."""
    monkeypatch.setattr(advice, "gates", lambda workflow: [SimpleNamespace(name="residency")])
    monkeypatch.setattr(advice.storage, "is_used", lambda workflow: False)
    scheduler = SimpleNamespace(failed=[SimpleNamespace(jobs=[job(rule) for rule in failed])])
    models = replace(Batch({"tiny": decoder({})}), listed=listed)
    advice.advise(models, SimpleNamespace(scheduler=scheduler))
    assert ("gates failed" in capsys.readouterr().err) is speaks
