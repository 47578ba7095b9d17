"""benchmark/speed.json: complete, honest about what was not measured, and made of really speculative answers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import tiny
from drafted_decoding.drafters import BY_ITSELF
from patience import PATIENCE
from pydantic import ValidationError
from serve.fake import byte_tokenizer
from serve.running import running
from typer.testing import CliRunner

from shardmill import cli, machine
from shardmill.bench import speed
from shardmill.bench.energy import Meter
from shardmill.bench.prompts import Prompt, tile_text
from shardmill.bench.server import Client
from shardmill.bench.speed import Pair, PrefillSpeed, Questions
from shardmill.config import DRAFTERS, Benchmark

from .answers import answer, pair
from .folder import build_folder, scripted_folder
from .scripted import NAME, TURN, Counter, Wider, model

QUIET = Meter(None, "no meter here")


def settings(**changes: Any) -> Benchmark:
    small = {"prompt_tokens": (20, 40), "new_tokens": 16, "repetitions": 2, "tasks": (), "drafters": ("none", "ngram")}
    return Benchmark(**small | changes)


def counting(length: int, group: int | str | None = None) -> Prompt:
    """A prompt that the scripted model expects."""
    return Prompt(group or length, "counting.txt", tile_text(range(TURN), length))


@contextmanager
def asking(engine: Counter) -> Iterator[Client]:
    """A client of a server in this process."""
    with (
        running(model(engine)) as server,
        httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=PATIENCE) as http,
    ):
        yield Client(NAME, http)


def taken(engine: Counter, prompts: list[Prompt], wanted: Benchmark) -> dict[str, Any]:
    """The summary of real answers of a scripted model; prompts with a number for a group are the sweep's."""
    with asking(engine) as client:
        pairs, prefills = speed.take(client, prompts, wanted.drafters, wanted, print)
    sweep, tasks = ([p for p in prompts if isinstance(p.group, kind)] for kind in (int, str))
    return speed.speed_summary(pairs, prefills, Questions(sweep, tasks, {}, prompts[0]), (1, 4), 4)


def test_a_row_per_group_and_drafter() -> None:
    """And what it says is consistent: ratios of its own times, and no more tokens a pass than its width."""
    got = taken(Counter(), [counting(20), counting(40), counting(30, "copying"), counting(33, "copying")], settings())
    names = [(row.get("prompt_tokens", row.get("task")), row["drafter"]) for row in got["sweep"] + got["tasks"]]
    assert names == [
        (20, "none"),
        (20, "ngram"),
        (40, "none"),
        (40, "ngram"),
        ("copying", "none"),
        ("copying", "ngram"),
    ]
    for row in got["sweep"] + got["tasks"]:
        assert row["exact"] == 1 and row["differs"] == []
        assert row["requests"] == 2 * row["prompts"]
        assert row["new_tokens"] == 16 and row["ended"] == {"length": row["requests"]}
        low, high = row["speedup_range"]
        assert 0 < low <= row["speedup"] <= high
        assert 1 <= row["live"]["tokens_per_pass"] <= row["oracle"]["tokens_per_pass"] <= 4
    assert [row["prompts"] for row in got["tasks"]] == [2, 2]
    assert set(got["pass_seconds"]) == {"1", "4"} and got["break_even"] > 0
    assert [row["prompt_tokens"] for row in got["prefill"]] == [20, 40]
    json.dumps(got)


def test_speculation_is_really_used() -> None:
    """A text that repeats takes fewer passes, live and replayed; the control drafts nothing."""
    none, ngram = taken(Counter(), [counting(40)], settings())["sweep"]
    assert (none["live"]["drafted"], none["live"]["tokens_per_pass"]) == (0, 1)
    assert ngram["oracle"]["tokens_per_pass"] == 15 / 4
    assert ngram["live"]["drafted"] > 0


def test_pairs_take_turns_and_nothing_is_held_before_a_prefill() -> None:
    """T = 1, drafter, T = 1, drafter: each drafted answer has its own neighbour; decoding finds the prompt held."""
    with asking(Counter()) as client:
        asked = list[tuple[int, int, str]]()
        real = client.ask

        def watched(prompt: tuple[int, ...], new: int, drafter: str) -> Any:
            asked.append((len(prompt), new, drafter))
            return real(prompt, new, drafter)

        client.ask = watched  # type: ignore[method-assign]
        pairs, prefills = speed.take(client, [counting(40), counting(20)], ("ngram", "suffix"), settings(), print)
    once = [(1, 1, "none"), (40, 1, "none"), *[(40, 16, name) for name in ("none", "ngram", "none", "suffix")]]
    assert asked == (once + [(1 if n == 1 else 20, new, name) for n, new, name in once]) * 2
    assert [p.answer.cached for p in prefills] == [0] * 4
    assert all(a.cached == len(p.prompt.tokens) - 1 for p in pairs for a in (p.plain, p.drafted))


