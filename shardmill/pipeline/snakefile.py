"""What the Snakefile itself asks: the checked models of a run, their tools, the lists of files that rules read."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardmill import machine
from shardmill.config import Config
from shardmill.config.reading import read_yaml
from shardmill.errors import ConfigError, ShardmillError
from shardmill.evidence.folder import heed_limits
from shardmill.files import load_json
from shardmill.machine import collect_rarely
from shardmill.pipeline import code_digest, storage
from shardmill.pipeline.batch import Batch, is_batch, of_jobs, read_batch, told
from shardmill.pipeline.cache import remote
from shardmill.pipeline.cache.lock import check_free, hold_lock, join_build
from shardmill.pipeline.code_digest import RECORD, fetched_model_type, model_type_in, needs_family
from shardmill.pipeline.job import OWN
from shardmill.pipeline.locks import announce, keep, with_locks
from shardmill.pipeline.made import each, expanded, files_of, has, of_steps, outputs
from shardmill.pipeline.needs import STEPS, step_of
from shardmill.pipeline.resolve import expected, overlaps, parsed, read_corpus, resolve_config
from shardmill.pipeline.task import Tools
from shardmill.printable import one_line
from shardmill.records.names import SOURCE
from shardmill.runtime.manifest import entries
from shardmill.witness import installed


def checked(config: Mapping[str, Any], workflow: Any) -> Batch:
    """Return the models of the validated config; an error in it ends the run with one line, before any work."""
    name = ", ".join(os.path.relpath(file) for file in workflow.configfiles) or "config"
    _or_end(_refuse_moved_paths, workflow)
    _or_end(_refuse_targets, workflow.configfiles)
    _or_end(heed_limits)
    _or_end(machine.engine)  # a parameter of rules, whose errors Snakemake would show with a traceback
    try:
        # Snakemake has read the files, but merges them, and takes the last value of a key that is given twice.
        contents = {os.path.relpath(file): read_yaml(Path(file)) for file in workflow.configfiles}
        _demand_one_model(contents)
        if is_batch(config):
            collect_rarely()  # Snakemake makes many objects for each job of the plan
            return _read_batch(config, name, workflow)
        only = resolved(config, name, _file_with_source(contents), workflow.is_main_process)
        return Batch({only.model: only})
    except ConfigError as error:
        sys.exit(f"shardmill: {one_line(error)}")


BUILDS = "build"  # the folder of all builds, as the rules name it


def _refuse_moved_paths(workflow: Any) -> None:
    """Raise ConfigError where a module's `prefix:` or `replace_prefix:` moves what the rules make.

    Snakemake moves the files of rules alone. Jobs find a build's other files by their usual paths.
    """
    moved = getattr(getattr(getattr(workflow, "modifier", None), "path_modifier", None), "replace_prefix", str)
    if moved(f"{BUILDS}/") != f"{BUILDS}/":
        raise ConfigError(
            "a module of shardmill takes no prefix: or replace_prefix:; leave it out, and run Snakemake "
            "with --directory to build elsewhere"
        )


def _refuse_targets(configfiles: Iterable[str | os.PathLike[str]]) -> None:
    """Raise ConfigError for a target among the configs: --configfile takes every word up to the next option."""
    for file in configfiles:
        name = os.path.relpath(file)
        if Path(name).parts[0] == BUILDS and not name.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"{name}: taken for a config, as --configfile takes all words that follow; put targets "
                "before it, or behind --"
            )


def _read_batch(config: Mapping[str, Any], name: str, workflow: Any) -> Batch:
    """Return the models of a list that the process that begins a run needs, or one of its jobs."""
    if workflow.is_main_process:
        return read_batch(config, name, _of_batch)
    return read_batch(config, name, partial(_of_batch, may_ask=False), told(), of_jobs(sys.argv))


def _of_batch(content: Any, file: str, may_ask: bool = True) -> Config:
    return resolved(content, file, Path(file), may_ask)


def _file_with_source(contents: Mapping[str, Any]) -> Path | None:
    """Return the file whose lock is the config's: the last one that names a source, which is the one that counts."""
    named = [name for name, each in contents.items() if isinstance(each, Mapping) and "source" in each]
    return Path(named[-1]) if named else None


