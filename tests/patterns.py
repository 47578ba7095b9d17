"""Regular expressions in the source: found by the syntax tree, judged by their structure, tried on their worst texts.

Run as a program, it tries the patterns of the folders that it is given, and prints what took longer than it should.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

ROOT = Path(__file__).parent.parent
USES = ("match", "search", "sub", "subn", "split", "findall", "finditer", "fullmatch")
SEARCHES = {"search", "sub", "subn", "split", "findall", "finditer"}  # which begin at every character
MANY = 1000  # repetitions; fewer than that cost a constant
ALPHABET = [chr(code) for code in range(0x180)] + ["\u2028", "日", "🙂"]
REPEATS = (op.MAX_REPEAT, op.MIN_REPEAT, op.POSSESSIVE_REPEAT)
SECONDS = 300  # of CPU for all patterns; they take two
SIZE, GREATEST, SLOW = 20_000, 24.0, 0.02  # characters, ratio of the time for eight times as many, seconds judged


@dataclass(frozen=True)
class Pattern:
    """A regular expression in the source.

    Attributes:
        place: the file, and the name or the line.
        text: the expression; None if it is known only where it runs.
        flags: its flags.
        uses: the functions of `re` that read texts with it.
    """

    place: str
    text: str | None
    flags: int
    uses: frozenset[str]


def patterns(folders: Sequence[str]) -> list[Pattern]:
    """Every expression that the modules of folders give to `re`, or to a field as its pattern."""
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}
    used: dict[str, set[str]] = {}
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute) and node.attr in USES and isinstance(node.value, ast.Name | ast.Attribute):
            name = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            used.setdefault(name, set()).add(node.attr)
    return [found for file, tree in trees.items() for found in _in_file(file, tree, used)]


def _in_file(file: Path, tree: ast.Module, used: dict[str, set[str]]) -> Iterator[Pattern]:
    short = file.relative_to(ROOT).as_posix().removeprefix("shardmill/")
    names: dict[int, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            made = node.value.body if isinstance(node.value, ast.IfExp) else node.value
            names[id(made)] = node.targets[0]
    for node in ast.walk(tree):
        renamed = isinstance(node, ast.Import) and any(one.name == "re" and one.asname for one in node.names)
        if renamed or (isinstance(node, ast.ImportFrom) and node.module == "re"):
            raise AssertionError(f"{short}: write `import re`, or its patterns are not found")
        if isinstance(node, ast.keyword) and node.arg == "pattern":
            yield Pattern(f"{short}:{node.value.lineno}", _value(file, node.value), 0, frozenset({"search"}))
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        called = node.func
        if not (isinstance(called.value, ast.Name) and called.value.id == "re" and called.attr in (*USES, "compile")):
            continue
        given = [*node.args, *(word.value for word in node.keywords)]
        flags = [_value(file, one) for one in given[1:] if ast.unparse(one).startswith("re.")]
        uses, place = {called.attr}, f"{short}:{node.lineno}"
        if called.attr == "compile":
            target = names.get(id(node))
            name = getattr(target, "id", getattr(target, "attr", ""))
            uses, place = used.get(name) or {"match", "fullmatch"}, f"{short}:{name or node.lineno}"
        yield Pattern(place, _value(file, given[0]), flags[0] if flags else 0, frozenset(uses))


def _value(file: Path, node: ast.expr) -> Any:
    """The value of an expression with the names of its module; None if it needs others."""
    module = importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    try:
        return eval(compile(ast.Expression(node), str(file), "eval"), vars(module))
    except NameError:
        return None


# What stands at a place: a set of characters, how often, and what is repeated.


@dataclass(frozen=True)
class Item:
    """A part of an expression.

    Attributes:
        first: the characters with which it may begin.
        all: the characters that it may have.
        least, most: how often.
        bodies: the readings of what is repeated.
    """

    first: frozenset[str]
    all: frozenset[str]
    least: int
    most: int
    bodies: tuple[tuple[Item, ...], ...] = ()

    @property
    def repeats(self) -> bool:
        return self.most > 1


def _characters(node: Any, flags: int) -> frozenset[str]:
    """The characters that a single-character node matches."""
    kind, value = node
    if kind is op.LITERAL:
        return frozenset(chr(value))
    if kind is op.NOT_LITERAL:
        return frozenset(ALPHABET) - {chr(value)}
    if kind is op.ANY:
        return frozenset(ALPHABET) - (frozenset() if flags & re.DOTALL else {"\n"})
    tests = {op.CATEGORY_SPACE: r"\s", op.CATEGORY_NOT_SPACE: r"\S", op.CATEGORY_WORD: r"\w",
             op.CATEGORY_NOT_WORD: r"\W", op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D"}  # fmt: skip
    found: set[str] = set()
    for part, one in value:
        if part is op.LITERAL:
            found.add(chr(one))
        elif part is op.RANGE:
            found |= {chr(code) for code in range(one[0], one[1] + 1)}
        elif part is op.CATEGORY:
            found |= {c for c in ALPHABET if re.match(tests[one], c, flags & re.ASCII)}
    return frozenset(ALPHABET) - found if value[0][0] is op.NEGATE else frozenset(found)


def _readings(nodes: Any, flags: int) -> list[list[Item]]:
    """The parts of an expression in their order, for each choice of alternatives and of what may be left out."""
    found: list[list[Item]] = [[]]
    for kind, value in nodes:
        if kind in REPEATS:
            least, most, body = value
            options = _readings(body, flags)
            if most == 1:
                options += [[]] if not least else []
            else:
                first, characters = (frozenset[str]().union(*map(what, options)) for what in (_first, _all))
                options = [[Item(first, characters, least, int(most), tuple(map(tuple, options)))]]
        elif kind is op.SUBPATTERN:
            options = _readings(value[3], flags)
        elif kind is op.BRANCH:
            options = [reading for one in value[1] for reading in _readings(one, flags)]
        elif kind is op.AT:  # the end of a text may fail after anything, its beginning keeps a search from going on
            begins = value in (op.AT_BEGINNING, op.AT_BEGINNING_STRING)
            options = [[Item(frozenset(), frozenset(() if begins else ALPHABET), 1, 1)]]
        elif kind in (op.ASSERT, op.ASSERT_NOT):  # a look ahead may fail
            options = [[Item(frozenset(ALPHABET), frozenset(ALPHABET), 1, 1)]]
        else:
            characters = _characters((kind, value), flags)
            options = [[Item(characters, characters, 1, 1)]]
        found = [[*one, *option] for one in found for option in options]
    return found


def _first(items: Sequence[Item]) -> frozenset[str]:
    found: set[str] = set()
    for item in items:
        found |= item.first
        if item.least:
            break
    return frozenset(found)


def _all(items: Sequence[Item]) -> frozenset[str]:
    return frozenset[str]().union(*(item.all for item in items))


def _needed(items: Sequence[Item]) -> bool:
    return any(item.least for item in items)


def complaints(pattern: Pattern) -> list[str]:
    """Why a text may take more than one reading of it, by the expression's structure."""
    assert pattern.text is not None
    tree = _parser.parse(pattern.text, pattern.flags)
    if tree.state.flags & (re.IGNORECASE | re.VERBOSE):
        return ["has a flag that this check does not know"]
    found = {*_alternatives(tree, tree.state.flags)}
    for items in _readings(tree, tree.state.flags):
        found |= {*_beside(items), *_nested(items), *(_restarts(items) if pattern.uses & SEARCHES else ())}
    return sorted(found)


