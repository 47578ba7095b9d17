"""tools/count_house.py: what a line of code is, which package a file belongs to, and what a budget allows.

Names that say nothing of a thing stay out of the product, and limits that nobody derived out of the tests.
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
TOLERANCES = {"atol", "rtol", "abs", "rel", "rel_tol", "abs_tol"}
PROMISED = {"tests/models/test_primitives.py": {"2e-06", "4e-06"}}  # a polynomial's own error, in docs/families.md
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


def literal_limits(source: str) -> list[tuple[int, str]]:
    """Return line and text of each limit below a thousandth that is a number, with nothing of limits.py in it.

    A limit is what a comparison calls larger, or an argument that is called like one.
    """
    tree = ast.parse(source)
    constants = [pair for node in tree.body if isinstance(node, ast.Assign) for pair in _assigned(node)]
    small = {name.id for name, value in constants if isinstance(name, ast.Name) and _is_small(value, set())}
    upper = [each.value for each in ast.walk(tree) if isinstance(each, ast.keyword) and each.arg in TOLERANCES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                upper += [right] if isinstance(operator, ast.Lt | ast.LtE) else []
                upper += [left] if isinstance(operator, ast.Gt | ast.GtE) else []
    return sorted((each.lineno, ast.unparse(each)) for each in upper if _is_small(each, small))


def _assigned(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    name, value = node.targets[0], node.value
    if isinstance(name, ast.Tuple) and isinstance(value, ast.Tuple):
        return [*zip(name.elts, value.elts, strict=False)]
    return [(name, value)]


def _is_small(value: ast.expr, small: set[str]) -> bool:
    if isinstance(value, ast.BinOp):
        return "limits." not in ast.unparse(value) and (_is_small(value.left, small) or _is_small(value.right, small))
    if isinstance(value, ast.Name):
        return value.id in small
    return isinstance(value, ast.Constant) and isinstance(value.value, float) and 0 < value.value < 1e-3


@pytest.mark.parametrize(
    ("source", "limits"),
    [
        ("assert error < 1e-5", ["1e-05"]),
        ("assert 5e-6 >= error", ["5e-06"]),
        ("assert 0 < error <= 2 * 1e-5 < 1", ["2 * 1e-05"]),
        ("CLOSE, FAR = 1e-5, 1\ndef judge(error):\n return error < CLOSE and error < FAR", ["CLOSE"]),
        ("assert value == pytest.approx(wanted, rel=1e-6)", ["1e-06"]),
        ("np.testing.assert_allclose(value, wanted, rtol=0, atol=step + 1e-7)", ["step + 1e-07"]),
        ("assert error < 3e-6 + limits.roundings('fp32').value", []),
        ("assert 1e-5 < error", []),
        ("assert value == pytest.approx(1e-5, rel=0.02)", []),
    ],
)
def test_a_limit_that_nobody_derived_is_seen(source: str, limits: list[str]) -> None:
    assert [text for _, text in literal_limits(source)] == limits


def test_no_test_has_a_limit_that_nobody_derived(house: ModuleType) -> None:
    """It was read off the machine at hand. portable/tests/rounding/limits.py derives one and says what it catches."""
    tests = [name for name in house.names(ROOT) if name.endswith(".py") and "tests/" in name]
    assert len(tests) > 500
    limits = [(file, *limit) for file in tests for limit in literal_limits((ROOT / file).read_text())]
    assert [one for one in limits if one[2] not in PROMISED.get(one[0], set())] == []
    assert {(file, text) for file, _, text in limits} == {(file, text) for file in PROMISED for text in PROMISED[file]}