def _demand_one_model(contents: Mapping[str, Any]) -> None:
    """Raise ConfigError where files that would be merged to one config name several models."""
    named = {name: each["model"] for name, each in contents.items() if isinstance(each, Mapping) and "model" in each}
    if len({str(model) for model in named.values()}) > 1:
        both = " and ".join(f"{file} ({model})" for file, model in named.items())
        raise ConfigError(f"{both} are configs of different models; list them in one under batch:, see docs/many.md")


def resolved(content: Any, name: str, file: Path | None = None, may_ask: bool = True) -> Config:
    """Return one model's config, checked and resolved. Raises ConfigError.

    Args:
        content: the config.
        name: the start of an error message.
        file: the file beside which the config's lock is, if there is one.
        may_ask: whether a hub is asked for a commit that no lock says; a job never asks.
    """
    try:
        pinned = with_locks(parsed(content, name), file, name, may_ask)
        for problem in file_problems(pinned):
            raise ConfigError(f"{name}: {problem}")
        return resolve_config(pinned, name, begins=partial(_say_reading, name) if may_ask else lambda: None)
    except OSError as error:  # a folder that may not be entered, or a name that no file can have
        raise ConfigError(f"{name}: {error.filename}: {error.strerror}") from error


def _say_reading(name: str) -> None:
    """Say what the first run of a config does before it can plan, for some seconds; not where a program reads."""
    if sys.stderr.isatty():
        print(f"shardmill: reading {name} and its model's config.json", file=sys.stderr)


def file_problems(config: Config) -> list[str]:
    """Return files that a build reads, later perhaps than hours from now, and that are not there or are empty."""
    named, folders = {"parity.text": Path(config.parity.text)}, list[Path]()
    if config.benchmark:
        named["benchmark.text"] = Path(config.benchmark.text)
        folders = [Path(config.benchmark.task_prompts) / task for task in config.benchmark.tasks]
    if config.convert.calibration:
        named["convert.calibration.text"] = Path(config.convert.calibration.text)
    texts = {key: read_corpus(path) for key, path in named.items() if path.is_file()}
    problems = [f"{key}: {path} is no file with text in it" for key, path in named.items() if not texts.get(key)]
    problems += overlaps(texts)
    if config.witness and not installed.is_there():
        problems.append(f"witness: {installed.MISSING}")
    problems += [f"benchmark.tasks: {folder} holds no .txt file" for folder in folders if not any(folder.glob("*.txt"))]
    if config.source.path and not (Path(config.source.path) / "tokenizer.json").is_file():
        problems.append(f"source.path: {config.source.path} holds no tokenizer.json")
    return problems


def tools(batch: Batch, workflow: Any) -> dict[str, Tools | Callable[[Any], Tools]]:
    """Return what decides each step's result besides its inputs, see `code_digest.tools`.

    Snakemake gets the value as a parameter, so a change of the library reruns the step. Snakemake passes it on to the
    job, so Snakemake's record and the store's key agree. If the result depends on the model's family, the value is a
    function. The family is unknown only for a checkpoint on the hub that is not fetched yet and whose config was not
    resolved by config.json. The function then raises FileNotFoundError, which Snakemake records as <TBD>. If files lie
    in a storage, this process never sees a checkpoint: jobs then add the family's part.
    """

    @cache
    def known(name: str, family: str) -> Tools:
        return code_digest.tools(STEPS[name], family)

    def of_step(name: str) -> Tools | Callable[[Any], Tools]:
        if storage.is_used(workflow) or not needs_family(code_digest.modules(STEPS[name])):
            return known(name, "")
        return lambda wildcards: known(name, _family(batch.models[wildcards.model]))

    return {name: of_step(name) for name in STEPS}


def _family(config: Config) -> str:
    """Return a checkpoint's model_type, the same before it was fetched as afterwards if it can be known before.

    Raise FileNotFoundError where only the checkpoint tells, and it is not there yet.
    """
    if config.source.path is not None:
        return model_type_in(Path(config.source.path))
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not resolved by config.json, or damaged
        return str(expected(config)["model_type"])
    return fetched_model_type(Path("build") / config.model / RECORD)


