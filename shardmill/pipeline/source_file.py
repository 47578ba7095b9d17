"""A source file of ours: which other ones it imports, and the digest of what in it decides results.

What can't change a result does not count:

- comments, formatting, docstrings, log messages, imports for type checkers;
- what people are told: texts in `raise`, `help=` and `description=`, what placement rules say and on whose word.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from shardmill.files import is_left_by_macos


def _folder_of(package: str) -> Path:
    """The folder that a package lies in, found without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


OURS = {name: _folder_of(name) for name in ("portable_coreml", "shardmill")}  # package -> the folder it lies in
LOG_CALLS = {"debug", "info", "warning", "error"}
TOLD = {"help", "description"}  # keywords whose values people read


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        code: digest of what decides results.
        imported: dotted names of what it imports from our packages.
        passed_on: names that it imports itself, and where from.
    """

    code: str
    imported: tuple[str, ...]
    passed_on: Mapping[str, str]


def module_name(file: Path) -> tuple[str, ...]:
    """A file's place below the folder of its package: shardmill, pipeline, code."""
    root = next(root for root in OURS.values() if file.is_relative_to(root))
    return file.relative_to(root).with_suffix("").parts


def parsed(file: Path, source: bytes, data: bytes, wording: bool) -> Module:
    """What a source file is.

    Args:
        file: where it lies, which says what relative imports mean.
        source: what it holds.
        data: of the package that it begins, see `data_of`.
        wording: whether what people are told counts, too.
    """
    tree = Normalizer(wording).visit(ast.parse(source))
    imported = dict(_imports(tree, module_name(file)[:-1]))
    code = hashlib.sha256(spelled(tree).encode() + data).hexdigest()
    return Module(code, tuple(sorted(imported)), {known: name for name, known in imported.items()})


def data_of(file: Path) -> bytes:
    """The names and bytes of a package's other files, if the file is its `__init__.py`."""
    data = _data_files(file.parent) if file.name == "__init__.py" else ()
    return b"".join(path.name.encode() + path.read_bytes() for path in data)


def spelled(node: object) -> str:
    """A syntax tree as text, alike in Python 3.11 to 3.13, where ast.dump and ast.unparse are not.

    Fields without content are left out, for newer versions have more of them.
    """
    if isinstance(node, ast.AST):
        fields = (f"{name}={spelled(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(spelled, node))}]"
    return repr(node)


def _data_files(folder: Path) -> list[Path]:
    """Files of a package that are no code, in it or in folders that hold no code, sorted."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__" and not any(path.rglob("*.py")):
            found += sorted(f for f in path.rglob("*") if f.is_file())
        elif path.is_file() and path.suffix not in (".py", ".pyc"):
            found.append(path)
    return [path for path in found if not is_left_by_macos(path)]


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every module or attribute of ours that a module imports, and the name it gets."""
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            names = [(f"{module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        yield from ((name, known) for name, known in names if name.split(".")[0] in OURS)


class Normalizer(ast.NodeTransformer):
    """Drops what does not decide results, see the module's docstring.

    Args:
        wording: keep what people are told.
    """

    def __init__(self, wording: bool) -> None:
        self.wording = wording

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not _is_idle(statement)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Without its texts."""
        return self.generic_visit(node) if self.wording else _Silencer().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Without what it says to people; on whose word a rule is said gets into no result at all."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "Source":
            node.args, node.keywords = [], []
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "contested"]
        if not self.wording:
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in TOLD]
            if name == "Rule":
                node.args = [ast.Constant("") if _is_prose(argument) else argument for argument in node.args]
        return self.generic_visit(node)


class _Silencer(ast.NodeTransformer):
    """Empties every text."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")


def _is_idle(statement: ast.stmt) -> bool:
    """A docstring, `pass`, a call that logs, or imports for type checkers."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or _is_log_call(statement.value)
    if isinstance(statement, ast.If) and not statement.orelse:
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Pass)


def _is_log_call(node: ast.expr) -> bool:
    """log.info(...) and its like."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    return isinstance(owner, ast.Name) and owner.id == "log" and node.func.attr in LOG_CALLS


def _is_prose(node: ast.expr) -> bool:
    """A text of several words: identities and levels are one."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
