"""The models of a run: one config, or those that a batch lists, and what a rule says of whichever a job is of.

A batch is a config with the key `batch` alone: a list of config files, in which `*` stands for any. Each is read as if
it were the only one. What is wrong with one is said in one line, and the others are built.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from shardmill.config import Config
from shardmill.config.reading import read_yaml
from shardmill.errors import ConfigError
from shardmill.files import digest, load_json, write_json
from shardmill.pipeline import storage
from shardmill.pipeline.resolve import workflow_root
from shardmill.printable import one_line, printable

KEY = "batch"
LONGEST = 240  # bytes of a file's name; file systems take 255
KEPT = 40  # characters of a longer one, of up to four bytes each
BUILDS = Path("build")
TOLD = BUILDS / ".batch.json"
SPLIT = "split"  # the step whose rule names what it makes, so that models of other parts need another
TARGETS = "--target-jobs"  # of Snakemake's command for a job: RULE:WILDCARD=VALUE,WILDCARD=VALUE for each
OF_MODEL = re.compile(r"[:,]model=([^,]+)")
Of = Callable[..., Callable[[Any], Any]]


@dataclass(frozen=True)
class Batch:
    """What a run builds.

    Attributes:
        models: their configs, resolved, by name.
        refused: by config file, what keeps it from being built, in one line.
        listed: whether the models come from a list.
        files: by model, the config file of the list.
        rules: by model, what the run of this job calls the rule of its split step.
    """

    models: Mapping[str, Config]
    refused: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)

    @property
    def refusals(self) -> dict[str, str]:
        """Return the rejections by names that a file can have, each a different one."""
        taken = Counter(map(_file_name, self.refused))
        return {_file_name(file, taken[_file_name(file)] > 1): line for file, line in self.refused.items()}

    def names(self, wildcard: str) -> str:
        """Return a regular expression for what a wildcard stands for: "model", "part" or "point"."""
        found = {"model": {*self.models}, "part": set[str](), "point": set[str]()}
        for config in self.models.values():
            found["part"] |= {*config.parts}
            found["point"] |= {*config.points}
        return any_of(found[wildcard])


@dataclass(frozen=True)
class Told:
    """What a run leaves for the Snakemakes of its jobs, as attributes of `Batch` have it; nothing if it could not."""

    refused: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)


def _file_name(path: str, taken: bool = False) -> str:
    """Return a path as a name that a file can have, with room for `.log`; with a digest if the name alone is taken."""
    name = re.sub(r"[^\w.-]", "_", path)
    return f"{digest(path)[:16]}_{name[-KEPT:]}" if taken or len(os.fsencode(name)) > LONGEST else name


def any_of(names: Iterable[str]) -> str:
    """Return a regular expression that names match; where there are none, nothing does."""
    return "|".join(re.escape(name) for name in sorted(names)) or "(?!)"


def is_batch(content: Mapping[str, Any]) -> bool:
    """Return whether a config is a list of configs."""
    return KEY in content


def read_batch(
    content: Mapping[str, Any],
    name: str,
    read: Callable[[Mapping[str, Any], str], Config],
    told: Told = Told(),
    wanted: Collection[str] | None = None,
) -> Batch:
    """Return the models of a list.

    Args:
        content: the batch config's.
        name: what errors begin with.
        read: checks and resolves the content of a config, given its file's name; may raise ConfigError.
        told: what the run of this job found out: what is refused is refused without another look.
        wanted: the only models that are read, if the run told which files they are in; None for all.

    Raises:
        ConfigError: the list itself makes no sense, or no config that was read can be built.
    """
    models: dict[str, Config] = {}
    files: dict[str, str] = {}
    refused: dict[str, str] = {}
    only = None if wanted is None or not told.files.keys() >= {*wanted} else {told.files[model] for model in wanted}
    for file in _files(content, name):
        if file.as_posix() in told.refused:
            refused[file.as_posix()] = told.refused[file.as_posix()]
            continue
        if only is not None and file.as_posix() not in only:
            continue
        try:
            found = read(read_yaml(file), str(file))
            if found.model in models:
                raise ConfigError(f"{file}: another config of the batch is called {found.model}, too; rename one")
            models[found.model], files[found.model] = found, file.as_posix()
        except Exception as error:  # whatever a library makes of it: the other models can be built
            unforeseen = "" if isinstance(error, ConfigError) else f"{file}: {type(error).__name__}: "
            refused[file.as_posix()] = unforeseen + one_line(error)
    fresh = [line for file, line in refused.items() if file not in told.refused]
    if not models and fresh:
        raise ConfigError(fresh[0])
    return Batch(models, refused, listed=True, files=files, rules=told.rules)


def tell_jobs(found: Batch) -> None:
    """Leave what a run found out, as it begins, for the Snakemakes of its jobs, which need not find it out again.

    To see that a config can't be built may take transformers, or a hub that does not answer; a job has neither the
    memory nor the time for that. Nor has it for the configs of a hundred models, of which it needs its own.
    """
    if not found.listed:
        return
    rules = {model: one.rule for one in alike(found, SPLIT) for model in one.models}
    with contextlib.suppress(OSError):  # a folder that may only be read: jobs look for themselves
        write_json(TOLD, asdict(Told(dict(found.refused), dict(found.files), rules)))


def told() -> Told:
    """Return what the run of this job left for it; nothing where it could not."""
    try:
        content = load_json(TOLD)
        parts = (content[one.name].items() for one in fields(Told))
        return Told(*({str(key): str(value) for key, value in part} for part in parts))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return Told()


def of_jobs(command: Sequence[str]) -> set[str] | None:
    """Return the models of the jobs that a Snakemake does, by its command; None where that does not tell.

    Snakemake itself says only after it has read the rules which jobs of them it is to do.
    """
    if TARGETS not in command:
        return None
    jobs = takewhile(lambda word: not word.startswith("--"), command[[*command].index(TARGETS) + 1 :])
    return {found[1] for job in jobs if (found := OF_MODEL.search(job))}


def _files(content: Mapping[str, Any], name: str) -> list[Path]:
    """Return the config files that a batch lists, each once."""
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
    """Return files that a pattern names, in order; none where it makes no sense as one."""
    path = Path(pattern)
    if path.is_absolute():
        root, path = Path(path.anchor), path.relative_to(path.anchor)
    try:
        return sorted(file for file in root.glob(str(path)) if file.is_file())
    except (ValueError, LookupError, NotImplementedError, OSError):
        return []


def of(batch: Batch) -> Of:
    """Return a function for rules that applies another to the config of a job's model."""

    @cache
    def known(model: str, function: Callable[..., Any], given: Sequence[Any]) -> Any:
        return function(*given, batch.models[model])

    def own(function: Callable[..., Any], *given: Any) -> Callable[[Any], Any]:
        return lambda wildcards: known(wildcards.model, function, given)

    return own


