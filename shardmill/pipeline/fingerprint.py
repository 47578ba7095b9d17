"""What decides a step's result besides its inputs: the digest of the library code it uses, and package versions.

The code of a step is the closure of its module over `import shardmill...`, wherever the import statement stands.
Comments, formatting, docstrings and log messages do not count.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


def folder_of(package: str) -> Path:
    """The folder that a package lies in, found without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


OURS = {name: folder_of(name) for name in ("portable_coreml", "shardmill")}  # package -> the folder it lies in
LOG_CALLS = {"debug", "info", "warning", "error"}


def code_digest(modules: Iterable[str]) -> str:
    """sha256 over the code of the modules and of every shardmill module they import, directly or not.

    A package's other files (templates, say) count with its `__init__.py`.
    """
    found: dict[str, str] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        file = module_file(name)
        if file is None or name in found:
            continue
        found[name], imported = read_module(file)
        waiting += imported
    text = "\n".join(f"{name} {found[name]}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Installed versions of the packages that decide a step's bytes."""
    return {name: version(name) for name in sorted(names)}


def module_file(name: str) -> Path | None:
    """The source of a shardmill module; None for a name that is an attribute of one."""
    parts = name.split(".")
    path = OURS.get(parts[0], Path()).joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def read_module(file: Path) -> tuple[str, tuple[str, ...]]:
    """(digest of the code, names of what it imports from shardmill)."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    root = next(root for root in OURS.values() if file.is_relative_to(root))
    package = file.relative_to(root).with_suffix("").parts
    imported = tuple(sorted(set(imports(tree, package[:-1]))))
    data = data_files(file.parent) if file.name == "__init__.py" else ()
    blob = spelled(Normalizer().visit(tree)).encode() + b"".join(
        path.name.encode() + path.read_bytes() for path in data
    )
    return hashlib.sha256(blob).hexdigest(), imported


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


def data_files(folder: Path) -> list[Path]:
    """Files of a package that are no code, in it or in folders that hold no code, sorted."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__" and not any(path.rglob("*.py")):
            found += sorted(f for f in path.rglob("*") if f.is_file())
        elif path.is_file() and path.suffix not in (".py", ".pyc"):
            found.append(path)
    return found


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Every shardmill module or attribute that a module imports; also the packages it lies in."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        for name in names:
            if name.split(".")[0] in OURS:
                parts = name.split(".")
                yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1))


class Normalizer(ast.NodeTransformer):
    """Drops what does not decide results: docstrings, `pass`, and statements that only log."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not is_idle(statement)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return node


def is_idle(statement: ast.stmt) -> bool:
    """A docstring, `pass`, or a call that logs."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or is_log_call(statement.value)
    return isinstance(statement, ast.Pass)


def is_log_call(node: ast.expr) -> bool:
    """log.info(...) and its like."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    return isinstance(owner, ast.Name) and owner.id == "log" and node.func.attr in LOG_CALLS
