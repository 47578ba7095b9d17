"""benchmark/speed.json: a built model's speed on this machine, through its resident server.

Every drafter is measured against T = 1 in pairs, on one text tiled to several lengths and on the prompts of several
tasks. Anything that could not be measured is listed with the reason.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from drafted_decoding import create_drafter
from drafted_decoding.drafters import DRAFT_MODEL, TRAINED
from drafted_decoding.generate import agreement

from shardmill import machine
from shardmill.bench import prompts as asking
from shardmill.bench.energy import Meter, start_meter
from shardmill.bench.prompts import Prompt, Replay, replay
from shardmill.bench.server import Client, TimedAnswer, command, connected, running
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.config import Benchmark
from shardmill.runtime.manifest import read_manifest, verify_width

log = logging.getLogger(__name__)
START_TOKENS = 16  # of the answer in which the first request is compared with later ones
PACKAGES = ("coremltools", "numpy", "shardmill", "torch")
Json = dict[str, Any]
Say = Callable[[str], None]  # receives lines about a benchmark's progress


def conditions(precision: str, threads: int | None) -> dict[str, Any]:
    """Return the conditions for speed.json; Core ML has no `threads` (None), and its precision is fixed."""
    computed = {"threads": threads, "precision": precision} if threads else {}
    return {
        "engine": machine.engine(),
        "machine": machine.machine() | computed,
        "versions": machine.package_versions(PACKAGES),
    }


@dataclass(frozen=True)
class Pair:
    """Answers to one prompt at T = 1 and with one drafter."""

    prompt: Prompt
    drafter: str
    plain: TimedAnswer
    drafted: TimedAnswer
    margin: float | None = None  # between the two best logits at the first different token; None without one


@dataclass(frozen=True)
class PrefillSpeed:
    """The answer to a prompt that the server had not cached."""

    prompt: Prompt
    answer: TimedAnswer

    @property
    def tokens_per_second(self) -> float:
        """Return the prompt tokens per second."""
        return len(self.prompt.tokens) / self.answer.prefill_seconds


def row(pairs: Sequence[Pair], replays: Sequence[Replay]) -> Json:
    """Return the figures of one drafter on one group of prompts; `replays` have the same drafter and prompts."""
    drafted = [pair.drafted for pair in pairs]
    ratios = [pair.plain.seconds_per_token / pair.drafted.seconds_per_token for pair in pairs]
    return {
        "drafter": pairs[0].drafter,
        "requests": len(pairs),
        "new_tokens": median(len(answer.tokens) for answer in drafted),
        "ended": dict(Counter(answer.finish_reason for answer in drafted)),
        "ms_per_token": 1e3 * median(answer.seconds_per_token for answer in drafted),
        "plain_ms_per_token": 1e3 * median(pair.plain.seconds_per_token for pair in pairs),
        "speedup": median(ratios),
        "speedup_range": [min(ratios), max(ratios)],
        "drafter_us_per_token": 1e6 * median(a.drafter_seconds / len(a.tokens) for a in drafted),
        "exact": sum(pair.plain.tokens == pair.drafted.tokens for pair in pairs) / len(pairs),
        "differs": _differences(pairs),
        "verified_again": sum(answer.verified_again for answer in drafted),
        "verified_again_share": sum(a.verified_again for a in drafted) / max(1, sum(a.decoded for a in drafted)),
        "mj_per_token": _millijoules(drafted),
        "plain_mj_per_token": _millijoules([pair.plain for pair in pairs]),
        "live": acceptance(drafted),
        "oracle": acceptance(replays) if replays else None,
    }


def _differences(pairs: Sequence[Pair]) -> list[Json]:
    """Return the prompts whose drafted answer differs from the answer at T = 1, each with the first different token.

    The margin is the distance between the two best logits at that token at T = 1, None if unknown.
    """
    margins = {
        (pair.prompt.name, agreement(pair.drafted.tokens, pair.plain.tokens)): pair.margin
        for pair in pairs
        if pair.plain.tokens != pair.drafted.tokens
    }
    return [{"prompt": name, "token": token, "margin": margins[name, token]} for name, token in sorted(margins)]


def acceptance(runs: Sequence[TimedAnswer] | Sequence[Replay]) -> Json:
    """Return the acceptance of drafts: [accepted, drafted] per draft position, their sums, and tokens per pass."""
    passes = list(chain.from_iterable(zip(run.accepted, run.drafted, strict=True) for run in runs))
    accepted, drafted = sum(a for a, _ in passes), sum(d for _, d in passes)
    longest = max((d for _, d in passes), default=0)
    return {
        "tokens_per_pass": sum(run.decoded for run in runs) / len(passes) if passes else None,
        "accepted": accepted,
        "drafted": drafted,
        "rate": accepted / drafted if drafted else None,
        "by_position": [[sum(a > i for a, _ in passes), sum(d > i for _, d in passes)] for i in range(longest)],
    }


def _millijoules(answers: Sequence[TimedAnswer]) -> float | None:
    """Return the energy of the whole chip per token; None without a meter, or if the meter did not move."""
    used = [answer.joules for answer in answers if answer.joules is not None]
    return 1e3 * sum(used) / sum(len(answer.tokens) for answer in answers) if sum(used) else None


def pass_seconds(pairs: Sequence[Pair], widths: Sequence[int]) -> dict[str, float]:
    """Return the median time of a decode pass by width; a pass takes the narrowest width that fits its tokens."""
    by_width: dict[int, list[float]] = {}
    for run in chain.from_iterable((pair.plain, pair.drafted) for pair in pairs):
        for drafted, seconds in zip(run.drafted, run.pass_seconds, strict=True):
            by_width.setdefault(min(w for w in widths if w > drafted), []).append(seconds)
    return {str(width): median(by_width[width]) for width in sorted(by_width)}


@dataclass(frozen=True)
class Questions:
    """The prompts per length and per task, the groups without room, and a prompt for the start."""

    sweep: list[Prompt]
    tasks: list[Prompt]
    refused: Mapping[int | str, str]
    start: Prompt


def benchmark(
    build: Path,
    settings: Benchmark,
    draft: Path | None = None,
    precision: str = "fp32",
    say: Say = log.info,
    guard_margin: float = 0.0,
) -> Json:
    """Return the content of speed.json.

    Args:
        build: the folder of a finished build.
        settings: the config's `benchmark`.
        draft: the build of a draft model, to measure it as a drafter.
        precision: the portable engine's precision; ignored on Core ML.
        say: receives lines about the progress.
        guard_margin: see `Settings.guard_margin`.

    Raises:
        ShardmillError: a text is missing, or the server can't be started.
    """
    manifest = read_manifest(build)
    asked = questions(build, manifest, settings)
    with (
        running(command(build, draft, precision, guard_margin)) as server,
        start_meter() as energy,
        connected(server, energy.joules) as client,
    ):
        say(f"the server was ready after {server.ready_seconds:.1f} s")
        start = {"ready_seconds": server.ready_seconds, **first_and_later(client, asked.start, settings.repetitions)}
        heads = [manifest["drafter"]["kind"]] if "drafter" in manifest else []
        drafters = (*settings.drafters, *heads, *([DRAFT_MODEL] if draft else []))
        pairs, prefills = take(client, [*asked.sweep, *asked.tasks], drafters, settings, say)
    widths = [width for width in manifest["widths"] if width <= verify_width(manifest)]  # of decode passes
    figures = speed_summary(pairs, prefills, asked, widths, max(manifest["widths"]))
    return {
        **conditions(precision, server.threads),
        "settings": asdict(settings) | {"drafters": drafters, "widths": manifest["widths"]},
        "start": start,
        **figures,
        "not_run": [*unseen(figures["pass_seconds"], widths), *not_benchmarked(asked, pairs, energy, draft)],
    }


def questions(build: Path, manifest: Mapping[str, Any], settings: Benchmark) -> Questions:
    """Return the prompts as the model's tokens; the last pass may be padded, so the context needs room for that too."""
    tokenizer = read_tokenizer(build / manifest["tokenizer"]["path"])

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer.encode(text).ids
        return tokens

    room = manifest["context"] - settings.new_tokens - verify_width(manifest)
    sweep, long = asking.fitting(asking.tiled(Path(settings.text), settings.prompt_tokens, encode), room)
    wanted = asking.of_tasks(Path(settings.task_prompts), settings.tasks, settings.prompts_per_task, encode)
    tasks, longer = asking.fitting(wanted, room)
    shortest = min(*settings.prompt_tokens, manifest["context"] - START_TOKENS)
    (start,) = asking.tiled(Path(settings.text), [max(1, shortest)], encode)
    return Questions(sweep, tasks, long | longer, start)


