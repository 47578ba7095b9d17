"""What a step's digest depends on: all the code that it can reach, and nothing else.

How code is read is tested on libraries of a few files, what belongs to a step on the real one.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardmill import fingerprint
from shardmill.steps import TOOLS


class Library:
    """A library of a few files that fingerprint reads instead of the real one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def digest(self, *modules: str) -> str:
        fingerprint.read_module.cache_clear()
        return fingerprint.code_digest(modules)

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """An empty one."""
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)
    library = Library(tmp_path)
    library.write("shardmill/__init__.py", "")
    yield library
    fingerprint.read_module.cache_clear()


PLAIN = '''"""Says what it does."""
import logging

log = logging.getLogger(__name__)


def add(a, b):
    """a + b."""
    log.info("adding %s", a)
    return a + b  # the sum
'''

SAME = {
    "a comment": ("# the sum", "# what else"),
    "a docstring": ('"""a + b."""', '"""The sum of a and b."""'),
    "a docstring's absence": ('    """a + b."""\n', ""),
    "the module's docstring": ('"""Says what it does."""\n', '"""Contract."""\n'),
    "a log message": ("adding %s", "now adding %s"),
    "a log level": ("log.info", "log.debug"),
    "a log line's absence": ('    log.info("adding %s", a)\n', ""),
    "formatting": ("return a + b", "return (\n        a\n        + b)"),
}

