"""The code that a step runs, as a digest: every module that its task imports, without comments and docstrings."""

from __future__ import annotations

import ast
import contextlib
import errno
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardmill.files import is_left_by_macos, kept_for, load_json, write_json
from shardmill.machine import CODE, package_versions, public_version
from shardmill.pipeline.needs import Step
from shardmill.pipeline.task import Tools, source_folder


def _folders() -> Iterator[tuple[str, Path]]:
    """Yield our packages that are installed and the folders they lie in, found without importing them."""
    for name in ("shardmill_lab", *CODE):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            yield name, Path(spec.origin).parents[1]


OURS = dict(_folders())  # shardmill comes last, since in a clone its folder holds the others


@dataclass(frozen=True)
class Module:
    """A source file.

    Attributes:
        code: digest of what can decide results.
        imported: dotted names of what it imports from our packages.
    """

    code: str
    imported: tuple[str, ...]


def _module_name(file: Path) -> tuple[str, ...]:
    """Return a file's place below the folder of its package: shardmill, pipeline, code."""
    root = next(root for root in OURS.values() if file.is_relative_to(root))
    return file.relative_to(root).with_suffix("").parts


def parse_module(file: Path, source: bytes, data: bytes) -> Module:
    """Parse a source file.

    Args:
        file: its path, which says what relative imports mean.
        source: its bytes.
        data: bytes of the other files of the package that it begins, see `data_of`.
    """
    tree = normalized(ast.parse(source))
    code = hashlib.sha256(spelled(tree).encode() + data).hexdigest()
    return Module(code, tuple(sorted(set(_imports(tree, _module_name(file)[:-1])))))


def normalized(tree: ast.Module) -> ast.Module:
    """Return a module's syntax tree without code that can't change a result, see this module's docstring."""
    counted: ast.Module = _Normalizer(_imports_type_checking(tree)).visit(tree)
    return counted


def data_of(file: Path) -> bytes:
    """Return the names and bytes of a package's other files, if the file is its `__init__.py`."""
    data = _data_files(file.parent) if file.name == "__init__.py" else ()
    return b"".join(path.name.encode() + path.read_bytes() for path in data)


