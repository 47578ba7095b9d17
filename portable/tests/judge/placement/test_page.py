"""docs/ane-rules.md: every rule is on it, and it is what the rules say today."""

from __future__ import annotations

from pathlib import Path

import pytest
from portable_coreml.judge.placement import RULES
from portable_coreml.judge.placement.page import rules_page

PAGE = Path(__file__).resolve().parents[4] / "docs" / "ane-rules.md"


def test_the_page_has_every_rule() -> None:
    """Each rule with its sources; contested ones say so."""
    page = rules_page()
    assert all(f"## {rule.id}: {rule.title}" in page for rule in RULES)
    assert page.count("- contested:") == sum(bool(rule.contested) for rule in RULES)


@pytest.mark.skipif(not PAGE.parent.is_dir(), reason="the page is part of the repository, not of the distribution")
def test_the_page_in_docs_is_the_rules() -> None:
    """An edit of the rules that leaves the page as it was fails here."""
    written = PAGE.read_text(encoding="utf-8")
    assert written == rules_page(), "write it again: python -m portable_coreml.judge.placement.page > docs/ane-rules.md"
