"""Where the workflow lies: in the clone that the library is of, or in the wheel that it was installed from."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shardmill
from shardmill.attest.statement import PATHS
from shardmill.config import Benchmark, Config, Parity, parse
from shardmill.errors import ShardmillError
from shardmill.yamlfile import read_yaml

SNAKEFILE = "Snakefile"
PARTS = (SNAKEFILE, "rules", "scripts", "envs", "report", "configs", "profiles", "resources", "constraints.txt")
DEFAULTS: Mapping[tuple[str, ...], str] = {  # what a key of PATHS is where it is not given
    ("parity", "text"): Parity().text,
    ("benchmark", "text"): Benchmark().text,
    ("benchmark", "task_prompts"): Benchmark().task_prompts,
}
LEFT = shutil.ignore_patterns("__pycache__", "*.pyc", ".DS_Store", "._*")


def workflow_root() -> Path:
    """The folder with the Snakefile. Raises ShardmillError where this installation has none."""
    package = Path(shardmill.__file__).resolve().parent
    for folder in (package.parent, package / "workflow"):
        if (folder / SNAKEFILE).is_file():
            return folder
    raise ShardmillError(
        f"{package}: holds no workflow; install shardmill anew: pip install --force-reinstall shardmill"
    )


def default_config() -> str:
    """The demo's config: the working folder's or, where that has none, the workflow's own."""
    own = Path("configs/demo.yaml")
    return str(own if own.is_file() else workflow_root() / own)


def load(path: Path) -> Config:
    """The config in a file, as a build takes it. Raises ConfigError."""
    return parsed(read_yaml(path), str(path))


def parsed(content: Any, name: str) -> Config:
    """The config of a mapping, with its files where they are. Raises ConfigError with `name` in front."""
    return parse(grounded(content) if isinstance(content, Mapping) else content, name)


def grounded(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config whose files are looked for in the working folder and, where they are not there, beside the workflow.

    So a workflow that uses this one as a module, from a folder of its own, has the demo's checkpoint and the texts.
    """
    found = dict(config)
    for keys in PATHS:
        path = _value(found, keys, DEFAULTS.get(keys))
        if isinstance(path, str) and located(path) != path:
            found = _with(found, keys, located(path))
    return found


def located(path: str) -> str:
    """Where a file or a folder is: in the working folder or, where it is not there, beside the workflow."""
    beside = workflow_root() / path
    return os.path.relpath(beside) if not Path(path).exists() and beside.exists() else path


def _value(content: Any, keys: Sequence[str], default: Any) -> Any:
    """What a config has at a key of its sections; None where something else than a section is in the way."""
    for section in keys[:-1]:
        content = content.get(section, {}) if isinstance(content, Mapping) else None
    return content.get(keys[-1], default) if isinstance(content, Mapping) else None


def _with(content: Mapping[str, Any], keys: Sequence[str], value: str) -> dict[str, Any]:
    """A config with another value at a key of its sections."""
    first, *others = keys
    return {**content, first: _with(content.get(first, {}), others, value) if others else value}


def lay_out(folder: Path) -> None:
    """Makes a folder to run Snakemake in: a copy of the workflow, its configs, texts and the demo's checkpoint.

    Raises:
        ShardmillError: something of that name is there.
    """
    root = workflow_root()
    if folder.exists() and not folder.is_dir():
        raise ShardmillError(f"{folder}: is there already, and no folder; choose another name")
    there = [name for name in PARTS if (folder / name).exists()]
    if there:
        raise ShardmillError(f"{folder / there[0]}: is there already; choose another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    for name in PARTS:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=LEFT)
        else:
            shutil.copyfile(root / name, folder / name)
    (folder / "config").symlink_to("configs")
