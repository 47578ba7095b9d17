"""What decides a step's result besides its inputs: the digest of the library code it uses, and package versions.

The code of a step is the closure of its module over `import shardmill...`, wherever the import statement stands. The
packages above an imported module count too, since Python runs their `__init__.py`. Only comments, docstrings and
imports for type checkers are left out (source_file.py). A model family is loaded by name, which no import statement
shows, so the module of the build's family counts for every step that imports `shardmill.models.family`.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from shardmill.files import load_json
from shardmill.machine import package_versions
from shardmill.pipeline import source_file
from shardmill.pipeline.known_modules import keep, read_module
from shardmill.pipeline.step import Step
from shardmill.pipeline.task import Tools, source_folder

FAMILY = "shardmill.models.family"  # loads the module that is called like a model_type
FAMILIES = ("shardmill.models.families", "shardmill.models.encoders")
FORM = 2  # of the digest; 1 was blind to some arguments, and nothing that was stored under it is believed


def tools(step: Step, model_type: str) -> Tools:
    """Code digest and package versions of a step, as its action key has them.

    Args:
        step: the step.
        model_type: of the checkpoint, which names the model's family.
    """
    code = code_digest(modules(step), model_type)
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
    """sha256 over the code of the modules and of every module of ours they import, directly or not.

    A package's other files (templates, say) count with its `__init__.py`.

    Args:
        modules: where to begin.
        model_type: names the family's module.
    """
    found = {name: read_module(file).code for name, file in closure(modules, model_type).items()}
    keep()
    text = "\n".join((f"form {FORM}", *(f"{name} {found[name]}" for name in sorted(found))))
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
            if file is not None and module not in found:
                found[module] = file
                waiting += read_module(file).imported
    return found


def needs_family(modules: Iterable[str]) -> bool:
    """Whether the code of these modules depends on the model's family."""
    return FAMILY in {name for file in closure(modules).values() for name in read_module(file).imported}


def _counted(name: str) -> Iterator[str]:
    """Yield the modules that Python runs on an import of a dotted name: the packages above it, and its own."""
    parts = name.split(".")
    yield from (".".join(parts[:i]) for i in range(1, len(parts) + 1))


@cache
def module_file(name: str) -> Path | None:
    """The source of a module of ours; None for a name that is an attribute of one."""
    parts = name.split(".")
    path = source_file.OURS.get(parts[0], Path()).joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)
