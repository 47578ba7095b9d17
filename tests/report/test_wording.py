"""Values as a person reads them: no digit lost that decides, no gap shown as zero."""

from __future__ import annotations

import pytest

from shardmill.report import wording


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.0, "1"),
        (6.607817120401326e-07, "6.61e-7"),
        (1e-05, "1e-5"),
        (0.005, "0.005"),
        (56.44329, "56.44"),
        (0.9984214856612513, "0.9984"),
        (2147483648, "2\u202f147\u202f483\u202f648"),
        (12345.6, "12\u202f346"),
        (-0.25, "-0.25"),
        (None, "not run"),
    ],
)
def test_number(value: float | None, text: str) -> None:
    assert wording.number(value) == text


@pytest.mark.parametrize(("text", "shown"), [("<= 0.0001", "≤\u00a01e-4"), (">= 30", "≥\u00a030"), ("odd", "odd")])
def test_threshold(text: str, shown: str) -> None:
    assert wording.threshold_text(text) == shown


@pytest.mark.parametrize(
    ("value", "threshold", "text"),
    [
        (6.6e-7, "<= 0.0001", "150 × under"),
        (0, "<= 0", "none allowed"),
        (3, "<= 0", "3 over"),
        (0.53, "<= 1", "0.47 under"),
        (56.44, ">= 30", "26 over"),
        (29.5, ">= 30", "0.5 under"),
        (1.0, "<= 1", "at the limit"),
    ],
)
def test_margin(value: float, threshold: str, text: str) -> None:
    assert wording.margin(value, threshold) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "missing"),
        (998, "998\u00a0bytes"),
        (1536, "1.5\u00a0KiB"),
        (1020 * 1024, "1020\u00a0KiB"),
        (2**31, "2\u00a0GiB"),
    ],
)
def test_size(count: int | None, text: str) -> None:
    assert wording.file_size(count) == text


def test_a_share_too_small_to_show_is_not_zero() -> None:
    assert wording.percent(1, 2**31) == "<\u00a00.1\u00a0%"
    assert wording.percent(None) == "not run"
    assert wording.percent(0) == "0\u00a0%"


def test_marked_escapes_before_it_marks() -> None:
    assert wording.marked("a `<b>` & c") == 'a <code class="whole">&lt;b&gt;</code> &amp; c'


def test_sentence_leaves_identifiers_as_they_are() -> None:
    assert wording.sentence("only this") == "Only this."
    assert wording.sentence("fp16 rounding.") == "fp16 rounding."
    assert wording.sentence("") == ""
