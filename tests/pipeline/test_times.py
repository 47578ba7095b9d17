"""How long jobs take is expected of their sizes and this machine, and learned from what they took."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from shardmill import config
from shardmill.pipeline import rest, times
from shardmill.pipeline.made import each, of_steps
from shardmill.pipeline.needs import STEPS, step_of
from shardmill.pipeline.planned import planning
from shardmill.pipeline.times import REFERENCE, Speed, Times, others_beside, sizes, span

ROOT = Path(__file__).parents[2]
DEMO = config.parse(yaml.safe_load((ROOT / "configs/demo.yaml").read_text()))
LAYERS, HEAD, TABLE = 2_000_000, 1_000_000, 500_000


def plan(layers: int = 32, kind: str = "layers") -> dict[str, Any]:
    parts = [("a", kind, LAYERS), ("b", kind, LAYERS), ("head_0", "head", HEAD), ("embedding", "embedding", TABLE)]
    rows = [{"name": name, "kind": kind, "parameters": count} for name, kind, count in parts]
    return {"architecture": {"layers": layers, "vocab": 50_000}, "parts": rows}


@pytest.fixture
def known(tmp_path: Path) -> Times:
    return Times(REFERENCE, {}, clock=False, file=tmp_path / "speed.json")


def test_a_part_has_its_share_of_the_layers() -> None:
    found = sizes(plan(), DEMO)
    assert found.parts == {"a": (16.0, 2.0), "b": (16.0, 2.0), "head_0": (0.0, 1.0)}
    assert (found.whole, found.vocab, found.encodes) == ((32.0, 5.0), 0.05, False)
    each_all, one_chain = (sizes(plan(6, "encoder") | {"buckets": buckets}, DEMO) for buckets in ([8, 16], [8]))
    assert each_all.parts["b"] == (6.0, 2.0) and one_chain.parts["b"] == (3.0, 2.0)


def test_more_to_measure_takes_more_passes() -> None:
    asked = {"drafters": ["ngram"], "repetitions": 1, "tasks": [], "new_tokens": 10}

    def passes(**changes: Any) -> float:
        found = config.parse({**yaml.safe_load((ROOT / "configs/demo.yaml").read_text()), "benchmark": changes})
        return sizes(plan(), found).passes

    one = passes(**asked, prompt_tokens=[100])
    assert one == 10 * 1.5 + 100 / 4
    assert passes(**asked, prompt_tokens=[100, 9999]) == one  # there is no room for such a prompt
    assert passes(**{**asked, "repetitions": 3}, prompt_tokens=[100]) == one + 2 * 15
    none = config.parse({**yaml.safe_load((ROOT / "configs/demo.yaml").read_text()), "benchmark": False})
    assert sizes(plan(), none).passes == 0


@pytest.mark.parametrize("step", [*times.COSTS, "benchmark"])
def test_a_machine_that_is_half_as_fast_takes_twice_as_long(step: str, known: Times) -> None:
    slow = Times(Speed(2 * REFERENCE.python, 2 * REFERENCE.sums), {}, False, known.file)
    of = sizes(plan(), DEMO)
    assert slow.expected(step, "a", of) == pytest.approx(2 * known.expected(step, "a", of))
    assert known.expected(step, "a", of) > 0


def test_the_table_says_which_steps_have_a_job_for_each_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the rules do; and it knows every step of the demo's build."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "demo.json"
    (tmp_path / "resources").symlink_to(ROOT / "resources")
    file.write_text(json.dumps(yaml.safe_load((ROOT / "configs/demo.yaml").read_text())))
    rules = {step_of(rule.name): each(rule) for rule in of_steps(planning(file))}
    assert {step for step, cost in times.COSTS.items() if cost.each} == {
        step for step, wildcard in rules.items() if wildcard == "part" and step in times.COSTS
    }
    everywhere = {step for step in rules if STEPS[step].wanted is None}
    assert everywhere == {*times.COSTS} and {*times.LAST, *times.LOADING} <= {*rules}


def test_what_jobs_took_corrects_what_is_expected_of_their_step(known: Times) -> None:
    """The newest count most; other steps stay; the next process knows it, too."""
    of = sizes(plan(), DEMO)
    before, other = known.expected("parity", "a", of), known.seconds("convert", "a", of)
    known.learn("parity", before, 3 * before)
    assert known.seconds("parity", "a", of) == pytest.approx(3 * before)
    for _ in range(10):
        known.learn("parity", before, before / 2)
    assert known.seconds("parity", "a", of) == pytest.approx(before / 2, rel=0.01)
    assert known.seconds("convert", "a", of) == other


def test_what_was_measured_and_learned_is_kept_by_processor_and_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(times, "measured", lambda: Speed(1.0, 2.0))
    first = times.times()
    first.learn("parity", 2.0, 4.0)
    first.keep()
    monkeypatch.setattr(times, "measured", lambda: Speed(9.0, 9.0))
    assert times.times() == first and first.speed == Speed(1.0, 2.0)
    monkeypatch.setattr(times, "machine", lambda: {"processor": "another", "cores": 64})
    assert times.times().speed == Speed(9.0, 9.0)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert times.times() == first  # the other machine's stand beside
    (tmp_path / "shardmill/speed.json").write_text("[]")
    assert times.times().learned == {}
    (tmp_path / "shardmill/speed.json").unlink()
    (tmp_path / "shardmill/speed.json").mkdir()
    assert times.times().speed.python > 0  # measured each time where nothing can be kept


def test_a_measurement_takes_cpu_time_of_its_own() -> None:
    found = times.measured()
    assert 0 < found.python < 1 and 0 < found.sums < 1


def test_core_ml_is_known_only_from_a_build(known: Times) -> None:
    mac = Times(REFERENCE, {}, clock=True, file=known.file)
    of = sizes(plan(), DEMO)
    assert [mac.seconds(step, "a", of) for step in ("parity", "benchmark")] == [None, None]
    assert mac.seconds("convert", "a", of) == known.seconds("convert", "a", of)
    mac.learn("parity", 1.0, 100.0)
    assert mac.seconds("parity", "a", of) == pytest.approx(100 * mac.expected("parity", "a", of))


def test_jobs_share_the_cores_and_the_last_ones_run_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "cores", lambda: 2)
    parity = [("parity", 10.0)] * 4
    assert span(parity, 4) == 20 and span(parity, 1) == 40 and span([], 4) == 0
    assert span([("parity", 10.0)], 4) == 10
    assert span([*parity, ("parity_stack", 50.0)], 4) == 50  # one job takes as long as it takes
    assert span([*parity, ("benchmark", 30.0), ("report", 2.0)], 4) == 52
    assert span(parity, 4, others=4) == 40  # half of the cores
    assert span([("benchmark", 30.0)], 4, others=3) == 60


def test_slow_jobs_tell_how_many_others_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "cores", lambda: 2)
    assert others_beside(2.0, 4) == 0  # four jobs on two cores
    assert others_beside(4.0, 4) == 4
    assert others_beside(1.0, 1) == 1  # and that one has a core


def running(step: str, part: str) -> Any:
    return SimpleNamespace(rule=SimpleNamespace(name=step), wildcards_dict={"model": "tiny", "part": part})


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: Times) -> rest.Rest:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(times, "cores", lambda: 2)
    monkeypatch.setattr(times, "busy", lambda: 0.0)
    monkeypatch.setattr(times, "times", lambda: known)
    (tmp_path / "build/tiny").mkdir(parents=True)
    (tmp_path / "build/tiny/plan.json").write_text(json.dumps(plan()))
    workflow = SimpleNamespace(local_exec=True, global_resources={"_cores": SimpleNamespace(value=2)})
    batch: Any = SimpleNamespace(models={"tiny": DEMO})
    return rest.Rest(batch, workflow)


def test_the_rest_is_that_of_the_jobs_that_are_left(told: rest.Rest, known: Times) -> None:
    """Less of those that run, more on a busy machine, and nothing if it can't be known."""
    of = sizes(plan(), DEMO)
    stack, one = known.expected("parity_stack", "", of), known.expected("parity", "a", of)
    todo = [(running("parity_stack", ""), 0.0), (running("parity", "a"), 0.0)]
    assert told.words(todo) == f"; {rest.about(stack)} left"
    assert told.words([(running("parity_stack", ""), stack - 1)]) == "; under 10 s left"
    assert told.words([]) == ""
    told.learn(running("parity", "a"), 40 * one, 10 * one)  # it took four times its CPU time
    assert told.slowness == pytest.approx(4, rel=0.05)
    assert told.others(2) == pytest.approx(6, rel=0.05)
    told.workflow.local_exec = False
    assert told.words(todo) == ""
    told.workflow.local_exec, told.batch.models = True, {"other": DEMO}
    unknown = running("parity", "a")
    unknown.wildcards_dict["model"] = "other"
    assert told.words([(unknown, 0.0)]) == ""


def test_what_the_store_has_takes_no_time(told: rest.Rest) -> None:
    """The more of the jobs' results were there, the fewer of the others are expected to take work."""
    todo = [(running("parity_stack", ""), 0.0)] * 100
    assert told.share == 1 and told.words(todo).endswith("min left")
    for _ in range(20):
        told.learn(running("parity", "a"), 0.5, None)
    assert told.share < 0.1 and told.slowness == 1
    assert not told.words(todo).endswith("min left")