def test_a_wrong_token_is_not_called_exact() -> None:
    """Speculation that changes the output is reported, not averaged away."""
    _, ngram = taken(Wider(), [counting(40)], settings())["sweep"]
    assert ngram["exact"] < 1
    assert ngram["differs"][0]["prompt"] == "counting.txt" and ngram["differs"][0]["token"] < 16


def test_a_text_that_ends_at_once_is_reported_and_not_measured() -> None:
    """One token comes out of the prefill and says nothing of decoding."""
    prompts = [counting(20), counting(21, "copying")]  # after 0 1 2 ... 6 comes 0, which ends the text
    wanted = settings()
    with asking(Counter(end=0)) as client:
        pairs, prefills = speed.take(client, prompts, wanted.drafters, wanted, print)
    asked = Questions(prompts[:1], prompts[1:], {}, prompts[0])
    got = speed.speed_summary(pairs, prefills, asked, (1, 4), 4)
    assert len(got["sweep"]) == 2 and got["tasks"] == []
    gaps = speed.not_benchmarked(asked, pairs, QUIET, None)
    assert {"kind": "prompt", "what": "copying", "reason": "the model ended a text with its first token"} in gaps
    nothing = speed.speed_summary([p for p in pairs if p.prompt.group == "copying"], [], asked, (1, 4), 4)
    assert nothing["pass_seconds"] == {} and nothing["break_even"] is None


def test_of_a_draft_model_the_replay_is_not_run() -> None:
    pairs = [pair(prompt=counting(20), drafter="draft_model")]
    (row,) = speed.rows("prompt_tokens", [counting(20)], pairs, 4)
    assert row["oracle"] is None
    asked = Questions([counting(20)], [], {}, counting(20))
    kinds = {(gap["kind"], gap["what"]) for gap in speed.not_benchmarked(asked, pairs, QUIET, Path("draft"))}
    assert kinds == {("oracle", "replay of draft_model"), ("energy", "energy per token")}


def test_a_width_that_no_pass_had_is_a_gap() -> None:
    """With nothing worth drafting there is no break-even to tell."""
    pairs = [pair(prompt=counting(20))]
    got = speed.speed_summary(
        pairs, [PrefillSpeed(counting(20), answer())], Questions([counting(20)], [], {}, counting(20)), (1, 4), 4
    )
    assert (got["pass_seconds"], got["break_even"]) == ({"1": 0.5}, None)
    assert [gap["what"] for gap in speed.unseen(got["pass_seconds"], (1, 4))] == ["4"]
    assert speed.unseen({"1": 0.5, "4": 0.6}, (1, 4)) == []


def test_gaps_come_with_their_reason() -> None:
    asked = Questions([], [], {800: "no room", "copying": "no room"}, counting(20))
    gaps = speed.not_benchmarked(asked, [], QUIET, None)
    assert [(gap["what"], gap["reason"]) for gap in gaps[:2]] == [("800", "no room"), ("copying", "no room")]
    assert [gap["kind"] for gap in gaps] == ["prompt", "prompt", "drafter", "energy"]
    for joules, still in ((0.5, False), (0.0, True)):  # one that says 0 has ended, or can't be understood
        metered = speed.not_benchmarked(asked, [pair(answer(joules=joules), joules=joules)], Meter(lambda: 0.0), None)
        assert [gap["reason"].startswith("the machine's meter stood still") for gap in metered[3:]] == [True] * still


def test_prefill_is_held_against_plain_decoding_of_the_same_length() -> None:
    pairs = [pair(answer(decode_seconds=8.0), prompt=counting(20)), pair(prompt=counting(40))]
    prefills = [
        PrefillSpeed(counting(20), answer(prefill_seconds=5.0)),
        PrefillSpeed(counting(40), answer(prefill_seconds=1.0)),
    ]
    row = speed.prefill_row(20, pairs, prefills, 64)
    assert row == {"prompt_tokens": 20, "width": 64, "tokens_per_second": 4.0, "over_decode": 8.0}


