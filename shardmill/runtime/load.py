"""Loads a built model's engine and tokenizer for an interactive command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import machine
from shardmill.checkpoint.tokenizer import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from shardmill.runtime.process import EngineProcess


def load_engine(build: Path, precision: str) -> EngineProcess:
    """Load the built model in a separate process; a spinner turns on the terminal meanwhile.

    Args:
        build: folder of a finished build.
        precision: the portable engine's precision, "fp32" or "fp16"; ignored on Core ML.

    Raises:
        ShardmillError: the folder is not a finished build, or a program can't be loaded.
    """
    from rich.console import Console

    from shardmill.runtime.process import EngineProcess

    with Console(stderr=True).status(f"loading {build}"):
        return EngineProcess(build, precision)


def load_tokenizer(build: Path, manifest: Mapping[str, Any]) -> Tokenizer:
    """Load the tokenizer that the manifest names.

    Raises:
        CheckpointError: the file can't be read as a tokenizer.
    """
    return read_tokenizer(build / manifest["tokenizer"]["path"])


def engine_name(precision: str = "") -> str:
    """Return the name of the engine that runs the programs on this machine: coreml or portable.

    With a precision that emulates the Neural Engine, the name says that the result is predicted.
    """
    name = machine.engine()["name"]
    return f"{name}, {precision}: predicted" if machine.is_portable() and precision.startswith("ane") else name
