"""The walls of the house: which room may use which, that none uses a room above it, and that no circle runs anywhere.

Imports inside functions count as much as those at the top, and so do modules that are named in strings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "shardmill": ROOT / "shardmill",
    "shardmill_lab": ROOT / "lab/shardmill_lab",
    "drafted_decoding": ROOT / "decoding/drafted_decoding",
    "kit_runner": ROOT / "kit/kit_runner",
    "portable_coreml": ROOT / "portable/portable_coreml",
    "transformers_coreml": ROOT / "exporters/transformers_coreml",
}
GROUND = {
    "errors",
    "files",
    "imports",
    "interrupt",
    "machine",
    "printable",
}
# What of the ground stands on a package, and a package on another; the kit runner says Core ML's errors in its words.
BELOW = {"machine": {"portable"}, "printable": {"kit_runner"}, "transformers_coreml": {"portable"}}
# The other packages, which use nothing of shardmill.
BESIDE = {"drafted_decoding", "kit_runner", "portable", "transformers_coreml"}
# Each room with those that it may use, beside the ground; from the ground up.
MAY_USE: dict[str, set[str]] = {
    "checkpoint": set(),
    "forms": set(),
    "media": set(),
    "models": {"checkpoint"},
    "config": {"checkpoint", "forms", "models"},
    "plan": {"checkpoint", "config", "forms", "models"},
    "runtime": {"checkpoint", "models", "drafted_decoding", "kit_runner"},
    "convert": {"checkpoint", "forms", "models", "plan"},
    "weight_files": {"config", "convert", "forms", "models"},
    "topology": {"config", "convert", "forms", "models", "plan", "weight_files"},
    "evidence": {"kit_runner"},
    "gates": {"checkpoint", "convert", "drafted_decoding", "forms", "kit_runner", "models", "plan", "runtime"},
    "precision": {"checkpoint", "convert", "forms", "gates", "models", "plan"},
    "witness": {"gates", "kit_runner", "models", "plan", "runtime"},
    "templates": {"checkpoint"},
    "serve": {"checkpoint", "drafted_decoding", "media", "runtime", "templates"},
    "bench": {"checkpoint", "config", "drafted_decoding", "kit_runner", "models", "plan", "runtime", "serve"},
    "records": {"checkpoint", "evidence", "forms", "gates", "plan", "runtime"},
    "report": {"evidence", "forms", "gates"},
    "pipeline": {
        "bench", "checkpoint", "config", "convert", "drafted_decoding", "evidence", "forms", "gates", "kit_runner",
        "media", "models", "plan", "precision", "records", "report", "runtime", "serve", "templates", "topology",
        "weight_files", "witness",
    },
    "release": {"checkpoint", "forms", "gates", "pipeline", "plan", "records", "runtime"},
    "device": {
        "checkpoint", "config", "evidence", "forms", "gates", "kit_runner", "models", "pipeline", "records", "runtime",
    },
    "shardmill_lab": {"checkpoint", "gates", "kit_runner", "models"},
    "commands": {
        "bench", "checkpoint", "config", "drafted_decoding", "device", "evidence", "forms", "gates",
        "media", "models", "pipeline", "plan", "precision", "records", "release", "runtime", "serve", "shardmill_lab",
        "templates", "witness",
    },
    "cli": {"commands", "evidence"},
    "portable": set(),
}  # fmt: skip
NAMED = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.[a-z_0-9]+)+")


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


@cache
def uses(name: str) -> frozenset[str]:
    """The modules that a module imports or names, wherever in it, but only for the sake of types."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    found = {module for node in walk(tree) for module in named_by(node)}
    return frozenset(found - {name})


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but docstrings and what stands under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from walk(child)


def named_by(node: ast.AST) -> Iterator[str]:
    """Modules that one node imports, or names in a string."""
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        assert not node.level, "imports are absolute"
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
        names = submodules if all(name in MODULES for name in submodules) else [node.module, *submodules]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and NAMED.fullmatch(node.value):
        names = [node.value]
    yield from (name for name in names if name in MODULES)


def room(name: str) -> str:
    """The room of a module; a package beside shardmill is one, and both faces of the portable engine are the same."""
    parts = name.split(".")
    if parts[0] != "shardmill":
        return "portable" if parts[0] == "portable_coreml" else parts[0]
    return parts[1] if len(parts) > 1 else ""


def allowed(name: str) -> set[str]:
    """The rooms that a module may use, beside its own."""
    own = room(name)
    if own in GROUND | {""}:
        return GROUND | BELOW.get(own, set())
    if not name.startswith("shardmill"):
        return BELOW.get(own, set())
    return MAY_USE[own] | GROUND | {"portable"}


def test_every_room_is_there() -> None:
    """A wall around no room would guard nothing."""
    named = {*MAY_USE, *GROUND, *BELOW, *BESIDE}
    named |= {used for rooms in (*MAY_USE.values(), *BELOW.values()) for used in rooms}
    assert named == {room(name) for name in MODULES} - {""}


def test_nothing_is_used_over_a_wall() -> None:
    over = {name: {room(used) for used in uses(name)} - {room(name), ""} - allowed(name) for name in MODULES}
    assert {name: sorted(rooms) for name, rooms in over.items() if rooms} == {}


def test_only_the_pipeline_uses_its_steps() -> None:
    """What others need of them has a module of its own, such as `records/finished.py`."""
    steps = "shardmill.pipeline.steps."
    assert {
        name for name in MODULES if room(name) != "pipeline" for used in uses(name) if used.startswith(steps)
    } == set()


def test_rooms_stand_on_one_another() -> None:
    """No room uses, even through others, a room that uses it."""
    seen = set(BESIDE)
    for own, used in MAY_USE.items():
        assert used <= seen, f"{own} is listed before {sorted(used - seen)}"
        seen.add(own)


def test_the_page_shows_every_room() -> None:
    """docs/architecture.md lists the rooms in the same order, then the ground, then the packages."""
    section = (
        (ROOT / "docs/architecture.md").read_text().partition("## The rooms of the library\n")[2].partition("\n## ")[0]
    )
    *listed, ground, _, packages = section.strip().split("\n\n")
    assert re.findall(r"\[`(\w+)`\]", "\n".join(listed)) == [name for name in MAY_USE if name != "portable"]
    assert set(re.findall(r"`(\w+)`", ground)) == GROUND
    assert re.findall(r"^\| \[`(?:\w+)/`\]\(\S+\) \| `(\w+)`", packages, re.MULTILINE) == [*PACKAGES][2:]


def test_no_circle_runs_through_files() -> None:
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for used in uses(name):
                visit(used, (*path, name))
            finished.add(name)

    for name in MODULES:
        visit(name, ())
