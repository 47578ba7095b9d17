"""What of the config a step is given: its settings, as plain data, and the files that the config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import machine
from shardmill.errors import ConfigError
from shardmill.evidence.build import evidence_files
from shardmill.files import is_left_by_macos, parse_json
from shardmill.forms.form import INT4, INT8
from shardmill.forms.recipe import RULES, SEARCH

if TYPE_CHECKING:
    from shardmill.config import Benchmark, Config


def settings(config: Config) -> dict[str, Any]:
    """The config as plain data, as Snakemake compares and passes parameters."""
    from pydantic import TypeAdapter

    plain: dict[str, Any] = parse_json(TypeAdapter(type(config)).dump_json(config))
    return plain


def section(name: str, config: Config) -> Any:
    """A section of the config as plain data."""
    return settings(config)[name]


def option(name: str, config: Config) -> Any:
    """What the config says at a dotted name."""
    return reduce(getattr, name.split("."), config)


def engine(config: Config) -> dict[str, str]:
    """Return the engine that loads programs here, so that steps that load them run again after it has changed."""
    return machine.engine()


def split_settings(config: Config) -> dict[str, Any]:
    """What of the config decides the plan: other settings must not make anything again."""
    return {name: value for name, value in settings(config).items() if name not in ("parity", "benchmark", "witness")}


def source_files(config: Config) -> list[str]:
    """Files of a local checkpoint, so that Snakemake sees them change; none for one on the hub."""
    if config.source.path is None:
        return []
    files = (file for file in Path(config.source.path).iterdir() if file.is_file())
    return sorted(str(file) for file in files if not is_left_by_macos(file))


def recipe_files(config: Config) -> list[str]:
    """The file that says which form each matrix has, if one does."""
    precision = config.convert.precision
    return [] if precision in RULES else [precision]


def parity_text(config: Config) -> str:
    """The text that the parity gates are fed with."""
    return config.parity.text


def calibrates(config: Config) -> bool:
    """Whether codes are fitted to a text."""
    return config.convert.calibration is not None


def searches(config: Config) -> bool:
    """Whether forms are searched for."""
    return config.convert.precision == SEARCH


def witnesses(config: Config) -> bool:
    """Return whether Apple's Core AI runtime computes every part too."""
    return config.witness


def witness_runtime(config: Config) -> dict[str, str]:
    """Return the Core AI runtime that is installed here; empty if the config does not ask for it."""
    from shardmill.witness import installed

    return installed.runtime() if config.witness else {}


def calibration_files(config: Config) -> list[str]:
    """The calibration text, if there is one."""
    return [config.convert.calibration.text] if config.convert.calibration else []


# What provenance names with its hash, by the inputs of its step.
NAMED: Mapping[str, Callable[[Config], str | list[str]]] = {
    "text": parity_text,
    "calibration": calibration_files,
    "recipe": recipe_files,
}


def calibration_settings(config: Config) -> dict[str, Any] | None:
    """The config's `convert.calibration`."""
    found: dict[str, Any] | None = settings(config)["convert"]["calibration"]
    return found


def search_settings(config: Config) -> dict[str, Any] | None:
    """What the search is told: its budget, the forms that it may take, and how many points are to be measured."""
    if not searches(config):
        return None
    found, search = settings(config)["convert"], config.convert.search
    return {"budget": found["budget"], "forms": list(search.forms), "measured": search.measured}


def coded_forms(config: Config) -> list[str]:
    """Forms that codes are made of besides INT4, which always has some."""
    return [name for name in config.convert.search.forms if name not in (INT4, INT8)] if searches(config) else []


def measures(config: Config) -> bool:
    """Whether points of the front are measured."""
    return bool(config.points)


def measured_settings(config: Config) -> dict[str, Any] | None:
    """Which windows of the calibration text they are measured on."""
    known = calibration_settings(config)
    return known and {"window": known["window"], "held": known["held"], "windows": config.convert.search.windows}


def evidence(config: Config) -> list[str]:
    """What was measured of the build elsewhere and imported: no step makes it, and there may be none."""
    return [str(file) for file in evidence_files(Path("build") / config.model)]


def benchmarks(config: Config) -> bool:
    """Return whether a build measures its speed."""
    return config.benchmark is not False


def benchmark_text(config: Config) -> str:
    """Return the file with the text of the benchmark's prompts. Raise ConfigError if the config has no benchmark."""
    return _benchmark(config).text


def task_files(config: Config) -> list[str]:
    """Return the benchmark's prompt files, so that Snakemake sees changes. Raise ConfigError if there is none."""
    found = _benchmark(config)
    folder, tasks = Path(found.task_prompts), found.tasks
    return sorted(str(file) for task in tasks for file in (folder / task).glob("*.txt"))


def _benchmark(config: Config) -> Benchmark:
    if config.benchmark is False:
        raise ConfigError(f"{config.model}: its config has `benchmark: false`; remove that to measure its speed")
    return config.benchmark
