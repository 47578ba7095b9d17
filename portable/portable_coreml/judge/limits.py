"""Limits that differ from system to system, as data: what a program may hold on each, and who says so.

Rules, planners, gates, pages and kits ask here, so that a new report changes one table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from portable_coreml.errors import InputError

System = Literal["macOS 15", "macOS 26", "macOS 27", "iOS 18", "iOS 26", "iOS 27"]
SYSTEMS: tuple[System, ...] = get_args(System)  # of each platform, the oldest first
SPLIT = "eeANE 2.1.0, README and eeane/ne_limits.py, measured on an M2 with macOS 27.0.1"


MIN_WEIGHT_BYTES = 14_000_000  # with fewer, a program does not earn its dispatch on any system (rule W5)


WRONG_LENGTHS = range(501, 513)  # tokens of an encoder's pass that is reported wrong (rule S11)
LONG_PASS = 2048  # tokens of an encoder's pass with which no operation ran on the Neural Engine (rule S12)


@dataclass(frozen=True)
class Limit:
    """The most that a program may hold of something on some systems.

    Attributes:
        most: the number itself is allowed.
        systems: the systems that the statement is about.
        rule: the rule that judges by it.
        confidence: A to D, as in `judge.rule`.
        sources: the documents that make the statement.
        remark: what else there is to know about it.
    """

    most: int
    systems: tuple[System, ...]
    rule: str
    confidence: str
    sources: tuple[str, ...]
    remark: str = ""


@dataclass(frozen=True)
class Limits:
    """The limits of one system, or the strictest of several.

    Attributes:
        weight_bytes: of a program's weight file.
        scores: of one product of queries and keys, queries x keys.
    """

    weight_bytes: Limit
    scores: Limit


WEIGHT_BYTES = (
    Limit(
        1 << 31,
        ("macOS 15", "macOS 26"),
        "W1",
        "A",
        ("apple/coremltools, pull request 2593, issue 1807", "smpanaro/coreml-llm-cli, chunk_model.py"),
    ),
    Limit(
        1 << 30,
        ("macOS 27",),
        "W1",
        "C",
        (SPLIT,),
        "above it every operation runs on the CPU, without an error or a warning",
    ),
    Limit(
        1 << 30,
        ("iOS 18",),
        "W2",
        "A",
        ("apple/coremltools, docs-guides/source/mlmodel-utilities.md", "apple/ml-stable-diffusion, README"),
        "coremltools pull request 2593 says 2 GB now",
    ),
    Limit(1 << 31, ("iOS 26",), "W2", "A", ("apple/coremltools, pull request 2593",)),
    Limit(1 << 30, ("iOS 27",), "W2", "C", (SPLIT,), "inferred from macOS 27; nobody has reported iOS 27"),
)


SCORES = (
    Limit(
        (1 << 20) - 1,
        SYSTEMS,
        "S9",
        "C",
        ("eeANE 2.1.0, eeane/attention_split.py, measured on an M2 with macOS 27.0.1",),
        "1023 x 1023 is right and 1024 x 1024 is not, for a head alone; inferred for other systems, and for heads that "
        "share keys and are one product",
    ),
)


_heeded: list[Limit] = []


def heed(answers: Iterable[Limit]) -> None:
    """Let what devices answered count in place of the tables in this process, and no earlier answers."""
    _heeded[:] = answers


def heeded() -> tuple[Limit, ...]:
    """Return the answers that count in place of the tables."""
    return tuple(_heeded)


def limits(system: str) -> Limits:
    """Return the limits of a system. Raises InputError if it is not one of SYSTEMS."""
    if system not in SYSTEMS:
        raise InputError(f"{system}: no system whose limits are known; there are {', '.join(SYSTEMS)}")
    return Limits(*(_stated(table, system) for table in (WEIGHT_BYTES, SCORES)))


def _stated(table: Iterable[Limit], system: str) -> Limit:
    stated = next(limit for limit in table if system in limit.systems)
    return next((one for one in _heeded if one.rule == stated.rule and system in one.systems), stated)


def strictest(systems: Iterable[str]) -> Limits:
    """Return the limits of a program that is to run on each of these systems."""
    all_limits = [limits(system) for system in systems]
    return Limits(
        min((one.weight_bytes for one in all_limits), key=_most),
        min((one.scores for one in all_limits), key=_most),
    )


def _most(limit: Limit) -> int:
    return limit.most


def loosest() -> Limits:
    """Return the limits beyond which no known system runs a program."""
    every = [limits(system) for system in SYSTEMS]
    return Limits(max((one.weight_bytes for one in every), key=_most), max((one.scores for one in every), key=_most))


def taking(weight_bytes: int, systems: Iterable[str]) -> tuple[str, ...]:
    """Return the systems that take a program whose weight file has so many bytes."""
    return tuple(system for system in systems if weight_bytes <= limits(system).weight_bytes.most)


def expected_on(weight_bytes: int, systems: Iterable[str]) -> str:
    """Return in words on which of some systems a program with such a weight file is expected on the Neural Engine."""
    systems = tuple(systems)
    takers = taking(weight_bytes, systems)
    if weight_bytes < MIN_WEIGHT_BYTES:
        return "none, too small"
    return "all" if takers == systems else listed(takers)


def between(oldest: str, newest: str) -> tuple[str, ...]:
    """Return the systems of a platform from one to another.

    Raises:
        InputError: a name is unknown, or the second is no later system of the first one's platform.
    """
    for system in (oldest, newest):
        limits(system)
    order: list[str] = [*SYSTEMS]
    span = order[order.index(oldest) : order.index(newest) + 1]
    if not span or oldest.split()[0] != newest.split()[0]:
        raise InputError(f"{newest} is no later system of the same platform than {oldest}")
    return tuple(span)


def asked_for(named: Iterable[str], ios: bool) -> tuple[str, ...]:
    """Return the systems that a command line names, and iOS's systems if it asks for iOS. Raises InputError."""
    every = (*named, *(system for system in SYSTEMS if ios and system.startswith("iOS")))
    for system in every:
        limits(system)
    return every


def listed(systems: Iterable[str]) -> str:
    """Return systems for people: `macOS 15 to 26 and iOS 26`."""
    named, runs = set(systems), list[list[str]]()
    for before, system in pairwise(("", *SYSTEMS)):
        if system in named and runs and runs[-1][-1] == before and before.split()[0] == system.split()[0]:
            runs[-1].append(system)
        elif system in named:
            runs.append([system])
    texts = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1].split()[1]}" for run in runs]
    return " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1]))) if texts else "none"
