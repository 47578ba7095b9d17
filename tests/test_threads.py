"""The number of threads is the one that was quickest, not the first or the largest."""

from __future__ import annotations

import pytest
import tiny

from shardmill import engine, host, threads
from shardmill.manifest import read_manifest
from shardmill.threads import choose_threads, fastest, fastest_threads
from tests.bench.folder import build_folder


@pytest.mark.parametrize(
    ("took", "best"), [({1: 3.0, 2: 1.0, 4: 2.0}, 2), ({1: 1, 2: 2, 4: 3}, 1), ({1: 3, 2: 2, 4: 1}, 4)]
)
def test_the_quickest_wins(took: dict[int, float], best: int) -> None:
    chosen = list[int]()
    assert fastest(lambda: took[chosen[-1]], 7, chosen.append) == best
    assert max(chosen) <= 4  # 8 is more than there are


def test_more_are_not_tried_once_more_gave_nothing() -> None:
    chosen = list[int]()
    fastest(lambda: {1: 1.0, 2: 2.0}[chosen[-1]], 16, chosen.append)
    assert chosen == [1, 2]


def test_a_slow_try_is_forgotten() -> None:
    """Of several tries with as many threads the best counts."""
    tries = iter([9.0, 1.0, 9.0, 2.0, 2.0, 2.0])
    assert fastest(lambda: next(tries), 2, lambda _: None) == 1


def test_one_part_of_a_build_tells(
    built: tiny.Build, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the smallest part of layers is loaded, whatever the size of the model."""
    if not host.is_portable():
        pytest.skip("Core ML decides for itself how many threads it takes")
    loaded = list[str]()
    real = threads.Engine

    def watched(manifest: dict[str, object], root: object) -> object:
        loaded.extend(part["name"] for part in manifest["parts"])  # type: ignore[attr-defined]
        return real(manifest, root)  # type: ignore[arg-type]

    monkeypatch.setattr(threads, "Engine", watched)
    monkeypatch.setattr(threads, "set_threads", lambda _: None)
    folder = build_folder(built, tmp_path_factory.mktemp("threads"))
    assert fastest_threads(folder, read_manifest(folder), "fp32") in (1, 2, 4, 8, 16)
    assert len(loaded) == 1 and loaded[0].startswith("layers_")


def test_a_person_s_choice_stands(
    built: tiny.Build, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS, or else what was measured; the measuring leaves no slot behind."""
    if not host.is_portable():
        pytest.skip("Core ML decides for itself how many threads it takes")
    chosen = list[int]()
    monkeypatch.setattr(threads, "set_threads", chosen.append)
    monkeypatch.setattr(threads, "fastest", lambda measure, most, choose: 7 if measure() > 0 else 0)
    loaded = engine.load(build_folder(built, tmp_path_factory.mktemp("threads")))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    choose_threads(loaded)
    assert chosen == []
    monkeypatch.delenv("OMP_NUM_THREADS")
    choose_threads(loaded)
    assert chosen == [7]
    assert (loaded.held == engine.NEVER).all()
