"""Draw the rules of the demo's build into docs/architecture.md, as Snakemake orders them; see `--help`."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/architecture.md"
BLOCK = re.compile(r"(?<=<!-- drawn by tools/draw_dag.py -->\n)```mermaid\n.*?```\n", re.DOTALL)


def main() -> None:
    """Write the drawing, or compare it with the page's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page shows other rules")
    check = parser.parse_args().check
    page = PAGE.read_text(encoding="utf-8")
    drawn = BLOCK.sub(lambda _: drawing(rule_graph()), page)
    if not check:
        PAGE.write_text(drawn, encoding="utf-8")
    elif drawn != page or not BLOCK.search(page):
        sys.exit(f"{PAGE.name} draws other rules than Snakemake has: run python tools/draw_dag.py")


def rule_graph() -> str:
    """Return Snakemake's own graph of the demo's rules, in an empty folder, where no build hides a rule."""
    with tempfile.TemporaryDirectory() as folder:
        where = ["--snakefile", ROOT / "Snakefile", "--directory", folder, "--cores", "1"]
        command = [sys.executable, "-m", "snakemake", *where, "--rulegraph", "mermaid-js", "all"]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def drawing(graph: str) -> str:
    """Return a block of Mermaid with the graph's rules and arrows, the same for every order in which they come.

    An arrow that others imply is left out: what convert reads, compile has in hand.
    """
    names = dict(re.findall(r"(\w+)\[\"?(\w+)\"?\]", graph))
    arrows = {(names[before], names[after]) for before, after in re.findall(r"(\w+) --> (\w+)", graph)}
    shown = [f"    {before} --> {after}\n" for before, after in sorted(arrows) if not implied(before, after, arrows)]
    return f"```mermaid\nflowchart LR\n{''.join(shown)}```\n"


def implied(before: str, after: str, arrows: set[tuple[str, str]]) -> bool:
    """Return whether a longer way leads from one rule to the other."""
    return any(start == before and step != after and reaches(step, after, arrows) for start, step in arrows)


def reaches(before: str, after: str, arrows: set[tuple[str, str]]) -> bool:
    """Return whether arrows lead from one rule to the other."""
    return before == after or any(start == before and reaches(step, after, arrows) for start, step in arrows)


if __name__ == "__main__":
    main()
