"""How a digest of code is made, on libraries of a few files: what runs counts however it is imported, and nothing else.

test_step_digests.py has what belongs to the steps of the real library.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmill.pipeline import code_digest


def forget() -> None:
    """Files are another library's, or others than they were."""
    for known in (code_digest.read_module, code_digest._kept, code_digest.module_file):
        known.cache_clear()


class Library:
    """A library of a few files that fingerprint reads instead of the real one."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def digest(self, *modules: str) -> str:
        forget()
        return code_digest.code_digest(modules)

    def write(self, file: str, text: str) -> None:
        path = self.root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """An empty one."""
    monkeypatch.setattr(code_digest, "OURS", {"shardmill": tmp_path})
    monkeypatch.setattr(code_digest, "KEPT", tmp_path / "kept.json")
    forget()
    library = Library(tmp_path)
    library.write("shardmill/__init__.py", "")
    yield library
    forget()


PLAIN = '''"""Says what it does."""
import logging

from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from shardmill.far import Number

log = logging.getLogger(__name__)
NORM = Source("q_norm", transposed=True)
RULE = Rule("W1", "error", "too large", contested="a b c")
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
    "an import for type checkers": ("import Number", "import Number, Text"),
    "formatting": ("return a + b", "return (\n        a\n        + b)"),
}

# The mutants of test_code_mutants.py change literals, names and operators; these are other changes.
DIFFERENT = {
    "a default": ("def add(a, b)", "def add(a, b=1)"),
    "an import": ("import logging\n", "import logging\nimport math\n"),
    "what TYPE_CHECKING is": ("from typing import TYPE_CHECKING, Annotated", "TYPE_CHECKING = True"),
    "what TYPE_CHECKING is later": ("log = ", "TYPE_CHECKING = True\nlog = "),
    "an import under another condition": ("if TYPE_CHECKING", "if not TYPE_CHECKING"),
}


@pytest.mark.parametrize("name", SAME)
def test_what_can_not_change_a_result_does_not_count(small: Library, name: str) -> None:
    small.write("shardmill/plain.py", PLAIN)
    before = small.digest("shardmill.plain")
    assert SAME[name][0] in PLAIN
    small.write("shardmill/plain.py", PLAIN.replace(*SAME[name]))
    assert small.digest("shardmill.plain") == before


def test_data_counts_and_what_macos_leaves_beside_does_not(small: Library) -> None:
    small.write("shardmill/pages/__init__.py", "")
    small.write("shardmill/pages/templates/page.html", "<p>")
    before = small.digest("shardmill.pages")
    small.write("shardmill/pages/templates/.DS_Store", "")
    small.write("shardmill/pages/._page", "")
    assert small.digest("shardmill.pages") == before
    small.write("shardmill/pages/templates/page.html", "<b>")
    assert small.digest("shardmill.pages") != before


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
    assert code_digest.spelled(ast.parse(SAMPLE)) == SPELLED


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


def test_the_packages_that_a_module_lies_in_count(small: Library) -> None:
    """Python runs them, and whatever they import."""
    small.write("shardmill/near.py", "from shardmill.far.session import Session")
    small.write("shardmill/far/session.py", "Session = 1")
    small.write("shardmill/far/other.py", "x = 1")
    small.write("shardmill/far/__init__.py", "from shardmill.far.other import x")
    before = small.digest("shardmill.near")
    small.write("shardmill/far/other.py", "x = 2")
    assert small.digest("shardmill.near") != before


def test_of_the_families_only_the_models_own_counts(small: Library) -> None:
    small.write("shardmill/near.py", "def work():\n    from shardmill.models import family")
    small.write("shardmill/models/__init__.py", "def family(): ...")
    small.write("shardmill/models/families/own.py", "x = 1")

    def digest(model_type: str) -> str:
        forget()
        return code_digest.code_digest(["shardmill.near"], model_type)

    before = digest("own")
    small.write("shardmill/models/families/other.py", "x = 1")
    assert digest("own") == before != digest("other")
    small.write("shardmill/models/families/own.py", "x = 2")
    assert digest("own") != before
    assert digest("../own") == digest("")  # a checkpoint's word is no path
