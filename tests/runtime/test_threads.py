"""The number of threads is the one that was quickest, not the first or the largest, and a person's word stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from bench.folder import build_folder
from portable_coreml.run.fixed_point import EARNED

from shardmill import machine
from shardmill.runtime import engine, threads
from shardmill.runtime.kv import NEVER
from shardmill.runtime.threads import fastest, fastest_threads, seconds_for_passes, timings


@pytest.mark.parametrize(
    ("took", "best"),
    [({1: 3, 2: 1, 4: 2}, 2), ({1: 1, 2: 2, 4: 3}, 1), ({1: 3, 2: 2, 4: 1}, 4), ({1: 1, 2: 0.97, 4: 0.1}, 1)],
)
def test_the_quickest_wins_until_more_gain_little(took: dict[int, float], best: int) -> None:
    chosen = list[int]()
    assert fastest(lambda: took[chosen[-1]], 7, chosen.append) == best
    assert max(chosen) <= min(2 * best, 4)  # 8 is more than there are


@pytest.mark.parametrize(("takes", "calls"), [(1.0, 4), (3.0, 2), (4.0, 1), (9.0, 1)])
def test_timings_take_the_time_they_have_and_at_least_one_call(
    monkeypatch: pytest.MonkeyPatch, takes: float, calls: int
) -> None:
    now = [0.0]
    monkeypatch.setattr(threads.time, "perf_counter", lambda: now[0])
    assert timings(lambda: now.append(now.pop() + takes), 4.0) == [takes] * calls


def test_a_person_s_choice_stands(built: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OMP_NUM_THREADS, or else what was measured; the measuring leaves no slot behind."""
    if not machine.is_portable():
        pytest.skip("Core ML decides for itself how many threads it takes")
    chosen = list[int]()
    monkeypatch.setattr(threads, "set_threads", chosen.append)
    monkeypatch.setattr(threads, "fastest", lambda measure, most, choose: 7 if measure() > 0 else 0)
    loaded = engine.load(build_folder(built, tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    fastest_threads(lambda: seconds_for_passes(loaded))
    assert chosen == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    fastest_threads(lambda: seconds_for_passes(loaded))
    assert chosen == [7]
    assert (loaded.host.held == NEVER).all()


def test_passes_in_which_the_engine_prepares_do_not_count(
    built: tiny.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packing a model's matrices takes as long as twenty passes, and one thread would pay for it, whoever is faster."""
    loaded, passes, before = engine.load(build_folder(built, tmp_path)), list[int](), list[list[int]]()
    monkeypatch.setattr(loaded, "hidden", lambda tokens, slots, positions: passes.append(len(tokens)))
    monkeypatch.setattr(threads, "timings", lambda run, seconds: before.append([*passes]) or [1.0])
    seconds_for_passes(loaded)
    for width in {1, loaded.verify}:
        assert [width] * (EARNED + 1) in [one[-EARNED - 1 :] for one in before]
