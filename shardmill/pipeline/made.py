"""How a rule names what other rules make, and lists of what several rules make.

Rules are given as files of rules have them (`rules.convert`) or as `workflow.rules` holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from shardmill.config import Config
from shardmill.pipeline.batch import Batch, together
from shardmill.pipeline.job import BESIDE, OWN, WAITS
from shardmill.pipeline.needs import STEPS, step_of

SCRIPT = "../scripts/step.py"  # of all rules that do a step
Paths = Callable[[Any], list[str]]


def made_by(batch: Batch, *made: Any, every: str = "", after: Iterable[Any] = ()) -> dict[str, Any]:
    """Return a rule's inputs from other rules: their outputs, by the outputs' names.

    The job waits for the outputs' receipts. Snakemake does not look at the times of the outputs themselves: a file that
    came out the same must not run a job again.

    Args:
        batch: the models of the run.
        made: the rules. `perhaps(rule)` gives lists, which are empty in a build that lacks the rule.
        every: "part" gives lists of the outputs for all parts, under names in the plural. Otherwise a job gets the
            output for its own part.
        after: further rules for whose receipts the job waits.
    """
    from snakemake.io import ancient

    inputs: dict[str, Any] = {}
    receipts: list[Any] = []
    for one in made:
        rule, optional = (one[0], True) if isinstance(one, tuple) else (one, False)
        for name, path in outputs(rule).items():
            several = f"{{{every}}}" in path
            paths = _paths(batch, rule, path, every) if several or optional else path
            if name == OWN:
                receipts.append(paths)
            else:
                inputs[f"{name.removesuffix('s')}s" if several else name] = ancient(paths)
    receipts += [receipts_of(batch, *after)] if after else []
    return inputs | ({WAITS: together(*receipts)} if receipts else {})


def perhaps(rule: Any) -> tuple[Any]:
    """Mark a rule that not every build has, for `made_by`."""
    return (rule,)


def files_of(batch: Batch, *made: Any) -> Paths:
    """Return a function for rules that gives what rules make of all parts and points, without receipts."""
    return _listed(batch, made, lambda name: name not in (OWN, BESIDE))


def receipts_of(batch: Batch, *made: Any) -> Paths:
    """Return a function for rules that gives the receipts of what rules make of all parts and points."""
    return _listed(batch, made, lambda name: name == OWN)


def verdict(path: str, step: str, part: str = "{part}") -> Any:
    """Return a gate's output, the file with its numbers, which Snakemake's own report shows, too."""
    from snakemake.io import report

    shown = {"category": "Gates", "subcategory": step.partition("_")[0], "labels": {"part": part}}
    return report(path, caption=f"../report/{step}.rst", **shown)


def of_steps(workflow: Any) -> list[Any]:
    """Return the rules so far that do steps; a workflow that has this one as a module has others, too."""
    return [rule for rule in workflow.rules if rule.script == SCRIPT and outputs(rule)]


def gates(workflow: Any) -> list[Any]:
    """Return the rules so far that may fail because of the numbers that they measure."""
    return [rule for rule in of_steps(workflow) if "verdict" in outputs(rule)]


def of_the_model(workflow: Any) -> list[Any]:
    """Return the rules so far whose results model.json covers: the store keeps them, and no rule is an `aside`."""
    return [rule for rule in of_steps(workflow) if OWN in outputs(rule) and "aside" not in dict(rule.params.items())]


def outputs(rule: Any) -> dict[str, Any]:
    """Return a rule's outputs by name, as its file of rules writes them: a path with wildcards, or a list of paths."""
    written = getattr(rule, "rule", rule).ruleinfo.output
    paths = written.kwpaths if written else {}
    return {name: path if isinstance(path, list) else str(path) for name, path in paths.items()}


def each(rule: Any) -> str:
    """Return the wildcard of a rule with a job for each of its values, "part" or "point"; empty if it has one job."""
    return next((name for name in ("part", "point") if f"{{{name}}}" in str(outputs(rule))), "")


def values(config: Config, wildcard: str) -> tuple[str, ...]:
    """Return the values of a wildcard in a build."""
    return {"part": config.parts, "point": config.points}[wildcard]


def has(config: Config, rule: Any) -> bool:
    """Return whether a build has the jobs of a rule."""
    wanted = STEPS[step_of(rule.name)].wanted
    return wanted is None or wanted(config)


def _paths(batch: Batch, rule: Any, path: str | list[str], wildcard: str) -> Paths:
    """Return a function for rules that gives an output for all values of a wildcard; for none if a build lacks it."""

    def paths(wildcards: Any) -> list[str]:
        config = batch.models[wildcards.model]
        return expanded(path, config, wildcard) if has(config, getattr(rule, "rule", rule)) else []

    return paths


def expanded(files: str | list[str], config: Config, wildcard: str) -> list[str]:
    """Return an output's paths for all values of a wildcard in a build."""
    if isinstance(files, list) or f"{{{wildcard}}}" not in files:
        return [files] if isinstance(files, str) else files
    return [files.replace(f"{{{wildcard}}}", value) for value in values(config, wildcard)]


def _listed(batch: Batch, made: Iterable[Any], wanted: Callable[[str], bool]) -> Paths:
    """Return a function for rules that gives outputs of the wanted names, each once: a batch has several `split`s."""
    of_rules = [
        _paths(batch, rule, path, each(rule)) for rule in made for name, path in outputs(rule).items() if wanted(name)
    ]
    return lambda wildcards: [*dict.fromkeys(path for paths in of_rules for path in paths(wildcards))]