def test_the_first_request_stands_apart_from_later_ones() -> None:
    """All the same request, each with nothing held: what differs is that the first one is the first."""

    class Stopwatch:
        def __init__(self) -> None:
            self.seconds, self.done = iter([9.0, 1.0, 4.0, 2.0]), list[tuple[int, str]]()

        def ask(self, prompt: tuple[int, ...], new_tokens: int, drafter: str) -> Any:
            self.done.append((new_tokens, drafter))
            return answer(wall_seconds=next(self.seconds))

        def forget(self, prompt: tuple[int, ...]) -> None:
            self.done.append((0, "forget"))

    client: Any = Stopwatch()
    got = speed.first_and_later(client, counting(20), 3)
    assert (got["first_request_seconds"], got["later_request_seconds"]) == (9.0, 2.0)
    assert client.done == [(speed.START_TOKENS, "none"), (0, "forget")] * 4


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with texts in it, as the working directory."""
    (tmp_path / "text.txt").write_text("counting " * 9)
    (tmp_path / "tasks/copying").mkdir(parents=True)
    (tmp_path / "tasks/copying/1.txt").write_text("a list, and a list")
    monkeypatch.chdir(tmp_path)
    return tmp_path


TEXTS = {"text": "text.txt", "task_prompts": "tasks"}


def test_prompts_that_the_context_has_no_room_for_are_named(project: Path) -> None:
    """The last pass may be padded to its width, so there has to be room for that too."""
    byte_tokenizer().save(str(project / "tokenizer.json"))
    for context, sweep, tasks in ((60, [20, 40], 1), (59, [20], 1), (37, [], 0), (30, [], 0)):
        manifest = {"context": context, "widths": [1, 4], "tokenizer": {"path": "tokenizer.json"}}
        asked = speed.questions(project, manifest, settings(tasks=("copying",), **TEXTS))
        assert [len(prompt.tokens) for prompt in asked.sweep] == sweep
        assert len(asked.tasks) == tasks
        assert len(asked.start.tokens) + speed.START_TOKENS <= context
        room = context - 16 - 4
        assert set(asked.refused) == {20, 40, *(["copying"] if not tasks else [])} - set(sweep)
        assert set(asked.refused.values()) <= {f"context has room for {room} prompt tokens"}


def test_a_whole_run_against_a_server_process(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start apart from what follows; engine, machine and versions recorded; every key there.

    The folder says that prompts have a width of their own: it stands beside the prefill, and no decode pass lacks it.
    """
    file = scripted_folder(project) / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"widths": [1, 4, 16], "verify": 4}))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]))
    serve = [sys.executable, "-m", "bench.scripted", "serve", "none", "--port", "0", "--no-check"]
    monkeypatch.setattr(speed, "command", lambda *_: serve)
    got = json.loads(json.dumps(speed.benchmark(project, settings(tasks=("copying",), **TEXTS))))
    start = got["start"]
    assert min(start[f"{name}_seconds"] for name in ("ready", "first_request", "later_request")) > 0
    assert (start["prompt_tokens"], start["new_tokens"]) == (20, 16)
    assert set(got["versions"]) == {"coremltools", "numpy", "shardmill", "torch"}
    assert got["engine"] == machine.engine() and got["machine"]["processor"]
    assert not {"threads", "precision"} & set(got["machine"])  # the scripted engine has no choice
    assert got["settings"]["drafters"] == ["none", "ngram"] and got["settings"]["widths"] == [1, 4, 16]
    assert {row["width"] for row in got["prefill"]} == {16}
    assert "16" not in {gap["what"] for gap in got["not_run"] if gap["kind"] == "width"}
    assert len(got["sweep"]) == 4 and len(got["tasks"]) == 2
    assert {gap["kind"] for gap in got["not_run"]} >= {"drafter"}


@pytest.mark.thorough
def test_the_command_measures_a_real_build(built: tiny.Build, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command line to the file and the tables: the server, the engine and a draft model are the real ones.

    On a Mac it is called with sudo, for energy; the figures are the user's all the same.
    """
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "23456")
    folder = build_folder(built, project)
    few = ["--prompt-tokens", "8", "--new-tokens", "12", "--repetitions", "1", "--task", "copying"]
    texts = ["--text", "text.txt", "--task-prompts", "tasks"]
    done = CliRunner().invoke(
        cli.app, ["bench", str(folder), "--draft", str(folder), *few, *texts, "--drafter", "ngram"]
    )
    assert done.exit_code == 0, done.output
    written = folder.parent / f"{folder.name}.speed.json"  # this build has no record of a benchmark
    state = written.stat()
    assert (state.st_uid, state.st_gid) == ((12345, 23456) if os.geteuid() == 0 else (os.getuid(), os.getgid()))
    got = json.loads(written.read_text())
    assert [row["drafter"] for row in got["sweep"]] == ["ngram", "draft_model"]
    drafted = got["sweep"][1]
    assert drafted["exact"] == 1
    live = drafted["live"]
    assert live["accepted"] == live["drafted"]  # the same model: whatever it drafts is right
    assert "ready after" in done.output and "a pass takes T=1" in done.output and "copying" in done.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--drafter", "oracle"], "drafters.0: input should be 'none', 'ngram', "),
        (["--new-tokens", "1"], "new_tokens: input should be greater than or equal to 2, is 1"),
        (["--new-tokens", "0"], "new_tokens: input should be greater than or equal to 2, is 0"),
        (["--repetitions", "0"], "repetitions: input should be greater than or equal to 1, is 0"),
        (["--draft", "nowhere"], "nowhere/model.json can't be read"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(
    built: tiny.Build, project: Path, options: list[str], expected: str
) -> None:
    done = CliRunner().invoke(cli.app, ["bench", str(build_folder(built, project)), *options])
    assert done.exit_code == 1 and expected in done.output


def test_the_config_knows_the_drafters_there_are() -> None:
    """`draft_model` is not among them: it needs a second build."""
    assert DRAFTERS == BY_ITSELF
    with pytest.raises(ValidationError):
        settings(drafters=("draft_model",))
    with pytest.raises(ValidationError, match="new_tokens"):
        settings(new_tokens=1)  # a rate needs two tokens
    assert Pair(counting(5), "none", answer(), answer()).plain.decoded == 4
