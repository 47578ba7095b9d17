"""What devices answered about the limits of their systems, in the working folder: what runs there goes by it.

A kit asks which sizes of programs and which numbers of scores the Neural Engine of a system takes, each time just below
and just above a limit. The file has the numbers that it took and those that it did not take, machine by machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kit_runner.questions import key, on_engine
from portable_coreml.judge.limits import SCORES, SYSTEMS, WEIGHT_BYTES, Limit, heed

from shardmill.errors import ShardmillError, UnreadableError
from shardmill.files import read_sealed, sealed, write_json

TABLES = {"weights": WEIGHT_BYTES, "scores": SCORES}  # by question
WIDELY = "AB"  # confidence of what more than one party says


@dataclass(frozen=True)
class Answer:
    """What one machine answered to one question.

    Attributes:
        question: a key of TABLES.
        system: one of SYSTEMS.
        machine: chip, system and its build.
        takes: bytes of weights, or scores, with which a program ran on the Neural Engine, and rightly.
        fails: others.
    """

    question: str
    system: str
    machine: str
    takes: Sequence[int]
    fails: Sequence[int]


def answers_of(content: Mapping[str, Any]) -> Iterator[Answer]:
    """Yield what a result of measure.py says of limits; nothing unless Core ML ran on a system that is known."""
    machine, questions = content["machine"], content.get("questions")
    name = f"{machine['os']} {machine['system'].partition('.')[0]}"
    if questions is None or name not in SYSTEMS or content["engine"]["name"] != "coreml":
        return
    told = f"{machine['chip']}, {machine['os']} {machine['system']} ({machine['build']})"
    for asked in (one for one in questions["asked"] if one["name"] in TABLES):
        lines = [questions["measurements"].get(key(asked["name"], place)) for place in range(len(asked["probes"]))]
        ran: dict[bool, list[int]] = {True: [], False: []}
        for probe, line in zip(asked["probes"], lines, strict=True):
            if line is None or line["status"] not in ("ok", "wrong"):
                continue
            placed = on_engine(line)
            if asked["name"] == "weights":
                ran[placed].append(probe["bytes"])
            elif placed or line["status"] == "wrong":  # right on the CPU says nothing of the Neural Engine
                ran[placed].append(probe["queries"] * probe["keys"])
        if ran[True] or ran[False]:
            yield Answer(asked["name"], name, told, sorted(ran[True]), sorted(ran[False]))


def stated(limit: Limit, system: str, answers: Iterable[Answer]) -> Limit | None:
    """Return a system's limit as it is with the answers of machines; None if they say nothing new.

    Numbers on both sides of the limit confirm it: then a second party says so. Against one party's word the machine
    counts. Against what several say the stricter counts, and it is contested.
    """
    answers = list(answers)
    fails = min((n for one in answers for n in one.fails), default=None)
    takes = max((n for one in answers for n in one.takes if fails is None or n < fails), default=0)
    sources = (*limit.sources, *(f"measured on {one.machine}" for one in answers))
    measured = replace(limit, systems=tuple(name for name in SYSTEMS if name == system), sources=sources)
    if takes <= limit.most and (fails is None or fails > limit.most):
        agree = takes and fails and limit.confidence not in WIDELY
        return replace(measured, confidence="B") if agree else None
    # A number that is the limit of some system, if one lies between what ran and what did not.
    (table,) = (each for each in TABLES.values() if limit in each)
    between = [one.most for one in table if takes <= one.most < (fails or takes)]
    most = max(between, default=takes or (fails or 1) - 1)
    if limit.confidence in WIDELY:
        return replace(measured, most=min(most, limit.most), confidence="D")
    return replace(measured, most=most, confidence="C")


def limits_of(answers: Sequence[Answer]) -> list[Limit]:
    """Return the limits that answers change."""
    asked = dict.fromkeys((one.question, one.system) for one in answers)
    moved = []
    for question, system in asked:
        limit = next(one for one in TABLES[question] if system in one.systems)
        of_this = (one for one in answers if (one.question, one.system) == (question, system))
        moved.append(stated(limit, system, of_this))
    return [limit for limit in moved if limit is not None]


def remember(content: Mapping[str, Any], file: Path) -> Iterator[str]:
    """Add a result's answers to a file; yield a line for each limit that is another one from now on."""
    new = [*answers_of(content)]
    if not new:
        return
    said = {(one.question, one.system, one.machine) for one in new}
    before = [*_read(file)]
    after = [*(one for one in before if (one.question, one.system, one.machine) not in said), *new]
    write_json(file, sealed({"format": 1, "answers": [vars(one) for one in after]}))
    known = limits_of(before)
    for limit in (one for one in limits_of(after) if one not in known):
        yield f"{file}: {described(limit)}; `plan`, `lint` and builds in this folder go by it"


def described(limit: Limit) -> str:
    """Return a limit in words, with the machine that answered last."""
    what = "scores" if limit.rule == SCORES[0].rule else "bytes of weights"
    says = f"rule {limit.rule}, confidence {limit.confidence}, {limit.sources[-1]}"
    return f"{limit.systems[0]} takes {limit.most} {what} ({says})"


def heed_answers(file: Path) -> None:
    """Let this process go by the answers in a file. Raises ShardmillError if they can't be read."""
    heed(limits_of(_read(file)))


def _read(file: Path) -> list[Answer]:
    if not file.exists():
        return []
    try:
        return [Answer(**one) for one in read_sealed(file)["answers"]]
    except (UnreadableError, KeyError, TypeError) as error:
        raise ShardmillError(
            f"{file}: not as `shardmill device import` wrote it; remove it, and import again"
        ) from error
