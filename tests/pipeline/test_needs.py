"""The table of what steps need: its rows are of the rules' steps, and name the packages that a step's code imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from shardmill.errors import ShardmillError
from shardmill.pipeline import code_digest
from shardmill.pipeline.code_digest import OURS, normalized
from shardmill.pipeline.needs import STEPS, step_of
from shardmill.witness import installed

NOT_KEPT = {"fetch", "manifest", "provenance", "report"}  # whose results have no key


@pytest.mark.parametrize(
    ("rule", "step"),
    [("split_12", "split"), ("parity", "parity"), ("parity_stack", "parity_stack"), ("theirs_convert", "convert")],
)
def test_a_rule_has_the_name_of_its_step(rule: str, step: str) -> None:
    """But for a number, of a batch, and what a workflow puts before it that has this one as a module."""
    assert step_of(rule) == step
    with pytest.raises(ShardmillError, match="mine: a rule has the name of its step"):
        step_of("mine")


@pytest.mark.parametrize("name", STEPS)
def test_no_step_stands_on_what_stands_on_it(name: str) -> None:
    """Nor on commands, whose options and help have no part in a result."""
    reached = code_digest.closure(code_digest.modules(STEPS[name]), "phi3")
    judges = ("needs", "made", "planned", "job", "why", "snakefile", "cache.store", "code_digest")
    above = [f"shardmill.pipeline.{module}" for module in judges]
    assert all(map(code_digest.module_file, above)), "a module of this list is not there"
    assert [m for m in reached if m in above or m.startswith(("shardmill.commands", "shardmill.cli"))] == []


@pytest.mark.parametrize("name", STEPS)
def test_every_module_that_a_row_names_is_there(name: str) -> None:
    assert all(code_digest.module_file(module) for module in code_digest.modules(STEPS[name]))


# Packages that the code of a step imports and that can't change a byte of its result.
HARMLESS = {
    "split": {
        "coremltools": "runs programs, as the two below",
        "protobuf": "see coremltools",
        "torch": "see coremltools",
        "numpy": "finds NaN and Inf",
        "pydantic": "checks settings, which are in the key as they are",
        "PyYAML": "reads config files, for commands",
    },
    "precision": {"numpy": "computes a recurrence's triangles, which have no form"},
    "compile": {
        "jsonschema": "checks model.json of finished builds",
        "numpy": "runs programs",
        "torch": "runs programs",
    },
    "parity": {
        "jsonschema": "checks model.json of finished builds",
        "tokenizers": "the text, which reference reads",
    },
    "witness": {
        "jsonschema": "checks model.json of finished builds",
        "tokenizers": "the text, which reference reads",
    },
    "expected": {
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
    },
    "predicted": {
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "tokenizers": "the text, which reference reads",
    },
    "parity_stack": {
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "tokenizers": "the text, which reference reads",
    },
    "benchmark": {
        "Jinja2": "variables of chat templates, which no benchmark sets",
        "jsonschema": "checks model.json of finished builds",
        "llguidance": "answers in a grammar",
        "prometheus_client": "counts requests",
        "python-multipart": "forms with sounds, which no benchmark sends",
        "PyYAML": "reads config files, for commands",
        "rich": "progress bars",
        "scipy": "sounds",
        "soundfile": "sounds",
        "transformers": "config.json, which split reads",
    },
}


@pytest.mark.parametrize("name", sorted(STEPS.keys() - NOT_KEPT))
def test_the_packages_that_a_step_names_are_those_that_its_code_imports(name: str) -> None:
    step = STEPS[name]
    found = set(imported(code_digest.closure(code_digest.modules(step), "phi3")))
    assert set(step.packages) & set(HARMLESS.get(name, {})) == set()
    assert {*step.packages, *HARMLESS.get(name, {})} == found


def test_keys_of_packages_and_tables_take_any_build_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are the same, so the keys must be. What is measured counts for the build that measured it."""
    monkeypatch.setattr(code_digest, "package_versions", lambda names: dict.fromkeys(names, "9.1+cpu"))
    found = {name: code_digest.versions(step) for name, step in STEPS.items() if "torch" in step.packages}
    short = {name for name, versions in found.items() if versions["torch"] == "9.1"}
    assert short == {"convert", "embedding"}
    rest = {version for versions in found.values() for name, version in versions.items() if name != "torch"}
    assert {versions["torch"] for name, versions in found.items() if name not in short} == rest == {"9.1+cpu"}


def imported(modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the distributions that modules import."""
    for file in modules.values():
        yield from distributions(file)


@cache
def distributions(file: Path) -> tuple[str, ...]:
    """Return the distributions that a module imports."""
    tops: set[str] = set()
    for node in ast.walk(normalized(ast.parse(file.read_text()))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        tops |= {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - set(OURS)
        tops |= {"google" for name in names if name.startswith("coremltools.proto")}  # which are classes of protobuf
    tops -= installed.PACKAGES.keys()  # an extra; its versions are a parameter of the one step that runs it
    return tuple(by_package()[top][0] for top in tops)


by_package = cache(packages_distributions)
