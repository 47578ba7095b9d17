"""Compilation that copies."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def compile_model(source: str, target: str) -> str:
    """A copy of the package."""
    shutil.copytree(source, target)
    return target


def operations(package: Path) -> Any:
    """Those of its program."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString((package / "Data/com.apple.CoreML/model.mlmodel").read_bytes())
    (function,) = spec.mlProgram.functions.values()
    return function.block_specializations[function.opset].operations
