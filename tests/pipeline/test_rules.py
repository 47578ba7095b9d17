"""The rules, as Snakemake reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from snakemake.linting.rules import RuleLinter
from snakemake.linting.snakefiles import SnakefileLinter

from . import workflows

# Jobs run where Snakemake itself runs, which needs shardmill to read the Snakefile.
UNWANTED = "Specify a conda environment or container for each rule."


def test_snakemake_s_linter_has_no_other_wish_than_an_environment_for_each_rule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `snakemake --lint` does."""
    monkeypatch.chdir(workflows.SNAKEFILE.parent)
    workflow = workflows.read(Path("configs/demo.yaml"))
    made = [rule for rule in workflow.rules if rule.output]
    wishes, _ = RuleLinter(workflow, made).lint(json=True)
    assert {lint["title"] for rule in wishes for lint in rule["lints"]} == {UNWANTED}
    assert SnakefileLinter(workflow, workflow.included).lint(json=True) == ([], False)
