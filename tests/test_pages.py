"""Links of the pages lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("portable/**/*.md")])


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_between_pages_lead_somewhere() -> None:
    lost = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if re.match(r"\w+:", target):
                continue
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists() or (heading and file.suffix == ".md" and heading not in anchors(file)):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert len(PAGES) > 20 and not lost


def test_what_no_apple_hardware_has_run_is_said_first() -> None:
    """On README's first screen, on top of the Mac's page, and row by row, until a result from a Mac is recorded."""
    page = (ROOT / "docs/what-has-run-where.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    for claim in ("Core ML loads", "every operation", "the speed on", "a Mac's packages", "Kubernetes", "NFS"):
        (row,) = (row for row in rows if row.startswith(f"| {claim}"))
        assert row.split(" | ")[1].startswith("not run"), row
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Build the demo")[0]
    top = (ROOT / "docs/on-a-mac.md").read_text(encoding="utf-8").partition("## ")[0]
    assert "**No Mac, iPhone or iPad has run it yet.**" in first and "(docs/what-has-run-where.md)" in first
    assert "**Nothing on this page has run on a Mac yet**" in top and "(what-has-run-where.md)" in top
