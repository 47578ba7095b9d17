"""A change of code that decides bytes or verdicts gives every step that runs the code another key.

Mutants of single literals, names and operators are drawn from the folders below. Which steps run a module, Python
itself says: the jobs of a real build told what they imported. Formatting, comments and docstrings are lost in every
mutant and its original, so the test also shows that they do not count.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmill.pipeline import code_digest
from shardmill.pipeline.code_digest import Module, data_of, parse_module, read_module
from shardmill.pipeline.needs import STEPS

from .undisturbed import imported, undisturbed

FOLDERS = ("models", "convert", "gates", "forms")
MUTANTS = 600
FAMILY_FOLDERS = [Path(*name.split(".")) for name in code_digest.FAMILIES]
OPERATORS: list[list[type[ast.AST]]] = [
    [
        ast.Add,
        ast.Sub,
        ast.Mult,
        ast.Div,
        ast.FloorDiv,
        ast.Mod,
        ast.Pow,
        ast.LShift,
        ast.RShift,
        ast.BitOr,
        ast.BitAnd,
    ],
    [ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq],
    [ast.In, ast.NotIn],  # codespell:ignore notin
    [ast.Is, ast.IsNot],
    [ast.And, ast.Or],
    [ast.USub, ast.UAdd, ast.Not],
]
Mutation = Callable[[], None]


def literal(value: object) -> object:
    """Another value of a literal's kind."""
    match value:
        case bool():
            return not value
        case str():
            return value + "x"
        case bytes():
            return value + b"x"
        case int() | float():
            return value + 1
    return 0  # for None and ...


def operator(old: ast.AST) -> ast.AST | None:
    """Return the next operator of a kind; None for a kind that has only one."""
    kind = next((kind for kind in OPERATORS if type(old) in kind), None)
    return kind[(kind.index(type(old)) + 1) % len(kind)]() if kind else None


def mutations(tree: ast.AST) -> Iterator[Mutation]:
    """Yield each change of one literal, name or operator that Python would run."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=value):
                yield lambda node=node, value=value: setattr(node, "value", literal(value))
            case ast.Name(id=name):
                yield lambda node=node, name=name: setattr(node, "id", f"{name}_x")
            case ast.Attribute(attr=name):
                yield lambda node=node, name=name: setattr(node, "attr", f"{name}_x")
            case ast.keyword(arg=str(name)) | ast.arg(arg=name):
                yield lambda node=node, name=name: setattr(node, "arg", f"{name}_x")
            case ast.alias(name=name):
                yield lambda node=node, name=name: setattr(node, "name", f"{name}_x")
            case ast.BinOp(op=old) | ast.BoolOp(op=old) | ast.UnaryOp(op=old) | ast.AugAssign(op=old):
                if new := operator(old):
                    yield lambda node=node, new=new: setattr(node, "op", new)
            case ast.Compare(ops=[first, *rest]):
                if new := operator(first):
                    yield lambda node=node, ops=[new, *rest]: setattr(node, "ops", ops)


def running(tree: ast.Module) -> ast.Module:
    """Return a module without docstrings and imports for type checkers, so that no mutant changes them."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not never_runs(s)] or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def never_runs(statement: ast.stmt) -> bool:
    return ast.unparse(statement).startswith(("if TYPE_CHECKING:", '"""', "'", '"'))


class Sampled:
    """A module, and its mutants by number."""

    def __init__(self, file: Path) -> None:
        self.file, self.data = file, data_of(file)
        self.text = ast.unparse(running(ast.parse(file.read_bytes())))
        self.count = len(list(mutations(ast.parse(self.text))))

    def mutant(self, index: int) -> str:
        tree = ast.parse(self.text)
        list(mutations(tree))[index]()
        return ast.unparse(tree)

    def module(self, text: str) -> Module:
        return parse_module(self.file, text.encode(), self.data)


def modules_of(step: str, family: str) -> dict[str, Path]:
    return code_digest.closure(code_digest.modules(STEPS[step]), family)


