"""Snakemake's workflow object, as far as rules ask where the files of a run lie."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def kept(provider: str | None) -> Any:
    """A run whose files lie in a storage, or in build/."""
    return SimpleNamespace(storage_settings=SimpleNamespace(default_storage_provider=provider))


IN_BUILD, IN_STORAGE = kept(None), kept("s3")
