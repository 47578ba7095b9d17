"""What decides a step's result besides its inputs: the digest of the library code it uses, and package versions.

The code of a step is the closure of its module over `import shardmill...`, wherever the import statement stands. What
can't change a result does not count:

- comments, formatting, docstrings, log messages, imports for type checkers;
- what people are told: texts in `raise`, `help=` and `description=`, what placement rules say and on whose word;
- modules called `errors`, which say how failing is told;
- of the model families, all but the build's own: whoever imports `shardmill.models.family` may load that one file;
- of the packages in `FACADES`, what the importing module does not ask for by name.
"""

from __future__ import annotations

import ast
import errno
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from shardmill.files import load_json
from shardmill.machine import package_versions
from shardmill.pipeline.step import Step
from shardmill.pipeline.task import Tools, source_folder


def _folder_of(package: str) -> Path:
    """The folder that a package lies in, found without importing it."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


OURS = {name: _folder_of(name) for name in ("portable_coreml", "shardmill")}  # package -> the folder it lies in
FAMILY = "shardmill.models.family"  # loads the module that is called like a model_type
FAMILIES = ("shardmill.models.families", "shardmill.models.encoders")
FACADES = (  # packages that do nothing when they are imported but pass on names
    "portable_coreml",
    "portable_coreml.judge.placement",
    "shardmill.decode",
    "shardmill.decode.drafters",
    "shardmill.decode.policies",
)
LOG_CALLS = {"debug", "info", "warning", "error"}
TOLD = {"help", "description"}  # keywords whose values people read


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        code: digest of what decides results.
        imported: dotted names of what it imports from our packages.
        passed_on: names that it imports itself, and where from.
    """

    code: str
    imported: tuple[str, ...]
    passed_on: Mapping[str, str]


def tools(step: Step, model_type: str) -> Tools:
    """Code digest and package versions of a step, as its action key has them.

    Args:
        step: the step.
        model_type: of the checkpoint, which names the model's family.
    """
    code = code_digest(modules(step), model_type, step.wording)
    return {"code": code, "packages": package_versions(step.packages)}


def modules(step: Step) -> tuple[str, ...]:
    """Where the code of a step begins."""
    return (step.task.__module__, *step.also)


def family(step: Step, record: Path) -> str:
    """The model_type of a checkpoint that was fetched, if it decides what a step's code is; else nothing is read.

    Args:
        step: the step.
        record: source.receipt.json.
    """
    return model_type(record) if needs_family(modules(step)) else ""


def model_type(record: Path) -> str:
    """The model_type of a checkpoint that was fetched; empty where it says none, which the split step refuses.

    Args:
        record: source.receipt.json.

    Raises:
        FileNotFoundError: nothing was fetched; it names the record, as Snakemake wants to have it.
    """
    try:
        content = load_json(source_folder(record) / "config.json")
    except OSError as error:
        raise FileNotFoundError(errno.ENOENT, f"no checkpoint yet: {error}", str(record)) from error
    except ValueError:
        return ""
    return str(content.get("model_type", "")) if isinstance(content, dict) else ""


def code_digest(modules: Iterable[str], model_type: str = "", wording: bool = False) -> str:
    """sha256 over the code of the modules and of every module of ours they import, directly or not.

    A package's other files (templates, say) count with its `__init__.py`.

    Args:
        modules: where to begin.
        model_type: names the family's module.
        wording: whether what people are told counts too, as it gets into the result.
    """
    found = {name: read_module(file, wording).code for name, file in closure(modules, model_type).items()}
    text = "\n".join(f"{name} {found[name]}" for name in sorted(found))
    return hashlib.sha256(text.encode()).hexdigest()


def closure(modules: Iterable[str], model_type: str = "") -> dict[str, Path]:
    """The modules and every module of ours they import, directly or not, with their files."""
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name == FAMILY and model_type.isidentifier():
            waiting += [f"{folder}.{model_type}" for folder in FAMILIES]
        for module in _counted(name):
            file = module_file(module)
            if file is not None and module not in found and not module.endswith(".errors"):
                found[module] = file
                waiting += read_module(file).imported
    return found


def needs_family(modules: Iterable[str]) -> bool:
    """Whether the code of these modules depends on the model's family."""
    return FAMILY in {name for file in closure(modules).values() for name in read_module(file).imported}


def _counted(name: str) -> Iterator[str]:
    """The modules that count for someone who imports a dotted name: its own, and the packages that this lies in."""
    parts = name.split(".")
    packages = [".".join(parts[:i]) for i in range(1, len(parts))]
    yield from (package for package in packages if package not in FACADES)
    yield name
    facade = module_file(packages[-1]) if packages and packages[-1] in FACADES else None
    if facade is not None and module_file(name) is None:
        source = read_module(facade).passed_on.get(parts[-1])
        yield from _counted(source) if source else (packages[-1],)


def module_file(name: str) -> Path | None:
    """The source of a module of ours; None for a name that is an attribute of one."""
    parts = name.split(".")
    path = OURS.get(parts[0], Path()).joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)


@cache
def read_module(file: Path, wording: bool = False) -> Module:
    """A source file, with or without what people are told."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    root = next(root for root in OURS.values() if file.is_relative_to(root))
    package = file.relative_to(root).with_suffix("").parts[:-1]
    tree = Normalizer(wording).visit(tree)
    imported = dict(_imports(tree, package))
    data = data_files(file.parent) if file.name == "__init__.py" else ()
    blob = spelled(tree).encode() + b"".join(path.name.encode() + path.read_bytes() for path in data)
    return Module(hashlib.sha256(blob).hexdigest(), tuple(sorted(imported)), {v: k for k, v in imported.items()})


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


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Every module or attribute of ours that a module imports, and the name it gets."""
    for node in ast.walk(tree):
        names: list[tuple[str, str]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            names = [(f"{module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        yield from ((name, known) for name, known in names if name.split(".")[0] in OURS)


class Normalizer(ast.NodeTransformer):
    """Drops what does not decide results, see the module's docstring.

    Args:
        wording: keep what people are told.
    """

    def __init__(self, wording: bool) -> None:
        self.wording = wording

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [statement for statement in body if not _is_idle(statement)]
            node.body = kept or [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        """Without its texts."""
        return self.generic_visit(node) if self.wording else _Silencer().visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Without what it says to people; on whose word a rule is said gets into no result at all."""
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "Source":
            node.args, node.keywords = [], []
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "contested"]
        if not self.wording:
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in TOLD]
            if name == "Rule":
                node.args = [ast.Constant("") if _is_prose(argument) else argument for argument in node.args]
        return self.generic_visit(node)


class _Silencer(ast.NodeTransformer):
    """Empties every text."""

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return ast.Constant("")


def _is_idle(statement: ast.stmt) -> bool:
    """A docstring, `pass`, a call that logs, or imports for type checkers."""
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant) or _is_log_call(statement.value)
    if isinstance(statement, ast.If) and not statement.orelse:
        return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
    return isinstance(statement, ast.Pass)


def _is_log_call(node: ast.expr) -> bool:
    """log.info(...) and its like."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = node.func.value
    return isinstance(owner, ast.Name) and owner.id == "log" and node.func.attr in LOG_CALLS


def _is_prose(node: ast.expr) -> bool:
    """A text of several words: identities and levels are one."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
