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

from shardmill.pipeline import fingerprint
from shardmill.pipeline.steptable import TOOLS


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
    monkeypatch.setattr(fingerprint, "OURS", {"shardmill": tmp_path})
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
    "convert": [
        "shardmill/models/phi3.py",
        "shardmill/models/primitives.py",
        "shardmill/convert/weights.py",
        "shardmill/convert/package.py",
        "shardmill/plan.py",
    ],
    "split": [
        "shardmill/models/phi3.py",
        "shardmill/checkpoint/headers.py",
        "shardmill/checkpoint/expect.py",
        "shardmill/plan.py",
        "shardmill/config.py",
    ],
    "parity": [
        "shardmill/gates/thresholds.py",
        "shardmill/gates/passes.py",
        "shardmill/runtime/engine.py",
        "portable_coreml/run/execute.py",
        "portable_coreml/files/load.py",
    ],
    "residency": [
        "shardmill/gates/residency.py",
        "shardmill/gates/thresholds.py",
        "portable_coreml/files/read_proto.py",
    ],
    "compile": ["portable_coreml/files/bundle.py", "portable_coreml/files/write_text.py"],
    "reference": ["shardmill/gates/reference.py", "shardmill/convert/weights.py"],
    "benchmark": [
        "shardmill/bench/speed.py",
        "shardmill/runtime/engine.py",
        "shardmill/decode/session.py",
        "portable_coreml/run/execute.py",
    ],
}
SPARED = {
    "convert": [
        "shardmill/decode/session.py",
        "shardmill/gates/parity.py",
        "shardmill/runtime/engine.py",
        "shardmill/bench/speed.py",
        "shardmill/cli.py",
        "portable_coreml/run/execute.py",
    ],
    "split": ["shardmill/convert/trace.py", "shardmill/gates/parity.py", "shardmill/decode/session.py"],
    "reference": ["shardmill/convert/trace.py", "shardmill/decode/session.py", "shardmill/bench/speed.py"],
    "parity": [
        "shardmill/decode/session.py",
        "shardmill/gates/stack.py",
        "shardmill/bench/speed.py",
        "shardmill/cli.py",
    ],
    "parity_stack": ["shardmill/bench/speed.py", "shardmill/serve/worker.py", "shardmill/cli.py"],
    "embedding": ["shardmill/gates/parity.py", "shardmill/convert/trace.py", "shardmill/models/primitives.py"],
}


def relative(file: Path) -> str:
    """A module's file from the folder that its package lies in."""
    return next(file.relative_to(root).as_posix() for root in fingerprint.OURS.values() if file.is_relative_to(root))


def files_read(step: str) -> set[str]:
    """The library's files whose code enters a step's digest."""
    files: set[str] = set()
    real = fingerprint.read_module

    def record(file: Path) -> Any:
        files.add(relative(file))
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
    assert all((fingerprint.OURS[file.split("/")[0]] / file).is_file() for file in SPARED[step])
    assert set(SPARED[step]) & files_read(step) == set()


LOADED = """
import json, sys
from pathlib import Path
import shardmill.pipeline.steps.{step}
for name in {heavy!r}:
    __import__(name)
print(json.dumps([m for m in sys.modules if m.split(".")[0] in ("shardmill", "portable_coreml")]))
"""
# What a step's `work` imports at first, so that these modules bring in whatever they need.
HEAVY = {
    "convert": [
        "shardmill.convert.package",
        "shardmill.convert.trace",
        "shardmill.convert.weights",
        "shardmill.models.phi3",
    ],
    "parity": ["shardmill.gates.parity", "portable_coreml.proxy", "shardmill.runtime.engine"],
    "parity_stack": ["shardmill.gates.stack", "portable_coreml.proxy", "shardmill.runtime.engine"],
}


@pytest.mark.parametrize("step", HEAVY)
def test_the_closure_covers_whatever_python_loads(step: str) -> None:
    """Python itself is asked what the step's modules import."""
    command = [sys.executable, "-c", LOADED.format(step=step, heavy=HEAVY[step])]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"shardmill.pipeline.store", HEAVY[step][0]} <= set(loaded)
    sources = {fingerprint.module_file(name) for name in loaded}
    names = {relative(file) for file in sources if file}
    assert names - files_read(step) == set()


def test_package_versions_are_the_installed_ones() -> None:
    from importlib.metadata import version

    found = fingerprint.package_versions(("torch", "numpy"))
    assert found == {"numpy": version("numpy"), "torch": version("torch")}
    assert list(found) == ["numpy", "torch"]
