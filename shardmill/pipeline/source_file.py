"""A source file of ours: which other ones it imports, and the digest of what in it can decide a result.

Three things can't change a result, whatever they say, and do not count: comments and formatting, docstrings (no step
reads `__doc__`, which a test checks), and imports under `if TYPE_CHECKING:`, which never run. All else counts, with no
exception by name: a name that looks harmless in one module decides bytes in another.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
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


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        code: digest of what can decide results.
        imported: dotted names of what it imports from our packages.
    """

    code: str
    imported: tuple[str, ...]


def module_name(file: Path) -> tuple[str, ...]:
    """A file's place below the folder of its package: shardmill, pipeline, code."""
    root = next(root for root in OURS.values() if file.is_relative_to(root))
    return file.relative_to(root).with_suffix("").parts


def parsed(file: Path, source: bytes, data: bytes) -> Module:
    """Parse a source file.

    Args:
        file: its path, which says what relative imports mean.
        source: its bytes.
        data: bytes of the other files of the package that it begins, see `data_of`.
    """
    tree = normalized(ast.parse(source))
    code = hashlib.sha256(spelled(tree).encode() + data).hexdigest()
    return Module(code, tuple(sorted(set(_imports(tree, module_name(file)[:-1])))))


def normalized(tree: ast.Module) -> ast.Module:
    """Return a module's syntax tree without what can't change a result, see this module's docstring."""
    counted: ast.Module = _Normalizer(_imports_type_checking(tree)).visit(tree)
    return counted


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


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted name of every module or attribute of ours that a module of `package` imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            names = [f"{module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in OURS)


def _imports_type_checking(tree: ast.Module) -> bool:
    """Return whether the name TYPE_CHECKING is the one of `typing` in this module, and nothing else."""
    imported = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "typing"
        and alias.name == "TYPE_CHECKING"
        and not alias.asname
        for node in tree.body
        for alias in getattr(node, "names", ())
    )
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING")
    return imported and all(isinstance(name.ctx, ast.Load) for name in names)


class _Normalizer(ast.NodeTransformer):
    """Drops what can't change a result, see the module's docstring.

    Args:
        type_checking: whether `if TYPE_CHECKING:` is known never to run.
    """

    def __init__(self, type_checking: bool) -> None:
        self.type_checking = type_checking

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not self._never_counts(statement)]  # type: ignore[attr-defined]
        return node

    def _never_counts(self, statement: ast.stmt) -> bool:
        """Return whether a statement is a docstring, `pass`, or imports for type checkers."""
        if isinstance(statement, ast.If) and self.type_checking and not statement.orelse:
            return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_text or isinstance(statement, ast.Pass)