def _beside(items: Sequence[Item]) -> Iterator[str]:
    """Two repetitions between which a text can be divided in many ways."""
    for i, one in enumerate(items):
        for j in range(i + 1, len(items)):
            other, between = items[j], [item for item in items[i + 1 : j] if item.least]
            divides = all(item.all & one.all and item.all & other.all for item in between)
            if one.repeats and other.repeats and one.all & other.first and divides:
                yield f"parts {i} and {j} repeat and overlap"


def _nested(items: Sequence[Item]) -> Iterator[str]:
    """A repetition of something that repeats, where one turn can't be told from two."""
    for item in items:
        for one, other in product(item.bodies, item.bodies):
            if any(part.repeats for part in (*one, *other)):
                yield from (f"nested: {why}" for why in _beside([*one, *other]))
        for one in item.bodies:
            yield from _nested(one)


def _alternatives(nodes: Any, flags: int, repeated: bool = False) -> Iterator[str]:
    """Alternatives in a repetition that may begin with the same character."""
    for kind, value in nodes:
        if kind in REPEATS:
            yield from _alternatives(value[2], flags, repeated or value[1] > 1)
        elif kind is op.SUBPATTERN:
            yield from _alternatives(value[3], flags, repeated)
        elif kind is op.BRANCH:
            pairs = [(one, value[1][i]) for k, one in enumerate(value[1]) for i in range(k)]
            if repeated and any(_alike(list(one), list(other), flags) for one, other in pairs):
                yield "alternatives in a repetition begin alike"
            for one in value[1]:
                yield from _alternatives(one, flags, repeated)


def _alike(one: list[Any], other: list[Any], flags: int) -> bool:
    """Whether two alternatives may begin alike, as words do only where one begins with the other."""
    if all(kind is op.LITERAL for kind, _ in (*one, *other)):
        size = min(len(one), len(other))
        return one[:size] == other[:size]
    begins = [frozenset[str]().union(*map(_first, _readings(nodes, flags))) for nodes in (one, other)]
    return bool(begins[0] & begins[1])


