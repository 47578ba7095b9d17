"""Compilation that copies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def compile_model(source: str, target: str) -> str:
    """A copy of the package."""
    shutil.copytree(source, target)
    return target


def functions(package: Path) -> dict[str, Any]:
    """The operations of each function of its program."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / "Data/com.apple.CoreML/model.mlmodel").read_bytes())
    found = spec.mlProgram.functions
    return {name: one.block_specializations[one.opset].operations for name, one in found.items()}