def finished(batch: Batch, *made: Any) -> list[str]:
    """Return what rules make for all models, and a target that can't be made for each refused config."""
    files = files_of(batch, *made)
    paths = [path.replace("{model}", one) for one in batch.models for path in files(SimpleNamespace(model=one))]
    return paths + [f"build/refused/{name}" for name in batch.refusals]


def listed_steps(workflow: Any, config: Config) -> list[dict[str, Any]]:
    """Return the steps of a build for the report's table, in the order of the rules: name, gate or not, and files."""
    rows: dict[str, dict[str, Any]] = {}
    for rule in of_steps(workflow):
        made = outputs(rule)
        if has(config, rule):
            shown = made.get(OWN) or next(iter(made.values()))
            files = [path.removeprefix("build/{model}/") for path in expanded(shown, config, each(rule))]
            rows[step_of(rule.name)] = {"name": step_of(rule.name), "gate": "verdict" in made, "files": files}
    return [*rows.values()]


def only_build(build: str) -> None:
    """Make this run of Snakemake the only build in the folder, or end it with one line.

    A remote store that can't be used also ends the run, before any job needs the store.
    """
    _or_end(hold_lock, build)
    _or_end(remote.check_configured)


def alone(build: str, workflow: Any) -> list[str]:
    """End a run with one line before its plan is printed if `only_build` would end it afterwards.

    Asked for as an input of the rule all, as `mend` is; a run that only plans or reports may be beside a build.
    """
    if workflow.is_main_process and workflow.executor_plugin is not None and not workflow.dryrun:
        _or_end(check_free, build)
    return []


def lock(batch: Batch, workflow: Any) -> list[str]:
    """Write the commits that this run has resolved beside their configs, unless it is a dry one.

    Asked for as an input of the rule all, as `mend` is, and before the first job of a run for another target.
    """
    if workflow.is_main_process and workflow.executor_plugin is not None and not workflow.dryrun:
        _or_end(keep, batch.models.values())
    return []


def say_unlocked(batch: Batch, workflow: Any) -> None:
    """Say which commits a dry run has resolved, whatever its targets: it writes no lock."""
    if workflow.is_main_process and workflow.output_settings.dryrun:
        announce(batch.models.values())


def only_its_jobs(build: str, workflow: Any) -> None:
    """Mark a Snakemake that does a job as a job of the folder's build, or end it with one line.

    The job itself would come too late: by then Snakemake has removed what the rule makes.
    """
    if not workflow.is_main_process:
        _or_end(join_build, build)


def mend(batch: Batch, workflow: Any) -> list[str]:
    """Let this run make anew what has other sizes than model.json names: Snakemake looks at times alone.

    Other damage takes `shardmill verify` to be found, for it reads every byte. Asked for as an input of the rule all,
    while Snakemake plans; that input is empty.
    """
    builds = [] if storage.is_used(workflow) else batch.models
    damaged = [f"build/{name}/{path}" for name in builds for path in resized(Path("build") / name)]
    for path in sorted({*damaged} - workflow.dag.forcefiles):
        print(f"shardmill: {path}: is not as large as model.json says, and is made anew", file=sys.stderr)
    workflow.dag.forcefiles.update(damaged)
    return []


def resized(build: Path) -> list[str]:
    """Return the outputs of rules that hold files of other sizes than a build's model.json names, by path.

    Empty for a build that is not finished, or whose model.json can't be read.
    """
    try:
        wrong = [one["path"] for one in entries(load_json(build / "model.json")) if _size(build, one) != one["bytes"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []
    return sorted({RECORD if path.partition("/")[0] == SOURCE else path for path in wrong})


def _size(build: Path, entry: Mapping[str, Any]) -> int:
    """Return the bytes of an entry's files; a missing one has none."""
    from shardmill.records.finished import named_files  # no job needs it

    files = [build / name for name, _ in named_files(entry)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _or_end(work: Callable[..., object], *arguments: Any) -> None:
    try:
        work(*arguments)
    except (ShardmillError, OSError) as error:
        sys.exit(f"shardmill: {one_line(error)}")
