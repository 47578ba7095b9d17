"""The models of a run, from one config or a batch, and functions with which rules look up a job's model.

A batch is a config whose only key is `batch`: a list of config files, in which `*` is a wildcard. Each config is read
independently. If a config can't be built, the reason is printed in one line and the other models are built.
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
from shardmill.runtime.judged import error_in

KEY = "batch"
LONGEST = 240  # bytes of a file's name; file systems take 255
KEPT = 40  # characters that are kept of a longer name, each up to four bytes
BUILDS = Path("build")
TOLD = BUILDS / ".batch.json"
SPLIT = "split"  # the step whose rule lists its outputs by part, so that models with other parts need another rule
TARGETS = "--target-jobs"  # in Snakemake's command for jobs: RULE:WILDCARD=VALUE,WILDCARD=VALUE for each job
OF_MODEL = re.compile(r"[:,]model=([^,]+)")
Of = Callable[..., Callable[[Any], Any]]


@dataclass(frozen=True)
class Batch:
    """What a run builds.

    Attributes:
        models: the resolved configs, by model name.
        refused: the reason why a config can't be built, in one line, by config file.
        listed: whether the models come from a list.
        files: the config file of each model in the list, by model name.
        rules: the name that the run of this job gives to the rule of the split step, by model name.
    """

    models: Mapping[str, Config]
    refused: Mapping[str, str] = field(default_factory=dict)
    listed: bool = False
    files: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)

    @property
    def refusals(self) -> dict[str, str]:
        """Return the lines of `refused` by distinct names that are valid as file names."""
        taken = Counter(map(_file_name, self.refused))
        return {_file_name(file, taken[_file_name(file)] > 1): line for file, line in self.refused.items()}

    def names(self, wildcard: str) -> str:
        """Return a regular expression for the values of a wildcard: "model", "part" or "point"."""
        values = {"model": {*self.models}, "part": set[str](), "point": set[str]()}
        for config in self.models.values():
            values["part"] |= {*config.parts}
            values["point"] |= {*config.points}
        return any_of(values[wildcard])


@dataclass(frozen=True)
class Told:
    """Attributes of `Batch` that a run saves for the Snakemake processes of its jobs; empty if it could not."""

    refused: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)


def _file_name(path: str, taken: bool = False) -> str:
    """Return a path as a valid file name, with room for `.log`; with a digest if another path has the same name."""
    name = re.sub(r"[^\w.-]", "_", path)
    return f"{digest(path)[:16]}_{name[-KEPT:]}" if taken or len(os.fsencode(name)) > LONGEST else name


def any_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches any of the names; if `names` is empty, it matches nothing."""
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
        content: the content of the batch config.
        name: the prefix of error messages.
        read: checks and resolves the content of a config, given its file's name; may raise ConfigError.
        told: the findings of this job's run; a config that the run refused is refused without reading it again.
        wanted: the only models to read, if the run saved their config files; None for all.

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
            config = read(read_yaml(file), str(file))
            if config.model in models:
                raise ConfigError(f"{file}: another config of the batch is called {config.model}, too; rename one")
            models[config.model], files[config.model] = config, file.as_posix()
        except Exception as error:  # a library may raise any error: the other models can be built
            unforeseen = "" if isinstance(error, ConfigError) else f"{file}: {type(error).__name__}: "
            refused[file.as_posix()] = unforeseen + one_line(error)
    fresh = [line for file, line in refused.items() if file not in told.refused]
    if not models and fresh:
        raise ConfigError(fresh[0])
    return Batch(models, refused, listed=True, files=files, rules=told.rules)


def tell_jobs(batch: Batch) -> None:
    """Save the findings of a run at its start, so that the Snakemake processes of its jobs need not repeat the work.

    To find out that a config can't be built may take transformers, or a hub that does not answer. A job has neither
    the memory nor the time for this work. It also lacks them for a hundred models' configs, and needs only its own.
    """
    if not batch.listed:
        return
    rules = {model: one.rule for one in alike(batch, SPLIT) for model in one.models}
    with contextlib.suppress(OSError):  # a read-only folder: each job then reads the configs itself
        write_json(TOLD, asdict(Told(dict(batch.refused), dict(batch.files), rules)))


def told() -> Told:
    """Return the findings that the run of this job saved; empty if it could not save them."""
    try:
        content = load_json(TOLD)
        parts = (content[one.name].items() for one in fields(Told))
        return Told(*({str(key): str(value) for key, value in part} for part in parts))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return Told()


def of_jobs(command: Sequence[str]) -> set[str] | None:
    """Return the models of the jobs in a Snakemake command; None if the command does not name its jobs.

    Snakemake itself tells which jobs it has to do only after it has read the rules.
    """
    if TARGETS not in command:
        return None
    jobs = takewhile(lambda word: not word.startswith("--"), command[[*command].index(TARGETS) + 1 :])
    return {match[1] for job in jobs if (match := OF_MODEL.search(job))}