@pytest.fixture(scope="module")
def witnessed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Return the modules that Python imported in each step's jobs of a build of phi3."""
    return imported(undisturbed(tmp_path_factory.mktemp("witnessed") / "project"))


def test_every_module_that_a_job_imports_is_in_its_steps_closure(witnessed: dict[str, set[str]]) -> None:
    """But for the modules that any job uses to find out whether there is work."""
    around = set(code_digest.closure(["shardmill.pipeline.job"]))
    assert {"split", "convert", "parity", "parity_stack", "residency", "compile", "reference"} <= set(witnessed)
    assert "shardmill.convert.stamped" in witnessed["convert"] and "shardmill.gates.stack" in witnessed["parity_stack"]
    assert "shardmill.models.decoder" in witnessed["split"]
    for step, names in witnessed.items():
        missing = {name for name in names if code_digest.module_file(name)} - set(modules_of(step, "phi3")) - around
        assert missing == set(), step


@pytest.mark.thorough
def test_every_mutant_gives_each_step_that_runs_it_another_key(
    monkeypatch: pytest.MonkeyPatch, witnessed: dict[str, set[str]]
) -> None:
    draw = random.Random(30)
    root = code_digest.OURS["shardmill"]
    closures: dict[str, dict[str, set[Path]]] = {}

    def steps_of(file: Path) -> tuple[str, set[str]]:
        """Return the family whose builds run a module, and the steps whose closure has it."""
        relative = file.relative_to(root)
        family = file.stem if relative.parent in FAMILY_FOLDERS and file.stem != "__init__" else "phi3"
        if family not in closures:
            closures[family] = {step: set(modules_of(step, family).values()) for step in STEPS}
        return family, {step for step, files in closures[family].items() if file in files}

    files = [file for folder in FOLDERS for file in sorted((root / "shardmill" / folder).rglob("*.py"))]
    sampled = {file: Sampled(file) for file in files if steps_of(file)[1]}
    places = [(file, index) for file, one in sampled.items() for index in range(one.count)]
    read: dict[Path, Module] = {}
    monkeypatch.setattr(code_digest, "read_module", lambda file: read[file] if file in read else read_module(file))
    originals: dict[tuple[str, str], str] = {}

    def digest(step: str, family: str) -> str:
        return code_digest.code_digest(code_digest.modules(STEPS[step]), family)

    blind: list[str] = []
    for file, index in draw.sample(places, MUTANTS):
        one, (family, steps) = sampled[file], steps_of(file)
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        steps = steps | {step for step, names in witnessed.items() if name in names}
        mutant = one.mutant(index)
        assert one.module(one.text).code == read_module(file).code, f"{file}: formatting or docstrings count"
        for step in steps:
            originals.setdefault((step, family), digest(step, family))
        read[file] = one.module(mutant)
        blind += [
            f"{step}: {name}, mutant {index}" for step in steps if digest(step, family) == originals[step, family]
        ]
        del read[file]
    assert blind == []


def test_what_is_imported_by_a_computed_name_is_known() -> None:
    """No import statement shows it: families and towers, which the digest adds, modules of transformers, an engine of a
    test, the engine's second package, which no family's program needs, and what a template asks of its clock."""
    files = {file for step in STEPS for file in modules_of(step, "phi3").values()}
    found = {"/".join(file.parts[-2:]) for file in files if "import_module" in file.read_text()}
    ours = {"models/__init__.py", "towers/__init__.py", "kit_runner/child.py", "ops/registry.py", "templates/render.py"}
    assert found <= ours | {"models/rotary.py", "media/processors.py", "media/extractors.py"}
    assert "__import__(" not in "".join(file.read_text() for file in files)


def test_no_step_reads_a_docstring() -> None:
    """For docstrings are the one thing in a module's syntax tree that does not count."""
    readers = ("__doc__", "getdoc", "use_attribute_docstrings")
    files = {file for step in STEPS for file in modules_of(step, "phi3").values()}
    found = {file.name for file in files if any(word in file.read_text() for word in readers)}
    assert found <= {"proxy.py", "source_file.py"}  # the first hands its own on to a module that it makes
