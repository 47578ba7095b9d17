"""One rule for underscores: a function that no other file mentions begins with one, and no file uses another's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "shardmill",
    "decoding/drafted_decoding",
    "exporters/transformers_coreml",
    "kit/kit_runner",
    "portable/portable_coreml",
    "portable/extra/portable_coreml_extra",
)
READERS = ("*.py", "*.html", "*.smk", "Snakefile")


def sources() -> dict[Path, str]:
    """Every file of the repository that may mention a function of its packages."""
    tests = [f"{name}/tests" for name in ("decoding", "exporters", "kit", "portable")]
    folders = (*PACKAGES, *tests, "tests", "lab", "tools", "rules", "scripts")
    found = {path for folder in folders for kind in READERS for path in (ROOT / folder).rglob(kind)}
    return {path: path.read_text() for path in (*found, ROOT / "Snakefile", ROOT / "hatch_build.py") if path.exists()}


def functions(source: str) -> Iterator[str]:
    """Functions at a module's top that no decorator hands on."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    yield from (node.name for node in ast.parse(source).body if isinstance(node, kinds) and not node.decorator_list)


def is_of_a_package(path: Path) -> bool:
    return path.suffix == ".py" and any(path.is_relative_to(ROOT / package) for package in PACKAGES)


def test_a_function_of_one_file_begins_with_an_underscore() -> None:
    texts = sources()
    words = {path: set(re.findall(r"\w+", text)) for path, text in texts.items()}
    lonely = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        if is_of_a_package(path)
        for name in functions(text)
        if not name.startswith("_") and not any(name in words[other] for other in words if other != path)
    ]
    assert lonely == []


def test_no_module_imports_what_begins_with_an_underscore() -> None:
    names = {Path(package).name for package in PACKAGES}
    taken = [
        f"{path.relative_to(ROOT)}: {alias.name}"
        for path, text in sources().items()
        if is_of_a_package(path)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in names
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert taken == []