def spelled(node: object) -> str:
    """Return a syntax tree as text, alike in Python 3.11 to 3.13; ast.dump and ast.unparse vary between versions.

    Fields without content are left out, because newer versions have more empty fields.
    """
    if isinstance(node, ast.AST):
        fields = (f"{name}={spelled(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(spelled, node))}]"
    return repr(node)


def _data_files(folder: Path) -> list[Path]:
    """Return files of a package that are no code, in it or in folders that hold no code, sorted."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__" and not any(path.rglob("*.py")):
            files += sorted(f for f in path.rglob("*") if f.is_file())
        elif path.is_file() and path.suffix not in (".py", ".pyc"):
            files.append(path)
    return [path for path in files if not is_left_by_macos(path)]


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Yield the dotted name of every module or attribute of ours that a module of `package` imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module or "")))
            names = [f"{module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if name.split(".")[0] in OURS)


def _imports_type_checking(tree: ast.Module) -> bool:
    """Return whether the name TYPE_CHECKING is the one of `typing` in this module, and nothing else."""
    imported = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "typing"
        and alias.name == "TYPE_CHECKING"
        and not alias.asname
        for node in tree.body
        for alias in getattr(node, "names", ())
    )
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "TYPE_CHECKING")
    return imported and all(isinstance(name.ctx, ast.Load) for name in names)


class _Normalizer(ast.NodeTransformer):
    """Transformer that drops code that can't change a result, see the module's docstring.

    Args:
        type_checking: whether `if TYPE_CHECKING:` is known never to run.
    """

    def __init__(self, type_checking: bool) -> None:
        self.type_checking = type_checking

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [statement for statement in body if not self._never_counts(statement)]  # type: ignore[attr-defined]
        return node

    def _never_counts(self, statement: ast.stmt) -> bool:
        """Return whether a statement is a docstring, `pass`, or imports for type checkers."""
        if isinstance(statement, ast.If) and self.type_checking and not statement.orelse:
            return isinstance(statement.test, ast.Name) and statement.test.id == "TYPE_CHECKING"
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_text or isinstance(statement, ast.Pass)


KEPT = kept_for(__file__)
READER = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()

_new: dict[str, dict[str, Any]] = {}  # what this process parsed


@cache
def read_module(file: Path) -> Module:
    """Return what a source file imports and its digest; parses it only if its bytes are new."""
    source, data = file.read_bytes(), data_of(file)
    name = "/".join(_module_name(file))
    sha256 = hashlib.sha256(len(source).to_bytes(8) + source + data).hexdigest()
    entry = _kept().get(name, {})
    try:
        if entry["sha256"] == sha256:
            return Module(entry["code"], tuple(entry["imported"]))
    except (KeyError, TypeError):  # not kept, or damaged
        pass
    module = parse_module(file, source, data)
    _new[name] = {"sha256": sha256, **asdict(module)}
    return module


def save_modules() -> None:
    """Write what this process parsed beside what was kept before; nothing if that folder is read-only."""
    if _new:
        with contextlib.suppress(OSError):
            write_json(KEPT, {"reader": READER, "modules": _kept() | _new})
        _new.clear()
        _kept.cache_clear()


@cache
def _kept() -> dict[str, Any]:
    """Return the entries by name; empty if the file is missing, damaged or of another reader."""
    with contextlib.suppress(OSError, ValueError):
        content = load_json(KEPT)
        modules = content.get("modules") if isinstance(content, dict) and content.get("reader") == READER else None
        return modules if isinstance(modules, dict) else {}
    return {}


FAMILY = "shardmill.models.family"  # loads the module that is named after a model_type
FAMILIES = ("shardmill.models.families", "shardmill.models.encoders", "shardmill.models.towers")
RECORD = "source.receipt.json"  # a build's file with what was fetched
FORM = 2  # version of the digest; 1 ignored some arguments, so results that were stored under it are not used


def tools(step: Step, model_type: str) -> Tools:
    """Return code digest and package versions of a step, as its action key has them.

    Args:
        step: the step.
        model_type: the checkpoint's model_type, which names the model's family.
    """
    code = code_digest(modules(step), model_type)
    return {"code": code, "packages": versions(step)}


def versions(step: Step) -> dict[str, str]:
    """Return the installed versions of the packages that decide a step's result, as its action key has them."""
    known = package_versions(step.packages)
    return {
        name: public_version(version) if name == "torch" and step.exact else version for name, version in known.items()
    }


def modules(step: Step) -> tuple[str, ...]:
    """Return the names of the modules at which a step's code starts."""
    return (step.module, *step.also)


def family_of(step: Step, record: Path) -> str:
    """Return the model_type of a checkpoint that was fetched, if it decides what a step's code is.

    Otherwise nothing is read, and the result is empty.

    Args:
        step: the step.
        record: source.receipt.json.
    """
    return fetched_model_type(record) if needs_family(modules(step)) else ""


def fetched_model_type(record: Path) -> str:
    """Return the model_type of a checkpoint that was fetched; empty if config.json has none.

    Args:
        record: source.receipt.json.

    Raises:
        FileNotFoundError: nothing was fetched; the error names the record, as Snakemake expects.
    """
    try:
        return model_type_in(source_folder(record))
    except OSError as error:
        raise FileNotFoundError(errno.ENOENT, f"no checkpoint yet: {error}", str(record)) from error


def model_type_in(folder: Path) -> str:
    """Return the model_type that the config.json in a folder names; empty where it names none. Raise OSError."""
    try:
        content = load_json(folder / "config.json")
    except ValueError:
        return ""
    return str(content.get("model_type", "")) if isinstance(content, dict) else ""


def code_digest(modules: Iterable[str], model_type: str = "") -> str:
    """Return sha256 over the code of the modules and of every module of ours they import, directly or not.

    A package's other files (templates, say) count with its `__init__.py`.

    Args:
        modules: the modules to begin with, by name.
        model_type: the model_type, which names the family's module.
    """
    codes = {name: read_module(file).code for name, file in closure(modules, model_type).items()}
    save_modules()
    text = "\n".join((f"form {FORM}", *(f"{name} {codes[name]}" for name in sorted(codes))))
    return hashlib.sha256(text.encode()).hexdigest()


def closure(modules: Iterable[str], model_type: str = "") -> dict[str, Path]:
    """Return the modules and every module of ours they import, directly or not, with their files."""
    files: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        name = waiting.pop()
        if name == FAMILY and model_type.isidentifier():
            waiting += [f"{folder}.{model_type}" for folder in FAMILIES]
        for module in _counted(name):
            file = module_file(module)
            if file is not None and module not in files:
                files[module] = file
                waiting += read_module(file).imported
    return files


def needs_family(modules: Iterable[str]) -> bool:
    """Return whether the code of these modules depends on the model's family."""
    return FAMILY in {name for file in closure(modules).values() for name in read_module(file).imported}


def _counted(name: str) -> Iterator[str]:
    """Yield the modules that Python runs on an import of a dotted name: the packages above it, and its own."""
    parts = name.split(".")
    yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1))


@cache
def module_file(name: str) -> Path | None:
    """Return the source of a module of ours; None for a name that is an attribute of one."""
    parts = name.split(".")
    path = OURS.get(parts[0], Path()).joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)
