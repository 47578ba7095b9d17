"""The limits of systems: each system has one of each kind, and whoever asks for several gets the strictest."""

from __future__ import annotations

import pytest
from portable_coreml.errors import InputError
from portable_coreml.judge.limits import (
    SCORES,
    SYSTEMS,
    WEIGHT_BYTES,
    asked_for,
    between,
    limits,
    listed,
    loosest,
    strictest,
    taking,
)
from portable_coreml.judge.rule import SEVERITIES
from portable_coreml.judge.rules import RULES

GIB = 1 << 30


def test_every_system_has_one_limit_with_its_source() -> None:
    """Two entries for a system would contradict each other."""
    for table in (WEIGHT_BYTES, SCORES):
        assert sorted(system for limit in table for system in limit.systems) == sorted(SYSTEMS)
    for system in SYSTEMS:
        for found in (limits(system).weight_bytes, limits(system).scores):
            assert system in found.systems and found.sources and found.confidence in "ABCD"
            assert RULES[found.rule].severity in SEVERITIES


def test_macos_27_takes_half_of_what_macos_26_took() -> None:
    assert [limits(system).weight_bytes.most // GIB for system in ("macOS 15", "macOS 26", "macOS 27")] == [2, 2, 1]
    assert (limits("macOS 27").weight_bytes.confidence, limits("macOS 26").weight_bytes.confidence) == ("C", "A")


def test_of_several_systems_the_strictest_counts() -> None:
    assert strictest(SYSTEMS).weight_bytes.most == GIB
    assert strictest(["macOS 15", "macOS 26"]).weight_bytes.most == loosest().weight_bytes.most == 2 * GIB
    assert taking(GIB, SYSTEMS) == SYSTEMS
    assert taking(GIB + 1, SYSTEMS) == ("macOS 15", "macOS 26", "iOS 26")
    assert taking(2 * GIB + 1, SYSTEMS) == ()


def test_systems_are_named_by_their_oldest_and_newest() -> None:
    assert between("macOS 15", "macOS 27") == ("macOS 15", "macOS 26", "macOS 27")
    assert between("iOS 26", "iOS 26") == ("iOS 26",)
    for oldest, newest in (("macOS 27", "macOS 15"), ("macOS 15", "iOS 27"), ("iOS 18", "macOS 27")):
        with pytest.raises(InputError, match="is no later system of the same platform"):
            between(oldest, newest)


def test_a_system_that_nobody_knows_is_refused_with_those_that_are_known() -> None:
    for asked in (lambda: limits("macOS 14"), lambda: between("macOS 14", "macOS 27"), lambda: asked_for(["x"], False)):
        with pytest.raises(InputError, match="no system whose limits are known; there are macOS 15, "):
            asked()


def test_a_command_line_may_ask_for_systems_and_for_every_ios() -> None:
    assert asked_for(["macOS 26"], True) == ("macOS 26", "iOS 18", "iOS 26", "iOS 27")
    assert asked_for([], False) == ()


@pytest.mark.parametrize(
    ("systems", "text"),
    [
        ((), "none"),
        (("macOS 27",), "macOS 27"),
        (("macOS 15", "macOS 26", "iOS 26"), "macOS 15 to 26 and iOS 26"),
        (("iOS 18", "iOS 27", "macOS 27"), "macOS 27, iOS 18 and iOS 27"),
        (("macOS 27", "iOS 18"), "macOS 27 and iOS 18"),
        (SYSTEMS, "macOS 15 to 27 and iOS 18 to 27"),
    ],
)
def test_systems_are_listed_for_people(systems: tuple[str, ...], text: str) -> None:
    """A run of systems is named by its ends, and never reaches over to another platform."""
    assert listed(systems) == text
