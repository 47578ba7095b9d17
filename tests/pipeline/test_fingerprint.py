"""What a step's digest depends on: all the code that it can reach, and nothing else.

How code is read is tested on libraries of a few files, what belongs to a step on the real one.
"""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.pipeline import fingerprint
from shardmill.pipeline.table import STEPS


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

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from shardmill.far import Number

log = logging.getLogger(__name__)
Width = Annotated[int, Field(ge=1, description="Of a pass.")]


def add(a, b):
    """a + b."""
    log.info("adding %s", a)
    if a is None:
        raise ValueError(f"nothing to add to {b}")
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
    "an import for type checkers": ("import Number", "import Number, Text"),
    "a description": ("Of a pass.", "How wide a pass is."),
    "an error's text": ("nothing to add to {b}", "{b} can't be added to nothing"),
    "formatting": ("return a + b", "return (\n        a\n        + b)"),
}

DIFFERENT = {
    "an operator": ("a + b  #", "a - b  #"),
    "a default": ("def add(a, b)", "def add(a, b=1)"),
    "a call that only looks like logging": ('log.info("adding %s", a)', 'logs.info("adding %s", a)'),
    "an error": ("raise ValueError", "raise TypeError"),
    "a bound beside a description": ("ge=1", "ge=2"),
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


def test_rules_say_what_they_say_to_those_only_whose_result_holds_it(small: Library) -> None:
    """And on whose word they say it to none."""
    rule = 'RULES = (Rule("W1", "error", "too large", "use a smaller one", size, (Source("a", "b c"),)),)'
    small.write("shardmill/rules.py", rule)

    def digests() -> tuple[str, str]:
        fingerprint.read_module.cache_clear()
        return tuple(fingerprint.code_digest(["shardmill.rules"], wording=w) for w in (False, True))  # type: ignore[return-value]

    before = digests()
    small.write("shardmill/rules.py", rule.replace('"b c"', '"d"'))
    assert digests() == before
    small.write("shardmill/rules.py", rule.replace("a smaller one", "two"))
    assert digests()[0] == before[0] and digests()[1] != before[1]
    small.write("shardmill/rules.py", rule.replace('"error"', '"warn"'))
    assert digests()[0] != before[0]


def test_what_a_facade_passes_on_counts_and_nothing_else_of_it(small: Library) -> None:
    small.write("shardmill/near.py", "from shardmill.decode import Session")
    small.write("shardmill/decode/session.py", "Session = 1")
    small.write("shardmill/decode/other.py", "x = 1")
    facade = "from shardmill.decode.session import Session\nfrom shardmill.decode.other import x\ny = 1"
    small.write("shardmill/decode/__init__.py", facade)
    before = small.digest("shardmill.near")
    small.write("shardmill/decode/other.py", "x = 2")
    small.write("shardmill/decode/__init__.py", facade + "\nz = 1")
    assert small.digest("shardmill.near") == before
    small.write("shardmill/decode/session.py", "Session = 2")
    assert small.digest("shardmill.near") != before
    small.write("shardmill/near.py", "from shardmill.decode import y")
    before = small.digest("shardmill.near")
    small.write("shardmill/decode/__init__.py", facade.replace("y = 1", "y = 2"))
    assert small.digest("shardmill.near") != before


def test_of_the_families_only_the_models_own_counts(small: Library) -> None:
    small.write("shardmill/near.py", "def work():\n    from shardmill.models import family")
    small.write("shardmill/models/__init__.py", "def family(): ...")
    small.write("shardmill/models/families/own.py", "x = 1")

    def digest(model_type: str) -> str:
        fingerprint.read_module.cache_clear()
        return fingerprint.code_digest(["shardmill.near"], model_type)

    before = digest("own")
    small.write("shardmill/models/families/other.py", "x = 1")
    assert digest("own") == before != digest("other")
    small.write("shardmill/models/families/own.py", "x = 2")
    assert digest("own") != before
    assert digest("../own") == digest("")  # a checkpoint's word is no path


REACHED = {
    "convert": [
        "shardmill/models/blocks.py",
        "shardmill/models/primitives.py",
        "shardmill/convert/weights.py",
        "shardmill/convert/package.py",
        "shardmill/plan.py",
    ],
    "split": [
        "shardmill/models/families/phi3.py",
        "shardmill/checkpoint/headers.py",
        "shardmill/checkpoint/expect.py",
        "shardmill/plan.py",
        "shardmill/config.py",
    ],
    "parity": [
        "shardmill/gates/thresholds.py",
        "shardmill/gates/passes.py",
        "shardmill/models/contract.py",
        "shardmill/models/host.py",
        "shardmill/runtime/program.py",
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
        "shardmill/models/host.py",
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
    row = STEPS[step]
    return {relative(file) for file in fingerprint.closure((row.task.__module__, *row.also), "phi3").values()}


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
    ],
    "parity": ["shardmill.gates.parity", "portable_coreml.proxy", "shardmill.runtime.program"],
    "parity_stack": ["shardmill.gates.stack", "portable_coreml.proxy", "shardmill.runtime.engine"],
}


@pytest.mark.parametrize("step", HEAVY)
def test_the_closure_covers_whatever_python_loads(step: str) -> None:
    """Python itself is asked what the step's modules import."""
    command = [sys.executable, "-c", LOADED.format(step=step, heavy=HEAVY[step])]
    loaded = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert {"shardmill.pipeline.task", HEAVY[step][0]} <= set(loaded)
    uncounted = set(fingerprint.FACADES)  # packages themselves; of decode, what they pass on too
    counting = {n for n in loaded if not n.startswith("shardmill.decode.") and not n.endswith(".errors")}
    counting -= uncounted
    sources = {fingerprint.module_file(name) for name in counting}
    names = {relative(file) for file in sources if file}
    assert names - files_read(step) == set()


class Copy:
    """A copy of the library that may be edited; digests are those of its steps."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, folder in fingerprint.OURS.items():
            shutil.copytree(folder / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.known: dict[tuple[str, bool, bytes], fingerprint.Module] = {}
        self.read = fingerprint.read_module.__wrapped__

    def read_module(self, file: Path, wording: bool = False) -> fingerprint.Module:
        """Reads a file again only if it is another."""
        data = fingerprint.data_files(file.parent) if file.name == "__init__.py" else []
        state = (str(file), wording, b"".join(path.read_bytes() for path in (file, *data)))
        if state not in self.known:
            self.known[state] = self.read(file, wording)
        return self.known[state]

    def digests(self) -> dict[str, str]:
        return {name: fingerprint.tools(step, "phi3")["code"] for name, step in STEPS.items()}

    def changed(self, file: str, old: str, new: str) -> set[str]:
        """The steps whose digests differ after an edit, which is undone. Without `old` the file is new, or longer."""
        before, path = self.digests(), self.root / file
        text = path.read_text() if path.exists() else ""
        assert old in text, f"{file} has no {old!r}"
        path.write_text(text.replace(old, new, 1) if old else text + new)
        after = self.digests()
        path.write_text(text) if text else path.unlink()
        return {name for name in STEPS if after[name] != before[name]}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    root = tmp_path_factory.mktemp("library")
    copy = Copy(root)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "OURS", dict.fromkeys(fingerprint.OURS, root))
        patch.setattr(fingerprint, "read_module", copy.read_module)
        yield copy


RULE = "portable_coreml/judge/placement/rules/weights.py"
DRAFTERS = "shardmill/decode/drafters/__init__.py"
# What is edited, and the steps whose digests it changes: no other can have another result.
EDITS: dict[str, tuple[str, str, str, set[str]]] = {
    "a comment": ("shardmill/convert/stamped.py", "import tempfile", "import tempfile  # why", set()),
    "a docstring": ("shardmill/plan.py", '"""The plan:', '"""All of the plan:', set()),
    "a log text": ("shardmill/pipeline/steps/fetch.py", "%d files at %s", "%d files, %s", set()),
    "an error's text": ("shardmill/pipeline/steps/reference.py", "holds no tokenizer", "has no tokenizer", set()),
    "a new error": ("shardmill/errors.py", "", "\n\nclass NewError(ShardmillError):\n    pass\n", set()),
    "a help text": ("shardmill/commands/serve.py", "Address to listen at.", "The address.", set()),
    "a config key's description": ("shardmill/config.py", "Tokens compared, from", "How many tokens, from", set()),
    "a new family": ("shardmill/models/families/newfamily.py", "", "x = 1\n", set()),
    "a new command": ("shardmill/commands/extra.py", "", "x = 1\n", set()),
    "a rule's source": (RULE, "pull request 2593, issue 1807", "pull request 2593", set()),
    "a rule's remedy": (RULE, "split the layers over more programs", "cut it into more programs", {"residency"}),
    "a new drafter": (DRAFTERS, "", "\nfrom shardmill.decode.drafters.none import NoDrafter as Other\n", {"benchmark"}),
    "a rule's condition": (
        RULE,
        "subject.weight_bytes > MAX_WEIGHT_BYTES",
        "subject.weight_bytes >= MAX_WEIGHT_BYTES",
        {"compile", "residency", "parity", "parity_stack", "benchmark"},  # what Core ML does not load is a rule too
    ),
    "the converter": ("shardmill/convert/stamped.py", "", "\nx = 1\n", {"convert"}),
    "the embedding": ("shardmill/convert/table.py", "", "\nx = 1\n", {"embedding"}),
    "a primitive": ("shardmill/models/primitives.py", "", "\nx = 1\n", {"convert"}),
    "the family": ("shardmill/models/families/phi3.py", "", "\nx = 1\n", {"split"}),
    "the host's masks": ("shardmill/models/host.py", "", "\nx = 1\n", {"parity", "parity_stack", "benchmark"}),
    "a gate": ("shardmill/gates/parity.py", "", "\nx = 1\n", {"parity", "parity_stack"}),
    "a threshold": ("shardmill/gates/thresholds.py", "1e-4", "2e-4", {"residency", "parity", "parity_stack", "report"}),
    "the server": ("shardmill/serve/worker.py", "", "\nx = 1\n", {"benchmark"}),
    "the page": ("shardmill/report/templates/head.html", "", "<p>", {"report"}),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_changes_the_digests_of_the_steps_that_it_can_change(kind: str, library: Copy) -> None:
    file, old, new, steps = EDITS[kind]
    assert library.changed(file, old, new) == steps


def test_package_versions_are_the_installed_ones() -> None:
    from importlib.metadata import version

    from shardmill.machine import package_versions

    found = package_versions(("torch", "numpy"))
    assert found == {"numpy": version("numpy"), "torch": version("torch")}
    assert list(found) == ["numpy", "torch"]
