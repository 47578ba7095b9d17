"""What decides a step's result besides its inputs: the digest of the library code it uses, and package versions.

The code of a step is the closure of its module over `import shardmill...`, wherever the import statement stands. What
can't change a result does not count: of each file what `code` leaves out, and

- modules called `errors`, which say how failing is told;
- of the model families, all but the build's own: whoever imports `shardmill.models.family` may load that one file;
- of the packages in `FACADES`, what the importing module does not ask for by name.
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
FACADES = (  # packages that do nothing when they are imported but pass on names
    "portable_coreml",
    "portable_coreml.judge.placement",
    "shardmill.decode",
    "shardmill.decode.drafters",
    "shardmill.decode.policies",
)


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
    keep()
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


@cache
def module_file(name: str) -> Path | None:
    """The source of a module of ours; None for a name that is an attribute of one."""
    parts = name.split(".")
    path = source_file.OURS.get(parts[0], Path()).joinpath(*parts)
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.is_file()), None)