def first_and_later(client: Client, prompt: Prompt, repetitions: int) -> Json:
    """Return the seconds of the first request to a fresh server, and the median of the same request later."""
    first, *later = (_cold(client, prompt) for _ in range(1 + repetitions))
    return {
        "first_request_seconds": first,
        "later_request_seconds": median(later),
        "prompt_tokens": len(prompt.tokens),
        "new_tokens": START_TOKENS,
    }


def _cold(client: Client, prompt: Prompt) -> float:
    """Return the seconds of a request whose prompt is not cached; the server drops the prompt afterwards."""
    seconds = client.ask(prompt.tokens, START_TOKENS, "none").wall_seconds
    client.forget(prompt.tokens)
    return seconds


def take(
    client: Client, prompts: Sequence[Prompt], drafters: Sequence[str], settings: Benchmark, say: Say
) -> tuple[list[Pair], list[PrefillSpeed]]:
    """Collect all answers, repetition by repetition, so that a prompt's answers are spread over the whole run."""
    pairs, prefills = [], []
    for repetition in range(settings.repetitions):
        say(f"repetition {repetition + 1} of {settings.repetitions}: {len(prompts)} prompts, {len(drafters)} drafters")
        for prompt in prompts:
            client.forget(prompt.tokens)
            prefills.append(PrefillSpeed(prompt, client.ask(prompt.tokens, 1, "none")))
            for drafter in drafters:
                plain = client.ask(prompt.tokens, settings.new_tokens, "none")
                drafted = client.ask(prompt.tokens, settings.new_tokens, drafter)
                pairs.append(Pair(prompt, drafter, plain, drafted, _margin(client, prompt, plain, drafted)))
    return pairs, prefills