def _restarts(items: Sequence[Item]) -> Iterator[str]:
    """A long repetition that a search reads again from each place where the expression may begin."""
    for i, item in enumerate(items):
        before = [one for one in items[:i] if one.least]
        if item.most > MANY and all(one.all & item.all for one in before) and _needed(items[i + 1 :]):
            yield f"a search reads part {i} again from each beginning"


# The worst texts, from the expression's own parts.


def texts(pattern: Pattern, size: int) -> Iterator[str]:
    """Texts of a size: what each part takes, again and again, with what stands before it, and an end that fails."""
    tree = _parser.parse(pattern.text, pattern.flags)
    flags = tree.state.flags
    pairs = {(before, unit) for richly in (False, True) for before, unit in _units(list(tree), flags, richly)}
    for before, unit in sorted(pair for pair in pairs if pair[1]):
        for end in ("", "!", "\0", "\n"):
            yield before + unit * ((size - len(before)) // len(unit)) + end


def _units(nodes: list[Any], flags: int, richly: bool) -> Iterator[tuple[str, str]]:
    """What stands before a part, and what is repeated: the part's content, and all up to it."""
    for i, (kind, value) in enumerate(nodes):
        before = _sample(nodes[:i], flags, richly)
        yield "", before
        if kind in REPEATS:
            yield before, _sample(list(value[2]), flags, richly)
            yield before, _sample(list(value[2]), flags, richly)[:-1]
            inner = list(value[2])
        else:
            inner = list(value[3]) if kind is op.SUBPATTERN else []
        yield from ((before + more, unit) for more, unit in _units(inner, flags, richly))
        if kind is op.BRANCH:
            for one in value[1]:
                yield before, _sample(list(one), flags, richly)
                yield from ((before + more, unit) for more, unit in _units(list(one), flags, richly))
    yield "", _sample(nodes, flags, richly)


def _sample(nodes: list[Any], flags: int, richly: bool) -> str:
    """A text that an expression takes: with every optional part, or without."""
    out = ""
    for kind, value in nodes:
        if kind in REPEATS:
            count = max(value[0], min(2, int(value[1]))) if richly else value[0]
            out += _sample(list(value[2]), flags, richly) * count
        elif kind is op.SUBPATTERN:
            out += _sample(list(value[3]), flags, richly)
        elif kind is op.BRANCH:
            out += _sample(list(value[1][-1 if richly else 0]), flags, richly)
        elif kind not in (op.ASSERT, op.ASSERT_NOT, op.AT):
            found = _characters((kind, value), flags)
            out += next((c for c in "a0 [" if c in found), "") or min(found)
    return out


def cpu(work: Callable[[], object], times: int = 5) -> float:
    """The least CPU time of several runs, which a loaded machine does not change."""
    found = []
    for _ in range(times):
        start = time.process_time()
        work()
        found.append(time.process_time() - start)
    return min(found)


def ratio(work: Callable[[int], Callable[[], object]], size: int, slow: float = SLOW, times: int = 5) -> float:
    """How much longer eight times the size takes; 0 where the size takes less than `slow`, which tells nothing."""
    if cpu(work(size), 1) < slow or (least := cpu(work(size), times)) < slow:
        return 0.0
    return cpu(work(8 * size), times) / least


def run(pattern: Pattern, use: str, text: str) -> Callable[[], object]:
    """A reading of a text."""
    compiled = re.compile(pattern.text or "", pattern.flags)
    if use in ("sub", "subn"):
        return lambda: compiled.sub("", text)
    if use == "finditer":
        return lambda: sum(1 for _ in compiled.finditer(text))
    return lambda: getattr(compiled, use)(text)


def ratios(pattern: Pattern, say: Callable[[str], None], size: int = SIZE, **judged: Any) -> Iterator[float]:
    """The ratio of each of an expression's worst texts."""
    for use in sorted(pattern.uses):
        for short, long in zip(texts(pattern, size), texts(pattern, 8 * size), strict=True):
            say(f"{pattern.place}.{use} on {short[:40]!r}...")
            yield ratio(partial(_reading, pattern, use, {size: short, 8 * size: long}), size, **judged)


def _reading(pattern: Pattern, use: str, given: dict[int, str], size: int) -> Callable[[], object]:
    return run(pattern, use, given[size])


def main(folders: Sequence[str]) -> None:
    """Print what is being tried, so that the last line tells what took too long, and at the end all ratios."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    known = [pattern for pattern in patterns(folders) if pattern.text is not None]
    found = {pattern.place: max(ratios(pattern, lambda text: print(text, flush=True))) for pattern in known}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
