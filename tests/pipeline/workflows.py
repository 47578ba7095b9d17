"""Snakemake's workflow object: the whole one that the Snakefile makes, or as far as rules ask where files lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from snakemake.api import SnakemakeApi
from snakemake.settings.types import ConfigSettings, ResourceSettings

SNAKEFILE = Path(__file__).parents[2] / "Snakefile"


def kept(provider: str | None) -> Any:
    """A run whose files lie in a storage, or in build/."""
    return SimpleNamespace(storage_settings=SimpleNamespace(default_storage_provider=provider))


IN_BUILD, IN_STORAGE = kept(None), kept("s3")


def rules(configfile: Path) -> dict[str, Any]:
    """Snakemake's rules of a config, by name, as the Snakefile gives them in the working folder."""
    return {rule.name: rule for rule in read(configfile).rules}


def read(configfile: Path) -> Any:
    """Snakemake's workflow of a config, whose Snakefile it has read in the working folder."""
    with SnakemakeApi() as api:
        found = api.workflow(
            ResourceSettings(cores=1), ConfigSettings(configfiles=[configfile]), snakefile=SNAKEFILE, workdir=Path()
        )
        return found._workflow