DIFFERENT = {
    "an operator": ("a + b  #", "a - b  #"),
    "a default": ("def add(a, b)", "def add(a, b=1)"),
    "a call that only looks like logging": ('log.info("adding %s", a)', 'logs.info("adding %s", a)'),
    "an import": ("import logging\n", "import logging\nimport math\n"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_people_read_does_not_count(small: Library, name: str) -> None:
    small.write("shardmill/plain.py", PLAIN)
    before = small.digest("shardmill.plain")
    assert SAME[name][0] in PLAIN
    small.write("shardmill/plain.py", PLAIN.replace(*SAME[name]))
    assert small.digest("shardmill.plain") == before


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_runs_counts(small: Library, name: str) -> None:
    small.write("shardmill/plain.py", PLAIN)
    before = small.digest("shardmill.plain")
    assert DIFFERENT[name][0] in PLAIN
    small.write("shardmill/plain.py", PLAIN.replace(*DIFFERENT[name]))
    assert small.digest("shardmill.plain") != before


SAMPLE = """
@cache
def f(a, /, *b, c=None) -> str:
    return f'{a!r:>3} {"it"} ' 's' if x[1:, *b] else -2.5
class A(B): ...
"""
SPELLED = (
    "Module(body=[FunctionDef(name='f',args=arguments(posonlyargs=[arg(arg='a')],vararg=arg(arg='b'),"
    "kwonlyargs=[arg(arg='c')],kw_defaults=[Constant()]),body=[Return(value=IfExp(test=Subscript(value=Name(id='x',"
    "ctx=Load()),slice=Tuple(elts=[Slice(lower=Constant(value=1)),Starred(value=Name(id='b',ctx=Load()),ctx=Load())],"
    "ctx=Load()),ctx=Load()),body=JoinedStr(values=[FormattedValue(value=Name(id='a',ctx=Load()),conversion=114,"
    "format_spec=JoinedStr(values=[Constant(value='>3')])),Constant(value=' '),FormattedValue(value=Constant("
    "value='it'),conversion=-1),Constant(value=' s')]),orelse=UnaryOp(op=USub(),operand=Constant(value=2.5))))],"
    "decorator_list=[Name(id='cache',ctx=Load())],returns=Name(id='str',ctx=Load())),ClassDef(name='A',"
    "bases=[Name(id='B',ctx=Load())],body=[Expr(value=Constant(value=Ellipsis))])])"
)


def test_code_is_spelled_alike_in_every_python() -> None:
    """The literal stands for the other versions: each must spell the sample like this, or its keys are others."""
    assert fingerprint.spelled(ast.parse(SAMPLE)) == SPELLED


IMPORTS = {
    "import a module": "import shardmill.far.leaf",
    "import a module under another name": "import shardmill.far.leaf as leaf",
    "from a package": "from shardmill.far import leaf",
    "from a module": "from shardmill.far.leaf import value",
    "inside a function": "def work():\n    from shardmill.far.leaf import value\n    return value",
    "inside a method under a condition": (
        "class A:\n    def b(self):\n        if self:\n            import shardmill.far.leaf"
    ),
    "relative": "from .far import leaf",
    "relative, a name": "from .far.leaf import value",
    "relative, the package": "from . import far\nfrom .far import leaf",
}


@pytest.mark.parametrize("way", IMPORTS)
def test_every_way_to_import_is_followed(small: Library, way: str) -> None:
    small.write("shardmill/near.py", IMPORTS[way])
    small.write("shardmill/far/__init__.py", "")
    small.write("shardmill/far/leaf.py", "value = 1")
    before = small.digest("shardmill.near")
    small.write("shardmill/far/leaf.py", "value = 2")
    assert small.digest("shardmill.near") != before


@pytest.mark.parametrize("statement", ["from .leaf import value", "from . import leaf", "from ..other import value"])
def test_relative_imports_of_a_package_itself_are_followed(small: Library, statement: str) -> None:
    small.write("shardmill/near.py", "import shardmill.far")
    small.write("shardmill/far/__init__.py", statement)
    small.write("shardmill/far/leaf.py", "value = 1")
    small.write("shardmill/other.py", "value = 1")
    before = small.digest("shardmill.near")
    small.write("shardmill/far/leaf.py" if "leaf" in statement else "shardmill/other.py", "value = 2")
    assert small.digest("shardmill.near") != before


def test_circular_imports_end(small: Library) -> None:
    small.write("shardmill/a.py", "import shardmill.b")
    small.write("shardmill/b.py", "import shardmill.a\nx = 1")
    before = small.digest("shardmill.a")
    small.write("shardmill/b.py", "import shardmill.a\nx = 2")
    assert small.digest("shardmill.a") != before


REACHED = {
    "convert": ["models/phi3.py", "models/primitives.py", "convert/weights.py", "convert/package.py", "plan.py"],
    "split": ["models/phi3.py", "checkpoint/headers.py", "checkpoint/expect.py", "plan.py", "config.py"],
    "parity": ["gates/thresholds.py", "gates/passes.py", "engine.py", "portable/execute.py", "portable/load.py"],
    "residency": ["gates/residency.py", "gates/thresholds.py", "portable/read_proto.py"],
    "compile": ["portable/bundle.py", "portable/write_text.py"],
    "reference": ["gates/reference.py", "convert/weights.py"],
    "benchmark": ["bench/speed.py", "engine.py", "decode/session.py", "portable/execute.py"],
}
SPARED = {
    "convert": ["decode/session.py", "gates/parity.py", "engine.py", "bench/speed.py", "cli.py", "portable/execute.py"],
    "split": ["convert/plain.py", "gates/parity.py", "decode/session.py"],
    "reference": ["convert/plain.py", "decode/session.py", "bench/speed.py"],
    "parity": ["decode/session.py", "gates/stack.py", "bench/speed.py", "cli.py"],
    "parity_stack": ["bench/speed.py", "serve/worker.py", "cli.py"],
    "embedding": ["gates/parity.py", "convert/plain.py", "models/primitives.py"],
}


def files_read(step: str) -> set[str]:
    """The library's files whose code enters a step's digest."""
    files: set[str] = set()
    real = fingerprint.read_module

    def record(file: Path) -> Any:
        files.add(file.relative_to(fingerprint.ROOT / "shardmill").as_posix())
        return real(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "read_module", record)
        fingerprint.code_digest(TOOLS[step].modules)
    return files


@pytest.mark.parametrize("step", REACHED)
def test_a_step_works_again_when_code_it_uses_changes(step: str) -> None:
    assert set(REACHED[step]) - files_read(step) == set()


@pytest.mark.parametrize("step", SPARED)
def test_a_step_is_left_alone_when_other_code_changes(step: str) -> None:
    assert all((fingerprint.ROOT / "shardmill" / file).is_file() for file in SPARED[step])
    assert set(SPARED[step]) & files_read(step) == set()


LOADED = """
import json, sys
from pathlib import Path
import shardmill.steps.{step}
for name in {heavy!r}:
    __import__(name)
print(json.dumps([m for m in sys.modules if m.split(".")[0] == "shardmill"]))
"""
# What a step's `work` imports at first, so that these modules bring in whatever they need.
HEAVY = {
    "convert": [
        "shardmill.convert.package",
        "shardmill.convert.plain",
        "shardmill.convert.weights",
        "shardmill.models.phi3",
    ],
    "parity": ["shardmill.gates.parity", "shardmill.portable.proxy", "shardmill.engine"],
    "parity_stack": ["shardmill.gates.stack", "shardmill.portable.proxy", "shardmill.engine"],
}


@pytest.mark.parametrize("step", HEAVY)
def test_the_closure_covers_whatever_python_loads(step: str) -> None:
    """Python itself is asked what the step's modules import."""
    command = [sys.executable, "-c", LOADED.format(step=step, heavy=HEAVY[step])]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"shardmill.store", HEAVY[step][0]} <= set(loaded)
    sources = {fingerprint.module_file(name) for name in loaded}
    names = {file.relative_to(fingerprint.ROOT / "shardmill").as_posix() for file in sources if file}
    assert names - files_read(step) == set()


def test_package_versions_are_the_installed_ones() -> None:
    from importlib.metadata import version

    found = fingerprint.package_versions(("torch", "numpy"))
    assert found == {"numpy": version("numpy"), "torch": version("torch")}
    assert list(found) == ["numpy", "torch"]
