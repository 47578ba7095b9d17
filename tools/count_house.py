"""Counts the files, lines and lines of code of each package, here or at a commit, and holds them to their budgets.

    python tools/count_house.py                      # this checkout
    python tools/count_house.py --commit 3757965f    # a commit, by today's packages
    python tools/count_house.py --check              # fails where a package has more than tools/budgets.json allows
    python tools/count_house.py --write              # makes the counts the budgets

A file belongs to the package that it lies in today, wherever it lay at the commit: what was moved counts for the same
package before and after. A budget may grow only in a commit that says why. What a line of code is does not depend on
how it is written: blank lines, comments and docstrings are none.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGETS = Path(__file__).with_name("budgets.json")
# Package -> how the paths of its files begin, the former ones too; a file belongs to the first package that fits. What
# is in any folder `tests` belongs to the tests.
PACKAGES = {
    "tests": ("tests/", "swift/Tests/", "swift-any/Tests/"),
    "portable": ("portable/portable_coreml/", "portable/extra/"),
    "decoding": ("decoding/drafted_decoding/", "shardmill/decode/"),
    "kit": ("kit/kit_runner/", "shardmill/kit_runner/", "shardmill/figures.py"),
    "lab": (
        *("lab/", "benchmarks/", "tools/fit_evidence.py"),
        *("shardmill/draft/", "shardmill/precision/rotate.py", "shardmill/models/synthetic.py"),
    ),
    "exporters": ("exporters/",),
    "core": ("shardmill/",),
    "rules": ("Snakefile", "rules/", "scripts/"),
    "swift": ("swift/", "swift-any/"),
    "tools": ("tools/",),
}
KINDS = (".py", ".smk", ".swift")
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Count:
    """What a reader meets in some files.

    Attributes:
        files: how many.
        lines: of all kinds.
        code: lines that are neither blank, comment nor docstring.
    """

    files: int
    lines: int
    code: int

    def __add__(self, other: Count) -> Count:
        return Count(self.files + other.files, self.lines + other.lines, self.code + other.code)


def main(arguments: list[str] | None = None) -> int:
    """Print the counts; return 1 if they are checked and one is above its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="count the files of a commit in place of those in this checkout")
    parser.add_argument("--check", action="store_true", help="fail where a package has more than its budget")
    parser.add_argument("--write", action="store_true", help="make the counts the budgets")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        root = extracted(args.commit, Path(temporary)) if args.commit else ROOT
        sources = {name: (root / name).read_text(encoding="utf-8") for name in sorted(names(root)) if package(name)}
    counts = counted(sources)
    table = [
        ("package", "files", "lines", "code"),
        *((name, *asdict(count).values()) for name, count in counts.items()),
    ]
    print("\n".join(f"{row[0]:<10}" + "".join(f"{cell:>9}" for cell in row[1:]) for row in table))
    twice = Counter(name for file, text in sources.items() if package(file) == "core" for name in public(text))
    print(f"public names that two modules of the core define: {sum(count > 1 for count in twice.values())}")
    if args.write:
        rows = [f"  {json.dumps(name)}: {json.dumps(asdict(count))}" for name, count in counts.items()]
        BUDGETS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    over = complaints(counts, json.loads(BUDGETS.read_text(encoding="utf-8"))) if args.check else []
    print("\n".join(over), file=sys.stderr, end="\n" if over else "")
    return bool(over)


def names(root: Path) -> Iterator[str]:
    """Yield the paths of a checkout's own files, or of all files where there is no repository."""
    if (root / ".git").exists():
        listed = git("ls-files", "-co", "--exclude-standard", root=root).decode().splitlines()
        yield from (name for name in listed if (root / name).is_file())
    else:
        yield from (file.relative_to(root).as_posix() for file in root.rglob("*") if file.is_file())


def extracted(commit: str, folder: Path) -> Path:
    """Write the files of a commit to a folder, which is returned."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="data")
    return folder


def git(*words: str, root: Path = ROOT) -> bytes:
    """Return what git prints."""
    return subprocess.run(("git", "-C", str(root), *words), stdout=subprocess.PIPE, check=True).stdout


def package(name: str) -> str:
    """Return the package that a file belongs to; empty if the file is no source of any."""
    if not name.endswith(KINDS) and name != "Snakefile":
        return ""
    packages = (
        one for one, starts in PACKAGES.items() if name.startswith(starts) or (one == "tests" and "/tests/" in name)
    )
    return next(packages, "")


def counted(sources: Mapping[str, str]) -> dict[str, Count]:
    """Return the count of each package by its name.

    Args:
        sources: the files' texts by their paths.
    """
    counts = dict.fromkeys(PACKAGES, Count(0, 0, 0))
    for name, text in sources.items():
        code = python_code(text) if name.endswith(".py") else other_code(text)
        counts[package(name)] += Count(1, text.count("\n"), code)
    return counts


def python_code(text: str) -> int:
    """Return how many lines of a Python source hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and ast.get_docstring(node, False):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def other_code(text: str) -> int:
    """Return how many lines of Swift or a rule are neither blank nor a comment of one line."""
    return sum(bool(line.strip()) and not line.strip().startswith(("//", "#")) for line in text.splitlines())


def public(text: str) -> list[str]:
    """Return the functions and classes at a module's top that other modules may use."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(text).body if isinstance(node, kinds) and not node.name.startswith("_")]


def complaints(counts: Mapping[str, Count], budgets: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a line for each count that is above its budget, or has none."""
    return [
        f"{name}: {count} {what}, {BUDGETS.name} allows {budgets.get(name, {}).get(what, 0)}: "
        "take out as much, or raise it in a commit that says why"
        for name, counted in counts.items()
        for what, count in asdict(counted).items()
        if count > budgets.get(name, {}).get(what, 0)
    ]


if __name__ == "__main__":
    sys.exit(main())