def parts_of(batch: Batch) -> Of:
    """Return a function for rules: a path for every part of a job's model, and for some more."""

    def own(template: str, *more: str) -> Callable[[Any], list[str]]:
        def paths(wildcards: Any) -> list[str]:
            names = (*batch.models[wildcards.model].parts, *more)
            return [template.replace("{part}", part) for part in names]  # Snakemake fills in the others

        return paths

    return own


def together(*given: str | Iterable[str] | Callable[[Any], Iterable[str]]) -> Callable[[Any], list[str]]:
    """Return a function for rules that joins several of the functions above to one input."""

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
    """Return the models by their parts.

    The first rule is called `rule`, unless the run of this job calls it otherwise.
    """
    found: dict[tuple[str, ...], list[str]] = {}
    for model, config in batch.models.items():
        found.setdefault(config.parts, []).append(model)
    return [
        Alike(batch.rules.get(models[0]) or (f"{rule}_{number}" if number else rule), parts, tuple(models))
        for number, (parts, models) in enumerate(found.items())
    ]


ERROR = "ERROR "  # how a job's log begins the line that says why it failed
LIMIT = 400  # characters of such a line


def sum_up(batch: Batch, workflow: Any) -> None:
    """Write build/index.html and names what was not built, if this is a batch and its files lie in build/."""
    if not batch.listed or storage.is_used(workflow):
        return
    # Slow to import, and only needed here.
    from shardmill.report.index import NOT_FINISHED, PAGE, BuildRow, read_row, write_index

    broken = _broken(workflow)
    rows = []
    for model in sorted(batch.models):
        failed = _why(broken[model]) or NOT_FINISHED if model in broken else ""
        rows.append(BuildRow(model, failed) if failed else read_row(BUILDS / model, _why(_logs(BUILDS / model))))
    rows += [BuildRow(file, line.removeprefix(f"{file}: ")) for file, line in sorted(batch.refused.items())]
    write_index(BUILDS, rows)
    for row in rows:
        if row.error not in ("", NOT_FINISHED):
            print(f"shardmill: not built: {row.name}: {row.error}", file=sys.stderr)
    finished = sum(not row.error for row in rows)
    print(f"shardmill: {finished} of {len(rows)} models are finished, see {BUILDS / PAGE}", file=sys.stderr)


def _broken(workflow: Any) -> dict[str, list[Path]]:
    """Return the logs of the jobs that this run was to do and has not done, by model.

    What lies in such a model's folder may be left from a run before: a page, say, though a measurement failed now.
    """
    found: dict[str, list[Path]] = {}
    for job in workflow.dag.needrun_jobs():
        if "model" in job.wildcards_dict:
            found.setdefault(job.wildcards_dict["model"], []).extend(map(Path, job.log))
    return found


def _logs(build: Path) -> Iterable[Path]:
    return (build / "logs").glob("*.log")


def _why(logs: Iterable[Path]) -> str:
    """Return what the log of a job that failed says, the latest of several; empty where none did."""
    there = [log for log in logs if log.is_file()]
    for log in sorted(there, key=lambda log: log.stat().st_mtime, reverse=True):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
        if said:
            return printable(f"{log.stem}: {said[-1]}", LIMIT)
    return ""
