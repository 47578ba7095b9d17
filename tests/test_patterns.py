"""Regular expressions read a text once, whatever it is: a client chooses the texts that the server reads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache

import patterns
import pytest
from patterns import GREATEST, Pattern

ROOMS = ("shardmill/serve", "decoding/drafted_decoding", "shardmill/config")
UNKNOWN = {  # expressions that are put together where they run
    "serve/tool_grammar.py:_cut": "alternatives of escaped texts, the tokenizer's special tokens, and nothing repeats",
}
ALLOWED: dict[str, str] = {}  # place -> why a slow text can't come


@cache
def found() -> dict[str, Pattern]:
    return {pattern.place: pattern for pattern in patterns.patterns(ROOMS)}


def test_every_expression_of_these_rooms_is_known() -> None:
    """Those that are known only where they run are named, with the reason why they can do no harm."""
    assert {place for place, pattern in found().items() if pattern.text is None} == set(UNKNOWN)
    assert len(found()) > 20  # the search finds them


def test_no_expression_can_divide_a_text_in_many_ways() -> None:
    """By its structure: no repetitions that overlap, beside each other or nested."""
    known = [pattern for pattern in found().values() if pattern.text is not None]
    wrong = {pattern.place: why for pattern in known if (why := patterns.complaints(pattern))}
    assert {place: why for place, why in wrong.items() if place not in ALLOWED} == {}


def test_the_worst_texts_of_an_expression_take_a_time_that_grows_like_them() -> None:
    """In a process that ends by its CPU time, since an exponential expression would never."""
    done = subprocess.run([sys.executable, patterns.__file__, *ROOMS], check=False, capture_output=True, text=True)
    *_, last = done.stdout.splitlines()
    assert done.returncode == 0, f"{last} took too long {done.stderr}"
    ratios = json.loads(last)
    print(f"{len(ratios)} expressions, worst ratio {max(ratios.values())}")
    assert {place: ratio for place, ratio in ratios.items() if ratio > GREATEST} == {}


BAD = {  # what the check is for: the first two stood in the server's reader of calls
    r"[\w.-]+(?:\[\w*\]?\w*)*\s*": "fullmatch",
    r"<function=([^>\n]+)>(.*?)</function>": "findall",
    r"(a+)+b": "match",
    r"(a|ab|b)*c": "match",
    r"\s*x?\s*y": "match",
    r"\s+$": "search",
    r"a*ba*bc": "search",
}


@pytest.mark.parametrize("text", BAD)
def test_an_expression_that_is_slow_is_found_by_its_structure(text: str) -> None:
    use = BAD[text]
    flags = re.DOTALL if use == "findall" else 0
    assert patterns.complaints(Pattern("", text, flags, frozenset({use})))


@pytest.mark.parametrize("text", [r"<function=([^>\n]+)>(.*?)</function>", r"\s*x?\s*y"])
def test_an_expression_that_is_slow_is_found_by_its_time(text: str) -> None:
    """The worst texts are among those that are made from its parts."""
    slow = Pattern("", text, re.DOTALL, frozenset({BAD[text]}))
    found = patterns.ratios(slow, lambda _: None, size=1500, slow=0.0001, times=3)
    assert any(ratio > GREATEST for ratio in found)
