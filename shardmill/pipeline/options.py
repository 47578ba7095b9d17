"""What rules ask of a model's config: settings, and files outside of the build."""

from __future__ import annotations

from dataclasses import asdict
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from shardmill import machine
from shardmill.errors import ConfigError
from shardmill.evidence.folder import evidence_files
from shardmill.files import is_left_by_macos, parse_json
from shardmill.forms.form import INT4, INT8
from shardmill.forms.recipe import RULES, SEARCH

if TYPE_CHECKING:
    from shardmill.config import Benchmark, Config, Source
    from shardmill.config.model import LockedSource


def settings(config: Config) -> dict[str, Any]:
    """Return the config as plain data, as Snakemake compares and passes parameters."""
    from pydantic import TypeAdapter

    plain: dict[str, Any] = parse_json(TypeAdapter(type(config)).dump_json(config))
    return plain


def section(name: str, config: Config) -> Any:
    """Return a section of the config as plain data."""
    return settings(config)[name]


def option(name: str, config: Config) -> Any:
    """Return the config's value at a dotted name."""
    return reduce(getattr, name.split("."), config)


def named_systems(config: Config) -> list[str]:
    """Return the systems that the config names; empty if it is for all that are known."""
    return list(config.systems) if config.program.runs_on else []


def device_limits(config: Config) -> list[dict[str, Any]]:
    """Return the limits that devices answered for the config's systems, as plain data."""
    from portable_coreml.judge.limits import heeded

    every = [asdict(limit) for limit in heeded() if {*limit.systems} & {*config.systems}]
    return [{key: list(each) if isinstance(each, tuple) else each for key, each in one.items()} for one in every]


def engine(config: Config) -> dict[str, str]:
    """Return the engine that loads programs here, so that steps that load programs rerun if the engine changes."""
    return machine.engine()


def locked(config: Config) -> list[list[list[Any]] | None]:
    """Return what locks say of the checkpoints' files: of the model's, then of a drafter's; None without a lock."""
    return [[[*row] for row in source.files] if is_locked(source) else None for source in config.sources]


def lock_names(config: Config) -> list[dict[str, str] | None]:
    """Return the name of each checkpoint's lock and the revision that was asked, for the record; None without one."""
    return [{"lock": Path(s.lock).name, "revision": s.asked} if is_locked(s) else None for s in config.sources]


def is_locked(source: Source) -> TypeGuard[LockedSource]:
    """Return whether a source's commit comes from a lock."""
    from shardmill.config.model import LockedSource

    return isinstance(source, LockedSource)


def split_settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide the plan: a change of another setting must not rerun the step."""
    others = ("parity", "benchmark", "witness", "predict")
    return {name: value for name, value in settings(config).items() if name not in others}


def source_files(config: Config) -> list[str]:
    """Return the files of local checkpoints and of an adapter to merge, so that Snakemake sees changes."""
    folders = [Path(path) for source in config.sources for path in (source.path, source.adapter) if path is not None]
    files = (file for folder in folders for file in folder.iterdir() if file.is_file())
    return sorted(str(file) for file in files if not is_left_by_macos(file))


def recipe_files(config: Config) -> list[str]:
    """Return the file with the form of each matrix, if the config names a file."""
    precision = config.convert.precision
    return [] if precision in RULES else [precision]


def tower_form(config: Config) -> str:
    """Return the form of a tower's matrices; "" for a build of text alone."""
    return config.tower.form if config.tower else ""


def calibrates(config: Config) -> bool:
    """Return whether codes are fitted to a text."""
    return config.convert.calibration is not None


def searches(config: Config) -> bool:
    """Return whether the build searches for forms."""
    return config.convert.precision == SEARCH


def witnesses(config: Config) -> bool:
    """Return whether Apple's Core AI runtime computes every part too."""
    return config.witness


def witness_runtime(config: Config) -> dict[str, str]:
    """Return the Core AI runtime that is installed here; empty if the config does not ask for it."""
    from shardmill.witness import installed

    return installed.runtime() if config.witness else {}


def predicts(config: Config) -> bool:
    """Return whether the build predicts the cost of the Neural Engine's arithmetic, which takes the portable engine."""
    return bool(config.predict) and machine.is_portable()


def predicted_precisions(config: Config) -> list[str]:
    """Return the precisions of the portable engine that predict the Neural Engine's arithmetic."""
    return list(config.predict)


def calibration_files(config: Config) -> list[str]:
    """Return the calibration text, if there is one."""
    return [config.convert.calibration.text] if config.convert.calibration else []


def calibration_settings(config: Config) -> dict[str, Any] | None:
    """Return the config's `convert.calibration`."""
    calibration: dict[str, Any] | None = settings(config)["convert"]["calibration"]
    return calibration


def search_settings(config: Config) -> dict[str, Any] | None:
    """Return the search's settings: its budget, the forms that it may take, and the points to be measured."""
    if not searches(config):
        return None
    convert, search = settings(config)["convert"], config.convert.search
    return {"budget": convert["budget"], "forms": list(search.forms), "measured": search.measured}


def coded_forms(config: Config) -> list[str]:
    """Return the forms besides INT4 that get codes; INT4 always gets codes."""
    return [name for name in config.convert.search.forms if name not in (INT4, INT8)] if searches(config) else []


def measures(config: Config) -> bool:
    """Return whether points of the front are measured."""
    return bool(config.points)


def measured_settings(config: Config) -> dict[str, Any] | None:
    """Return the windows of the calibration text for measurements of points."""
    known = calibration_settings(config)
    return known and {"window": known["window"], "held": known["held"], "windows": config.convert.search.windows}


def evidence(config: Config) -> list[str]:
    """Return imported measurements from other machines: no step makes these files, and the list may be empty."""
    return [str(file) for file in evidence_files(Path("build") / config.model)]


def benchmarks(config: Config) -> bool:
    """Return whether a build measures its speed."""
    return config.benchmark is not False


def benchmark_text(config: Config) -> str:
    """Return the file with the text of the benchmark's prompts. Raise ConfigError if the config has no benchmark."""
    return _benchmark(config).text


def task_files(config: Config) -> list[str]:
    """Return the benchmark's prompt files, so that Snakemake sees changes. Raise ConfigError without a benchmark."""
    benchmark = _benchmark(config)
    folder, tasks = Path(benchmark.task_prompts), benchmark.tasks
    return sorted(str(file) for task in tasks for file in (folder / task).glob("*.txt"))


def _benchmark(config: Config) -> Benchmark:
    if config.benchmark is False:
        raise ConfigError(f"{config.model}: its config has `benchmark: false`; remove that to measure its speed")
    return config.benchmark
