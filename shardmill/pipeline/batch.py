"""The models of a run: one config, or those that a batch lists, and what a rule says of whichever a job is of.

A batch is a config with the key `batch` alone: a list of config files, in which `*` stands for any. Each is read as if
it were the only one. What is wrong with one is said in one line, and the others are built.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardmill.config import Config
from shardmill.errors import ConfigError
from shardmill.files import digest, load_json, write_json
from shardmill.pipeline.origin import workflow_root
from shardmill.printable import one_line
from shardmill.yamlfile import read_yaml

KEY = "batch"
LONGEST = 240  # bytes of a file's name; file systems take 255
KEPT = 40  # characters of a longer one, of up to four bytes each
BUILDS = Path("build")
REFUSED = BUILDS / ".refused.json"
NONE: Mapping[str, str] = MappingProxyType({})
Of = Callable[..., Callable[[Any], Any]]


@dataclass(frozen=True)
class Batch:
    """What a run builds.

    Attributes:
        models: their configs, settled, by name.
        refused: by config file, what keeps it from being built, in one line.
        listed: whether the models come from a list.
    """

    models: Mapping[str, Config]
    refused: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False

    @property
    def refusals(self) -> dict[str, str]:
        """The same by names that can be a file's."""
        return {_file_name(file): line for file, line in self.refused.items()}

    def names(self, wildcard: str) -> str:
        """A regular expression for what a wildcard stands for: "model", "part" or "point"."""
        found = {"model": {*self.models}, "part": set[str](), "point": set[str]()}
        for config in self.models.values():
            found["part"] |= {*config.parts}
            found["point"] |= {*config.points}
        return any_of(found[wildcard])


def _file_name(path: str) -> str:
    """A path as a name that a file can have, with room for `.log` after it."""
    name = re.sub(r"[^\w.-]", "_", path)
    return name if len(os.fsencode(name)) <= LONGEST else f"{digest(path)[:16]}_{name[-KEPT:]}"


def any_of(names: Iterable[str]) -> str:
    """A regular expression that names match; where there are none, nothing does."""
    return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"


def is_batch(content: Mapping[str, Any]) -> bool:
    """Whether a config is a list of configs."""
    return KEY in content


def read_batch(
    content: Mapping[str, Any],
    name: str,
    read: Callable[[Mapping[str, Any], str], Config],
    known: Mapping[str, str] = NONE,
) -> Batch:
    """The models of a list.

    Args:
        content: the batch config's.
        name: what errors begin with.
        read: checks and settles the content of a config, given its file's name; may raise ConfigError.
        known: by config file, what is refused without another look.

    Raises:
        ConfigError: the list itself makes no sense, or no config of it can be built.
    """
    models: dict[str, Config] = {}
    refused: dict[str, str] = {}
    for file in _files(content, name):
        if file.as_posix() in known:
            refused[file.as_posix()] = known[file.as_posix()]
            continue
        try:
            found = read(read_yaml(file), str(file))
            if found.model in models:
                raise ConfigError(f"{file}: another config of the batch is called {found.model}, too; rename one")
            models[found.model] = found
        except Exception as error:  # whatever a library makes of it: the other models can be built
            unforeseen = "" if isinstance(error, ConfigError) else f"{file}: {type(error).__name__}: "
            refused[file.as_posix()] = unforeseen + one_line(error)
    if not models:
        raise ConfigError(next(iter(refused.values())))
    return Batch(models, refused, listed=True)


def tell_refused(found: Batch) -> None:
    """Leaves what a run refuses, as it begins, for the Snakemakes of its jobs, which need not find it out again.

    To see that a config can't be built may take transformers, or a hub that does not answer; a job has neither the
    memory nor the time for that.
    """
    if not found.listed:
        return
    with contextlib.suppress(OSError):  # a folder that may only be read: jobs look for themselves
        write_json(REFUSED, dict(found.refused))


def told_refused() -> Mapping[str, str]:
    """What the run of this job refuses; nothing where it could not tell."""
    try:
        return {str(file): str(line) for file, line in load_json(REFUSED).items()}
    except (OSError, ValueError, AttributeError):
        return NONE


def _files(content: Mapping[str, Any], name: str) -> list[Path]:
    """The config files that a batch lists, each once."""
    patterns = content[KEY]
    if set(content) != {KEY} or not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{name}: batch: expected a list of config files and no other key")
    found: list[Path] = []
    for pattern in patterns:
        here = next((files for root in (Path(), workflow_root()) if (files := _matching(root, pattern))), None)
        if here is None:
            raise ConfigError(f"{name}: batch: {pattern}: no such file")
        found += here
    if not found:
        raise ConfigError(f"{name}: batch: lists no config")
    return list(dict.fromkeys(found))


def _matching(root: Path, pattern: str) -> list[Path]:
    """Files that a pattern names, in order; none where it makes no sense as one."""
    path = Path(pattern)
    if path.is_absolute():
        root, path = Path(path.anchor), path.relative_to(path.anchor)
    try:
        return sorted(file for file in root.glob(str(path)) if file.is_file())
    except (ValueError, LookupError, NotImplementedError, OSError):
        return []


def of(batch: Batch) -> Of:
    """For rules: what a function says of the config of a job's own model."""

    @cache
    def known(model: str, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        return function(*given, batch.models[model])

    def own(function: Callable[..., Any], *given: Any) -> Callable[[Any], Any]:
        return lambda wildcards: known(wildcards.model, function, given)

    return own


def parts_of(batch: Batch) -> Of:
    """For rules: a path for every part of a job's own model, and for some more."""

    def own(template: str, *more: str) -> Callable[[Any], list[str]]:
        def paths(wildcards: Any) -> list[str]:
            names = (*batch.models[wildcards.model].parts, *more)
            return [template.replace("{part}", part) for part in names]  # Snakemake fills in the others

        return paths

    return own


def together(*given: str | Iterable[str] | Callable[[Any], Iterable[str]]) -> Callable[[Any], list[str]]:
    """For rules: several of the above as one input."""

    def paths(wildcards: Any) -> list[str]:
        lists = [[one] if isinstance(one, str) else one(wildcards) if callable(one) else one for one in given]
        return [path for found in lists for path in found]

    return paths


@dataclass(frozen=True)
class Alike:
    """Models whose parts have the same names, so that one rule can name what is made of each."""

    rule: str
    parts: tuple[str, ...]
    models: tuple[str, ...]


def alike(batch: Batch, rule: str) -> list[Alike]:
    """The models by their parts; the first rule is called `rule`."""
    found: dict[tuple[str, ...], list[str]] = {}
    for model, config in batch.models.items():
        found.setdefault(config.parts, []).append(model)
    return [
        Alike(f"{rule}_{number}" if number else rule, parts, tuple(models))
        for number, (parts, models) in enumerate(found.items())
    ]
