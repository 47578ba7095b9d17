"""Counts what a reader meets in the packages: files, lines, import circles, and names that two modules define.

    python tools/count_house.py [FOLDER]    # a checkout; this one if left out

It reads the packages' source only, so it also counts an older commit's checkout.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("shardmill", "portable/portable_coreml")


def main(root: Path) -> None:
    """Print the counts of a checkout."""
    files = {name: file for package in PACKAGES for name, file in modules(root / package)}
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in files.items()}
    lines = sum(file.read_text(encoding="utf-8").count("\n") for file in files.values())
    loose = [file for file in files.values() if file.parent.name == "shardmill" and file.stem != "__init__"]
    names = Counter(public for tree in trees.values() for public in publicly(tree))
    print(f"files {len(files)}, lines {lines}, loose modules {len(loose)}")
    print(f"circles of files {len(circles({name: uses(name, tree, files) for name, tree in trees.items()}))}")
    print(f"public names defined in two modules or more {sum(count > 1 for count in names.values())}")
    ours = (file for file in root.rglob("*.py") if not {".venv", "build"} & {*file.relative_to(root).parts})
    print(f"noqa {sum(file.read_text(encoding='utf-8').count('# noqa') for file in ours)}")


def modules(package: Path) -> Iterator[tuple[str, Path]]:
    """Yield dotted names and files of a package."""
    for file in sorted(package.rglob("*.py")):
        parts = (package.name, *file.relative_to(package).with_suffix("").parts)
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), file


def publicly(tree: ast.Module) -> Iterator[str]:
    """Yield functions and classes at a module's top that other modules may use."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    yield from (node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_"))


def uses(name: str, tree: ast.Module, files: dict[str, Path]) -> set[str]:
    """Return modules that one imports, wherever the import stands, or names in a string."""
    package = name.split(".") if files[name].name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            inner = {f"{module}.{alias.name}" for alias in node.names}
            found |= inner if inner <= files.keys() else {module, *inner}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return (found & files.keys()) - {name}


def circles(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return one circle for each edge that closes one, in a walk from every module."""
    found: list[tuple[str, ...]] = []
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            found.append((*path[path.index(name) :], name))
        elif name not in finished:
            for used in sorted(graph[name]):
                visit(used, (*path, name))
            finished.add(name)

    for name in graph:
        visit(name, ())
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