def _margin(client: Client, prompt: Prompt, plain: TimedAnswer, drafted: TimedAnswer) -> float | None:
    """Return how close the two best logits were at the first token that drafting changed; None if it changed none."""
    same = agreement(drafted.tokens, plain.tokens)
    if plain.tokens == drafted.tokens or same == len(plain.tokens):
        return None
    return client.margin(prompt.tokens, same)


def speed_summary(
    pairs: Sequence[Pair], prefills: Sequence[PrefillSpeed], asked: Questions, widths: Sequence[int], wide: int
) -> Json:
    """Return the figures of all decoded answers; a text that ends with its first token has no decoding.

    `widths` are the widths of decode passes, and `wide` is the most tokens of a prompt's pass.
    """
    pairs = [pair for pair in pairs if min(pair.plain.decoded, pair.drafted.decoded) > 0]
    seconds, widest = pass_seconds(pairs, widths), max(widths)
    lengths = dict.fromkeys(pair.prompt.group for pair in pairs if pair.prompt in asked.sweep)
    return {
        "prefill": [prefill_row(length, pairs, prefills, wide) for length in lengths],
        "pass_seconds": seconds,
        "break_even": seconds[str(widest)] / seconds["1"] if widest > 1 and str(widest) in seconds else None,
        "sweep": list(rows("prompt_tokens", asked.sweep, pairs, widest)),
        "tasks": list(rows("task", asked.tasks, pairs, widest)),
    }


def prefill_row(length: int | str, pairs: Sequence[Pair], prefills: Sequence[PrefillSpeed], wide: int) -> Json:
    """Return the prefill speed of one prompt length in passes of at most `wide` tokens, beside decoding at T = 1."""
    speed = median(prefill.tokens_per_second for prefill in prefills if prefill.prompt.group == length)
    plain = median(pair.plain.seconds_per_token for pair in pairs if pair.prompt.group == length)
    return {"prompt_tokens": length, "width": wide, "tokens_per_second": speed, "over_decode": speed * plain}


def rows(key: str, prompts: Iterable[Prompt], pairs: Sequence[Pair], widest: int) -> Iterator[Json]:
    """Yield a row per group and drafter; `key` names the group."""
    for group in dict.fromkeys(prompt.group for prompt in prompts):
        for drafter in dict.fromkeys(pair.drafter for pair in pairs):
            same = [pair for pair in pairs if (pair.prompt.group, pair.drafter) == (group, drafter)]
            if same:
                outputs = {pair.prompt: pair.plain.tokens for pair in same}
                replays = [
                    replay(create_drafter(drafter), prompt.tokens, output, widest - 1)
                    for prompt, output in outputs.items()
                    if drafter not in (*TRAINED, DRAFT_MODEL)
                ]
                yield {key: group, "prompts": len(outputs), **row(same, replays)}


def unseen(seconds: Mapping[str, float], widths: Sequence[int]) -> list[Json]:
    """Return the widths that no decode pass had, with the reason."""
    reason = "no draft was worth verifying, so no pass had this width"
    return [{"kind": "width", "what": str(w), "reason": reason} for w in widths if str(w) not in seconds]


def not_benchmarked(asked: Questions, pairs: Sequence[Pair], energy: Meter, draft: Path | None) -> list[Json]:
    """Return everything that was not measured: its kind, its name and the reason."""
    rows = [("prompt", group, reason) for group, reason in asked.refused.items()]
    ended = dict.fromkeys(p.prompt.group for p in pairs if min(p.plain.decoded, p.drafted.decoded) == 0)
    rows += [("prompt", group, "the model ended a text with its first token") for group in ended]
    if draft is None:
        rows += [("drafter", DRAFT_MODEL, "it needs a second build, which `--draft` names")]
    else:
        rows += [("oracle", f"replay of {DRAFT_MODEL}", "it would run the draft model once more, outside the server")]
    if energy.joules is None:
        rows += [("energy", "energy per token", energy.reason)]
    elif not any(answer.joules for pair in pairs for answer in (pair.plain, pair.drafted)):
        rows += [("energy", "energy per token", "the machine's meter stood still: check whether it works by itself")]
    return [{"kind": kind, "what": str(what), "reason": reason} for kind, what, reason in rows]
