"""tools/count_house.py: what a line of code is, which package a file belongs to, and what a budget allows.

Names that say nothing of a thing stay out of the product.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
EMPTY_NAMES = {"found", "held", "kept", "own", "given", "there"}
SOURCE = '''"""Says what it does.

In three lines.
"""

import math  # a comment beside code

# a comment of its own
TEXT = """a text,
which is no docstring
"""


def area(
    radius: float,
) -> float:
    """Return it."""

    return math.pi * radius**2
'''


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("count_house", ROOT / "tools/count_house.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def test_lines_of_code_are_those_that_are_no_comment_docstring_or_blank(house: ModuleType) -> None:
    assert house.python_code(SOURCE) == 8
    assert house.other_code("// a comment\n\nlet a = 1 // beside\n}\n") == 2


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("shardmill/plan.py", "core"),
        ("shardmill/decode/session.py", "decoding"),
        ("decoding/drafted_decoding/session.py", "decoding"),
        ("decoding/tests/decode/test_session.py", "tests"),
        ("shardmill/kit_runner/main.py", "kit"),
        ("shardmill/figures.py", "kit"),
        ("shardmill/draft/train.py", "lab"),
        ("benchmarks/decide.py", "lab"),
        ("lab/shardmill_lab/rotate.py", "lab"),
        ("portable/tests/test_cli.py", "tests"),
        ("portable/extra/portable_coreml_extra/kernels.py", "portable"),
        ("swift/Sources/Shardmill/Model.swift", "swift"),
        ("rules/gates.smk", "rules"),
        ("docs/precision.md", ""),
        ("hatch_build.py", ""),
    ],
)
def test_a_file_counts_for_one_package_wherever_it_lay(house: ModuleType, name: str, package: str) -> None:
    assert house.package(name) == package


def test_more_than_a_budget_is_named(house: ModuleType) -> None:
    counts = {"core": house.Count(2, 30, 20), "lab": house.Count(1, 1, 1)}
    budgets = {"core": {"files": 2, "lines": 29, "code": 20}, "lab": {"files": 1, "lines": 1, "code": 1}}
    said = house.complaints(counts, budgets)
    assert len(said) == 1 and said[0].startswith("core: 30 lines, budgets.json allows 29: ")
    assert len(house.complaints(counts, {})) == 6


@pytest.mark.thorough
def test_every_package_has_a_budget_and_files(house: ModuleType) -> None:
    """A folder that is moved again would count as nothing."""
    budgets = json.loads((ROOT / "tools/budgets.json").read_text())
    assert list(budgets) == list(house.PACKAGES)
    sources = {name: (ROOT / name).read_text() for name in house.names(ROOT) if house.package(name)}
    counts = house.counted(sources)
    assert all(counts[name].files > budgets[name]["files"] / 2 for name in budgets)


def empty_names(source: str) -> list[tuple[int, str]]:
    """Return line and name of each variable and parameter with an empty name. Fields of a class may have one."""
    tree = ast.parse(source)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {node.target for one in classes for node in one.body if isinstance(node, ast.AnnAssign)}
    made = [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            made.append((node.lineno, node.id))
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            made.append((node.lineno, node.name))
    return sorted(row for row in made if row[1] in EMPTY_NAMES)


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("def f(held): pass", ["held"]),
        ("def f(*given, own=1, **kept): pass", ["given", "kept", "own"]),
        ("lambda found: 1", ["found"]),
        ("there, (kept, *own) = 1, (2, 3)", ["kept", "own", "there"]),
        ("[found for found in ()]", ["found"]),
        ("(found := 1)", ["found"]),
        ("try: pass\nexcept OSError as found: pass", ["found"]),
        ("match 1:\n case [found, *held]: pass", ["found", "held"]),
        ("class A:\n held: int\n\n def f(self): self.kept = f(own=self.held)", []),
    ],
)
def test_an_empty_name_is_seen_wherever_it_is_given(source: str, names: list[str]) -> None:
    assert [name for _, name in empty_names(source)] == names


def test_no_variable_or_parameter_has_an_empty_name(house: ModuleType) -> None:
    """Whoever reads `found` has to look back for what was found: `ranges`, `problems` or `digests` say it."""
    product = [name for name in house.names(ROOT) if name.endswith(".py") and house.package(name) not in ("", "tests")]
    assert len(product) > 400
    named = [f"{file}:{line}: {name}" for file in product for line, name in empty_names((ROOT / file).read_text())]
    assert not named