def _files(content: Mapping[str, Any], name: str) -> list[Path]:
    """Return the config files that a batch lists, each once."""
    patterns = content[KEY]
    if set(content) != {KEY} or not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
        raise ConfigError(f"{name}: batch: expected a list of config files and no other key")
    configs: list[Path] = []
    for pattern in patterns:
        here = next((files for root in (Path(), workflow_root()) if (files := _matching(root, pattern))), None)
        if here is None:
            raise ConfigError(f"{name}: batch: {pattern}: no such file")
        configs += here
    if not configs:
        raise ConfigError(f"{name}: batch: lists no config")
    return list(dict.fromkeys(configs))


def _matching(root: Path, pattern: str) -> list[Path]:
    """Return the files that match a pattern, sorted; empty if the pattern is invalid."""
    path = Path(pattern)
    if path.is_absolute():
        root, path = Path(path.anchor), path.relative_to(path.anchor)
    try:
        return sorted(file for file in root.glob(str(path)) if file.is_file())
    except (ValueError, LookupError, NotImplementedError, OSError):
        return []


def of(batch: Batch) -> Of:
    """Return a function for rules that applies another function to the config of a job's model."""

    @cache
    def known(model: str, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        return function(*arguments, batch.models[model])

    def own(function: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
        return lambda wildcards: known(wildcards.model, function, arguments)

    return own


def parts_of(batch: Batch) -> Of:
    """Return a function for rules that gives a path for every part of a job's model, and for further names."""

    def own(template: str, *more: str) -> Callable[[Any], list[str]]:
        def paths(wildcards: Any) -> list[str]:
            names = (*batch.models[wildcards.model].parts, *more)
            return [template.replace("{part}", part) for part in names]  # Snakemake fills in the other wildcards

        return paths

    return own


def together(*inputs: str | Iterable[str] | Callable[[Any], Iterable[str]]) -> Callable[[Any], list[str]]:
    """Return a function for rules that joins paths, lists and results of the functions above to one input."""

    def paths(wildcards: Any) -> list[str]:
        lists = [[one] if isinstance(one, str) else one(wildcards) if callable(one) else one for one in inputs]
        return [path for each in lists for path in each]

    return paths


@dataclass(frozen=True)
class Alike:
    """Models whose parts have the same names, so that one rule can list the outputs for each part."""

    rule: str
    parts: tuple[str, ...]
    models: tuple[str, ...]


def alike(batch: Batch, rule: str) -> list[Alike]:
    """Return the models, grouped by their parts.

    The first group's rule is called `rule`, unless the run of this job has given it another name.
    """
    by_parts: dict[tuple[str, ...], list[str]] = {}
    for model, config in batch.models.items():
        by_parts.setdefault(config.parts, []).append(model)
    return [
        Alike(batch.rules.get(models[0]) or (f"{rule}_{number}" if number else rule), parts, tuple(models))
        for number, (parts, models) in enumerate(by_parts.items())
    ]


LIMIT = 400  # characters of the line in a job's log that says why the job failed


def sum_up(batch: Batch, workflow: Any) -> None:
    """Write build/index.html and print which models were not built, if this is a batch and its files lie in build/."""
    if not batch.listed or storage.is_used(workflow):
        return
    # Slow to import, and only needed here.
    from shardmill.report.index import NOT_FINISHED, PAGE, BuildRow, read_row, write_index

    broken = _broken(workflow)
    rows = []
    for model in sorted(batch.models):
        failed = _why(broken[model]) or NOT_FINISHED if model in broken else ""
        build = BUILDS / model
        rows.append(BuildRow(model, failed) if failed else read_row(build, _why(build.glob("logs/*.log"))))
    rows += [BuildRow(file, line.removeprefix(f"{file}: ")) for file, line in sorted(batch.refused.items())]
    write_index(BUILDS, rows)
    for row in rows:
        if row.error not in ("", NOT_FINISHED):
            print(f"shardmill: not built: {row.name}: {row.error}", file=sys.stderr)
    finished = sum(not row.error for row in rows)
    print(f"shardmill: {finished} of {len(rows)} models are finished, see {BUILDS / PAGE}", file=sys.stderr)


def _broken(workflow: Any) -> dict[str, list[Path]]:
    """Return the logs of the jobs that this run had to do but has not done, by model.

    Files in such a model's folder may be left from an earlier run: a page, say, although a measurement failed now.
    """
    logs: dict[str, list[Path]] = {}
    for job in workflow.dag.needrun_jobs():
        if "model" in job.wildcards_dict:
            logs.setdefault(job.wildcards_dict["model"], []).extend(map(Path, job.log))
    return logs


def _why(logs: Iterable[Path]) -> str:
    """Return the error in the log of a failed job, in the latest of several such logs; empty if no log has an error."""
    present = [log for log in logs if log.is_file()]
    for log in sorted(present, key=lambda log: log.stat().st_mtime, reverse=True):
        said = error_in(log)
        if said:
            return printable(f"{log.stem}: {said}", LIMIT)
    return ""
