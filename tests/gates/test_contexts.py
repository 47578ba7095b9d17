"""The gate of parts sees what goes wrong in a shorter context, and on the way from one to the next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import limits
import numpy as np
import pytest
import templates
import tiny

from shardmill.convert.stamped import convert_stamped
from shardmill.gates.measurement import compare
from shardmill.gates.parity import width_measurements
from shardmill.gates.passes import MOVING, in_passes
from shardmill.gates.runner import PartRunner
from shardmill.gates.thresholds import Allowed
from shardmill.machine import is_portable, load_programs_as
from shardmill.runtime import program
from shardmill.runtime.kv import KVLayout

pytestmark = [
    pytest.mark.skipif(not is_portable(), reason="compares in fp32, which Core ML does not have"),
    pytest.mark.slow,
]
POSITIONS = 44  # more than the shortest context has
CONTEXTS = [32, 48]


@pytest.fixture(scope="module", params=["graph", "host"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PartRunner:
    """One layer, in three contexts."""
    folder = tmp_path_factory.mktemp("contexts")
    source = tiny.fetched(tiny.write_checkpoint(folder / "checkpoint"), folder / "source")
    form = {"shapes": "fixed", "state": request.param, "contexts": CONTEXTS}
    parts, plan = tiny.split(source, program=form)
    convert_stamped(parts["layers_02_03"], source, "int8", folder / "one.mlpackage", templates.FOLDER)
    return PartRunner(folder / "one.mlpackage", parts["layers_02_03"], plan)


def measured(runner: PartRunner) -> dict[str, tuple[float, bool]]:
    """What was measured and whether it passes, by its detail."""
    x = np.random.default_rng(3).standard_normal((POSITIONS, tiny.HIDDEN)).astype(np.float32)
    with load_programs_as("fp32"):
        plain, states = runner.run({"x": x}, in_passes(POSITIONS, [1]))
        allowed = Allowed(limits.model(1, tiny.FFN).value, "what such a layer comes to")
        found = list(width_measurements(runner, {"x": x}, plain, states, allowed))
    return {one.detail: (one.value, bool(row["passed"])) for one, row in zip(found, compare(found), strict=True)}


def test_every_context_and_every_move_is_measured(runner: PartRunner) -> None:
    """Of the states too, where a context holds the whole text."""
    found = measured(runner)
    ways = {"context of 32", "context of 48", "state, context of 48", MOVING, f"state, {MOVING}"}
    ends = {f"over the end of {slots} slots" for slots in CONTEXTS}
    assert ways | ends <= found.keys() and "state, context of 32" not in found
    assert all(passed for _, passed in found.values())


def test_a_prefix_that_is_left_behind_fails(runner: PartRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_carried", lambda before, into: into)
    found = measured(runner)
    failed = {name for name, (_, passed) in found.items() if not passed}
    assert {MOVING, f"state, {MOVING}"} <= failed and "over the end of 32 slots" in failed
    assert all(MOVING in name or "over the end" in name for name in failed)


@pytest.mark.parametrize("rows", [POSITIONS // 2, 31])
def test_rows_that_are_left_behind_fail_wherever_they_are(
    runner: PartRunner, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a context that is longer than the tested text, the last slots too: here only the first rows are carried."""
    carried = program._carried

    def some(before: Any, into: Any) -> Any:
        fresh = np.array(into)
        found = np.array(carried(before, into))
        found[:, :, rows:] = fresh[:, :, rows:]
        return found

    monkeypatch.setattr(program, "_carried", some)
    assert not measured(runner)["over the end of 32 slots"][1]


def test_slots_that_a_move_forgets_fail(runner: PartRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the last one alone."""
    resize = KVLayout.resize

    def wrong(host: KVLayout, length: int) -> None:
        host.held[31 if length > host.length else length :][:1] = np.iinfo(np.int64).max
        resize(host, length)

    monkeypatch.setattr(KVLayout, "resize", wrong)
    assert not measured(runner)["over the end of 32 slots"][1]


def test_drafts_that_come_to_light_by_a_move_fail(runner: PartRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the move had written them at the position that was reached."""
    resize = KVLayout.resize

    def wrong(host: KVLayout, length: int) -> None:
        if length > host.length:
            host.held[host.held != np.iinfo(np.int64).max] = 0
        resize(host, length)

    monkeypatch.setattr(KVLayout, "resize", wrong)
    assert not measured(runner)[MOVING][1]


def test_a_function_of_one_context_that_is_wrong_fails(runner: PartRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is called in passes of one token."""
    run = program.Program._run

    def wrong(self: Any, function: str, inputs: Any) -> Any:
        outputs = run(self, function, inputs)
        return {name: value * 1.001 for name, value in outputs.items()} if function == "c48_t1" else outputs

    monkeypatch.setattr(program.Program, "_run", wrong)
    failed = {name for name, (_, passed) in measured(runner).items() if not passed}
    assert "context of 48" in failed and "context of 32" not in failed


def test_parts_of_one_context_are_fed_in_no_other(runner: PartRunner) -> None:
    part = runner.part.changed(calls=replace(runner.part.spec.calls, contexts=()))
    assert PartRunner(runner.program, part, runner.runtime).lengths == (64,)
