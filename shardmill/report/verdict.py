"""The page's first line, and what this build does not show: the reasons, and the commands that would show it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardmill.gates.thresholds import PLACEMENT
from shardmill.report.gates import Question
from shardmill.report.read import Build, Json
from shardmill.report.speed import close_calls, described, measured_speed
from shardmill.report.wording import number, plural

BUILD = "snakemake --cores 4 all"
ON_A_MAC = "on a Mac with Apple silicon and macOS 15 or newer, with this build's `--configfile` if it had one"
ON_LINUX = "on Linux, with this build's `--configfile` if it had one"


@dataclass(frozen=True)
class Caveat:
    """Something that this build does not show."""

    subject: str
    state: str  # "failed", "predicted", "not_run", "unverified" or "close"
    why: str
    command: str
    where: str
    headline: bool  # True if the first line names the caveat


@dataclass(frozen=True)
class Verdict:
    """A statement in one line whether every gate holds, and the facts behind it."""

    passed: bool
    line: str
    remedies: tuple[tuple[str, str, str], ...]  # command, where, what it measures
    missed: tuple[Json, ...]
    caveats: tuple[Caveat, ...]


def verdict(build: Build, questions: Sequence[Question]) -> Verdict:
    """Return the verdict on a build."""
    numbers = [n for q in questions for n in q.numbers]
    missed = tuple(n for n in numbers if not n["passed"])
    caveats = tuple(_caveats(build, questions))
    lines = [_outcome(numbers, missed)]
    for state, word in (("failed", "Failed"), ("predicted", "Predicted, not measured"), ("not_run", "Not run")):
        named = [c.subject for c in caveats if c.state == state and (c.headline or state == "failed")]
        lines += [f"{word}: {', '.join(named)}."] if named else []
    passed = bool(numbers) and not missed and not any(c.state == "failed" for c in caveats)
    return Verdict(passed, " ".join(lines), _remedies(caveats), missed, caveats)


def _outcome(numbers: Sequence[Json], missed: Sequence[Json]) -> str:
    """Return a sentence about the results of the gates."""
    if missed:
        return f"{number(len(missed))} of {plural(len(numbers), 'gate number')} missed the threshold."
    if not numbers:
        return "No gate was run."
    predicted = sum(n["evidence"] == "predicted" for n in numbers)
    among = f", {number(predicted)} of them by prediction" if predicted else ""
    return f"All {plural(len(numbers), 'gate number')} hold{among}."


def _remedies(caveats: Sequence[Caveat]) -> tuple[tuple[str, str, str], ...]:
    """Return the commands that would measure the caveats in the first line, each command once."""
    named = [c for c in caveats if c.headline]
    ways = dict.fromkeys((c.command, c.where) for c in named)
    return tuple((*way, ", ".join(c.subject for c in named if (c.command, c.where) == way)) for way in ways)


def _caveats(build: Build, questions: Sequence[Question]) -> Iterator[Caveat]:
    """Yield everything that is predicted, not run or unverified, the most important first."""
    yield from _exactness(build)
    yield from _residency_caveats(build)
    yield from _speed_caveats(build)
    for question in questions:
        if question.key != PLACEMENT:
            yield from _unanswered(build, question)
    for note in dict.fromkeys(r["note"] for r in build.receipts.values() if r.get("note")):
        yield Caveat("compiled bundles (.mlmodelc)", "unverified", note, BUILD, ON_A_MAC, False)


def _residency_caveats(build: Build) -> Iterator[Caveat]:
    """Yield a caveat if residency was not measured."""
    predicted = [file["part"] for file in build.placed if file["evidence"] != "measured"]
    if predicted:
        why = (
            f"Placement rules say that no operation of {plural(len(predicted), 'program')} is known to leave the "
            "Neural Engine. They say what it can run, not what Core ML will choose, and nothing here was resident."
        )
        yield Caveat("Neural Engine residency", "predicted", why, BUILD, ON_A_MAC, True)
    if not build.residency:
        yield Caveat("Neural Engine residency", "not_run", "There is no residency file.", BUILD, ON_A_MAC, True)


def _exactness(build: Build) -> Iterator[Caveat]:
    """Yield a caveat if drafting gave other tokens than plain decoding, because of a close call or a fault."""
    if build.encodes or build.speed is None:
        return
    again = f"shardmill bench build/{build.model['model']}"
    other = [row for row in measured_speed(build.speed) if row["exact"] < 1]
    close = [row for row in other if close_calls(row, build.turned)]
    wrong = [f"{described(row)} ({row['drafter']})" for row in other if row not in close]
    if wrong:
        why = f"With drafts the model gave other tokens than without: {', '.join(wrong)}."
        yield Caveat("exact speculation", "failed", why, again, "once the fault is found", False)
    if close:
        margins = [d["margin"] for row in close for d in row["differs"] if d.get("margin") is not None]
        widest = f" At the first token that differs they were {number(max(margins))} apart at most." if margins else ""
        why = (
            f"In {plural(len(close), 'row')} of the benchmark drafting turned a close call. Core ML rounds each width "
            f"of a pass otherwise: logits less than {number(build.turned)} apart may change places.{widest}"
        )
        yield Caveat("the same text with and without drafts", "close", why, again, "on a quiet machine", False)


def _speed_caveats(build: Build) -> Iterator[Caveat]:
    """Yield a caveat for everything that the benchmark did not measure."""
    if build.speed is None:
        where = "without `benchmark: false` in this build's config"
        yield Caveat("benchmark", "not_run", "The config leaves it out: `benchmark: false`.", BUILD, where, True)
        return
    if not build.encodes and not any(measured_speed(build.speed)):
        yield Caveat("benchmark", "not_run", "No prompt fits the context.", BUILD, "after raising `context`", True)
    if build.speed["engine"]["name"] != "coreml":
        why = "The benchmark ran on the portable engine: a CPU's speed says nothing about the Neural Engine's."
        yield Caveat("Neural Engine speed", "not_run", why, BUILD, ON_A_MAC, True)
    for gap in build.speed["not_run"]:
        yield _gap_caveat(gap, f"shardmill bench build/{build.model['model']}")


def _gap_caveat(gap: Json, bench: str) -> Caveat:
    """Return a caveat for a missing figure of the benchmark, with the command that measures it."""
    what, reason = gap["what"], gap["reason"]
    match gap["kind"]:
        case "energy":
            return Caveat(what, "not_run", reason, f"sudo {bench}", "on a Mac, or on Linux with RAPL", True)
        case "drafter":
            where = "with the build of a smaller model that has the same tokenizer"
            return Caveat(f"drafter {what}", "not_run", reason, f"{bench} --draft build/SMALLER", where, False)
        case "prompt":
            subject = f"benchmark of {what} tokens" if what.isdecimal() else f"benchmark of {what}"
            where = "after raising `context`, or with shorter prompts, in the config"
            return Caveat(subject, "not_run", reason, BUILD, where, False)
        case "width":
            where = "with prompts that repeat themselves"
            return Caveat(f"time of a pass of {plural(int(what), 'token')}", "not_run", reason, bench, where, False)
    return Caveat(what, "not_run", reason, bench, "for the other drafters", False)


def _unanswered(build: Build, question: Question) -> Iterator[Caveat]:
    """Yield a caveat for the measures of a question that have no number in any part."""
    portable = all(file["engine"]["name"] == "portable" for file in build.parity)
    where = ON_A_MAC if portable else ON_LINUX
    for measure in question.measures:
        if measure.worst is None:
            yield Caveat(measure.name, "not_run", measure.reason, BUILD, where, measure.refused)
