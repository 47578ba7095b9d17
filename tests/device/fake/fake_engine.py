"""What `--engine fake_engine` installs: nothing, for the fake coremltools is there already."""

from __future__ import annotations


def install(precision: str) -> bool:
    """As an engine for measure.py has it."""
    return precision == "fp16"
