"""The replay benchmark counts passes rightly, keeps cold and warm apart, and says what is missing."""

import json
import random
from pathlib import Path
from types import ModuleType

import pytest
from drafted_decoding import create_drafter
from drafted_decoding.drafters import BY_ITSELF
from lab_script import load_script


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script("drafters")


def write_requests(path: Path, count: int) -> Path:
    """Requests whose outputs resemble each other, but hold little repetition themselves."""
    rng = random.Random(0)
    common = rng.sample(range(1000, 1400), 40)
    rows = []
    for _ in range(count):
        prompt = [rng.randrange(1000) for _ in range(8)]
        output = [*common[:20], *(rng.randrange(1000) for _ in range(5)), *common[20:]]
        rows.append(json.dumps({"prompt_tokens": prompt, "output_tokens": output}))
    path.write_text("\n".join(rows) + "\n")
    return path


def test_no_drafts_means_a_pass_per_token(bench: ModuleType) -> None:
    request = bench.Recorded([1, 2], [3, 4, 5, 6])
    assert bench.replay_one(create_drafter("none"), request, 3) == 3


def test_a_pass_yields_its_accepted_drafts_and_one_token(bench: ModuleType) -> None:
    """1 2 3 4 5 6 again and again: once it has come round, 4 tokens a pass; the first token is free."""
    drafter = create_drafter("ngram")
    drafter.reset([1, 2, 3, 4, 5, 6])
    request = bench.Recorded([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 1, 2, 3, 9])
    assert bench.replay_one(drafter, request, 3) == 3


def test_prompt_lookup_is_transformers_own(bench: ModuleType) -> None:
    lookup = bench.PromptLookup(3)
    lookup.reset([1, 2, 3, 4, 9, 1])
    lookup.observe([2], 0)
    assert lookup.propose([], 3).tokens == (3, 4, 9)
    assert lookup.propose([], 2).tokens == (3, 4)


def test_the_whole_run(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_requests(tmp_path / "recorded.jsonl", 12)
    out = tmp_path / "figures.json"
    bench.main([str(data), "--warm", "8", "--context", "200", "--json", str(out)])
    figures = json.loads(out.read_text())
    rows = {row["drafter"]: row for row in figures["rows"]}
    assert set(rows) == {"prompt lookup", *BY_ITSELF}
    assert rows["none"]["cold"] == rows["none"]["warm"] == 1
    assert rows["learned"]["warm"] > 2 > rows["learned"]["cold"]
    assert rows["ngram"]["warm"] == pytest.approx(rows["ngram"]["cold"], rel=0.1)
    assert rows["learned"]["megabytes"] > rows["ngram"]["megabytes"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    assert "warm: " in printed


def test_a_missed_bar_is_said_and_fails_a_check(bench: ModuleType) -> None:
    good = bench.Row("learned", 1.3, 1.4, 1.04, 1.2, 20.0, 30.0, 5.0, 10.0)
    slow = bench.Row("learned", 1.3, 1.4, 1.02, 1.1, 20.0, 51.0, 5.0, 10.0)
    lookup = bench.Row("prompt lookup", 1.2, 1.2, 1.0, 1.0, 90.0, 90.0, 5.0, 10.0)
    assert all(ok for _, ok in bench.verdicts([lookup, good]).values())
    assert bench.verdicts([lookup, good, slow])["microseconds"] == (51.0, False)
    assert not any(ok for _, ok in bench.verdicts([lookup, slow]).values())


def test_a_missing_file_and_too_few_requests_are_named(bench: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not exist: give the path"):
        bench.main([str(tmp_path / "nothing.jsonl")])
    data = write_requests(tmp_path / "few.jsonl", 3)
    with pytest.raises(SystemExit, match="holds 3 requests"):
        bench.main([str(data)])
