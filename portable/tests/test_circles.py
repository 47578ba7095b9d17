"""No module of portable_coreml needs, directly or through others, one that needs it; nor does any of its rooms.

An import inside a function counts, and so does a dotted module name in a string: both hide a circle, they don't break
it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import portable_coreml
import pytest

PACKAGE = "portable_coreml"
Graph = Mapping[str, set[str]]


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module below a package's folder."""
    found = {}
    for path in root.rglob("*.py"):
        parts = [root.name, *path.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def mentions(text: str) -> Iterator[str]:
    """Every dotted name that code imports, at whatever depth, or spells in a string that is no docstring."""
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def imports(files: Mapping[str, Path]) -> dict[str, set[str]]:
    """Module -> the modules among `files` that it mentions; of `a.b.name`, the longest part that is a module."""
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        graph[name] = set()
        for mentioned in mentions(path.read_text(encoding="utf-8")):
            owner = mentioned
            while owner not in files and "." in owner:
                owner = owner.rpartition(".")[0]
            if owner in files and owner != name:
                graph[name].add(owner)
    return graph


def rooms(graph: Graph) -> dict[str, set[str]]:
    """The same between the packages right below the top one; its own modules stand for themselves."""
    made: dict[str, set[str]] = {}
    for name, needed in graph.items():
        room = ".".join(name.split(".")[:2])
        made.setdefault(room, set()).update(".".join(other.split(".")[:2]) for other in needed)
    return {room: needed - {room} for room, needed in made.items()}


def circle(graph: Graph) -> list[str]:
    """The modules of one circle, or nothing."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_and_no_room_is_in_a_circle() -> None:
    files = modules(Path(portable_coreml.__file__).parent)
    graph = imports(files)
    assert len(files) > 40 and sum(map(len, graph.values())) > 150  # it was read at all
    assert circle(graph) == []
    assert circle(rooms(graph)) == []


HIDDEN = {
    "at the top": "from pack.two import x",
    "as a module": "import pack.two",
    "inside a function": "def late():\n    from pack import two",
    "in a string": 'NAME = "pack.two"',
    "in a string that names an attribute": 'NAME = "pack.two.run"',
}


@pytest.mark.parametrize("way", sorted(HIDDEN))
def test_a_circle_is_found_however_it_is_hidden(tmp_path: Path, way: str) -> None:
    """Or the test above would pass for want of eyes."""
    folder = tmp_path / "pack"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "two.py").write_text("from pack import one")
    (folder / "one.py").write_text(HIDDEN[way])
    assert set(circle(imports(modules(folder)))) == {"pack.one", "pack.two"}
    (folder / "one.py").write_text('"""pack.two uses this; a docstring is no import."""')
    assert circle(imports(modules(folder))) == []


def test_the_engine_imports_nothing_of_the_project_it_came_from() -> None:
    for path in modules(Path(portable_coreml.__file__).parent).values():
        names = {name.partition(".")[0] for name in mentions(path.read_text(encoding="utf-8"))}
        assert "shardmill" not in names, path
