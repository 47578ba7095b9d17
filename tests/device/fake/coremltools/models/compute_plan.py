"""A plan that puts every operation but constants on the Neural Engine.

Like Core ML's, as coremltools 9.0 reads it, it names the default function only.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from . import utils


class NeuralEngineDevice:
    """A device by its name alone."""


class MLComputePlan:
    """Of a copied package."""

    def __init__(self, path: Path) -> None:
        name, operations = min(utils.functions(path).items())
        found = [
            SimpleNamespace(operator_name=op.type, outputs=list(op.outputs), inputs={}, blocks=[]) for op in operations
        ]
        functions = {name: SimpleNamespace(block=SimpleNamespace(operations=found))}
        self.model_structure = SimpleNamespace(program=SimpleNamespace(functions=functions))

    @classmethod
    def load_from_path(cls, path: str, compute_units: Any) -> MLComputePlan:
        return cls(Path(path))

    def get_compute_device_usage_for_mlprogram_operation(self, op: Any) -> Any:
        if op.operator_name.startswith("const"):
            return None
        engine = NeuralEngineDevice()
        return SimpleNamespace(preferred_compute_device=engine, supported_compute_devices=[engine])
