"""Exports a model of transformers as a Core ML program: torch.export, preparation of the graph, conversion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.torch import ops as frontend
from coremltools.converters.mil.frontend.torch.torch_op_registry import _TORCH_OPS_REGISTRY
from torch import Tensor
from torch.export import ExportedProgram
from transformers.exporters.auto import EXPORT_BACKENDS, get_exporter_class, register_backend
from transformers.exporters.base import ExportedModel
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.metadata import ExportMetadata, record_output_structure
from transformers.exporters.utils import apply_patches, get_leaf_tensors, patch_model_outputs

from transformers_coreml.graph import named, prepared, run_time_inputs, within_half
from transformers_coreml.runner import FROZEN, CoreMLRunner, feature_name

FORMAT = "coreml"
FP16, FP32 = "fp16", "fp32"
# Inputs that say of which size others are: a program of fixed shapes holds for one value of them.
SIZES = ("grid_thw", "image_grid_thw", "video_grid_thw", "image_sizes", "spatial_shapes", "target_sizes")
MOST = 4096  # elements of a frozen input whose value is kept, so that another one is refused at run time


@dataclass
class CoreMLConfig(DynamoConfig):  # type: ignore[misc]
    """What to export; see DynamoConfig for `dynamic_shapes` and `strict`.

    Attributes:
        precision: "fp16", in which the Neural Engine computes, or "fp32". Inputs and outputs have it, too.
        constants: inputs that are frozen to the sample's values. Inputs that say of which size others are, and what
            transformers computes from them, always are.
        target: the oldest system that runs the program, a member of `coremltools.target`.
    """

    export_format: Any = FORMAT
    precision: str = FP16
    constants: tuple[str, ...] = ()
    target: str = "iOS18"

    def __post_init__(self) -> None:
        """Refuse what can't be exported. Raises ValueError."""
        if self.precision not in (FP16, FP32):
            raise ValueError(f"precision is {self.precision!r}, must be {FP16!r} or {FP32!r}")
        if not hasattr(ct.target, self.target):
            raise ValueError(f"target is {self.target!r}, must be one of {', '.join(ct.target.__members__)}")
        if self.dynamic and self.dynamic_shapes is None:
            raise ValueError(
                "`dynamic=True` makes each size any number from 2 on, which no Neural Engine takes; state the sizes "
                "that vary: dynamic_shapes={'input_ids': {1: torch.export.Dim('length', min=1, max=128)}}"
            )
        if self.quantizer is not None:
            raise ValueError("`quantizer` is not supported; compress the program with coremltools.optimize.coreml")


class CoreMLExporter(DynamoExporter):  # type: ignore[misc]
    """Exports a model as an ML program, whose shapes are the sample's unless `dynamic_shapes` states others."""

    export_format: Any = FORMAT
    config_class = CoreMLConfig
    program_suffix = ".mlpackage"
    required_packages = ["torch", "coremltools"]
    tested_versions = {"torch": "2.13.0", "coremltools": "9.0"}
    requires_trust_remote_code = False  # transformers 5.24 asks: loading a program runs no code of its author

    def export_program(
        self, model: Any, sample_inputs: MutableMapping[str, Any], config: Any
    ) -> tuple[ct.models.MLModel, ExportMetadata]:
        """Export one graph; see transformers' base class.

        Args:
            model: a model of transformers, in eval mode.
            sample_inputs: the arguments of its forward by name; what transformers computes from them is added.
            config: a CoreMLConfig.

        Returns:
            The program, whose inputs and outputs are called like the model's, and what the runner needs.

        Raises:
            ValueError: a frozen input is not among the sample's, or the program would hold for some sizes only.
        """
        unknown = sorted(set(config.constants) - set(sample_inputs))
        if unknown:
            raise ValueError(f"constants: the sample has no input {unknown[0]!r}; it has {', '.join(sample_inputs)}")
        passed = set(sample_inputs)
        with apply_patches(FORMAT), patch_model_outputs(model) as (paths, outputs, traced):
            program, metadata = super().export_program(model, sample_inputs, config)
        record_output_structure(metadata, traced[-1])
        made = set(sample_inputs) - passed
        frozen = {*config.constants, *made, *(name for name in SIZES if name in passed)}
        leaves = get_leaf_tensors(sample_inputs)
        of_path = dict(zip(_placeholders(program), [path for path in paths if path in leaves], strict=True))
        values = {node: leaves[path] for node, path in of_path.items() if path.partition(".")[0] in frozen}
        program = prepared(program, values)
        read = {node: path for node, path in of_path.items() if node in run_time_inputs(program)}
        named(program, {node: feature_name(path) for node, path in read.items()})
        if config.precision == FP16:
            within_half(program)
        names = [f"output_{name}" if name in read.values() else name for name in outputs]
        mlmodel = _converted(program, names, config)
        fixed = {name: sample_inputs[name] for name in sorted(frozen & passed)}
        mlmodel.user_defined_metadata[FROZEN] = json.dumps(
            {
                name: value.tolist()
                for name, value in fixed.items()
                if isinstance(value, Tensor) and value.numel() <= MOST
            }
        )
        return mlmodel, metadata

    @classmethod
    def save_program(cls, program: ct.models.MLModel, path: str | Path) -> None:
        """Write the package; one of this name in the folder that it will be moved to is removed."""
        path = Path(path)
        program.save(str(path))
        for name in cls.program_files(path.name):  # a program without large constants has no file of weights
            file = path.parent / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        shutil.rmtree(path.parent.parent / path.name, ignore_errors=True)

    @classmethod
    def program_files(cls, filename: str) -> list[str]:
        """Return the files of a package."""
        data = f"{filename}/Data/com.apple.CoreML"
        return [f"{filename}/Manifest.json", f"{data}/model.mlmodel", f"{data}/weights/weight.bin"]

    @classmethod
    def load_program(cls, path: str | Path) -> ct.models.MLModel:
        """Read a package; the runner loads it."""
        return ct.models.MLModel(str(path), skip_model_load=True)


def export_model(model: Any, inputs: Mapping[str, Any], backend: str = FORMAT, **settings: Any) -> ExportedModel:
    """Export a model as one graph by any backend of transformers.

    Args:
        model: a model of transformers.
        inputs: the arguments of its forward by name.
        backend: the format.
        settings: fields of the backend's config, of CoreMLConfig for "coreml".
    """
    exporter = get_exporter_class(backend)()
    return exporter.export(model, dict(inputs), exporter.config_class(**settings))


def register() -> None:
    """Register the format, unless it is."""
    if FORMAT not in EXPORT_BACKENDS:
        register_backend(CoreMLExporter, CoreMLRunner)


def _placeholders(program: ExportedProgram) -> list[str]:
    """Return the placeholders of the inputs that are tensors, in the order of the sample's leaves."""
    values = {node.name: node.meta.get("val") for node in program.graph_module.graph.nodes if node.op == "placeholder"}
    return [name for name in run_time_inputs(program) if isinstance(values[name], Tensor)]


def _converted(program: ExportedProgram, outputs: list[str], config: CoreMLConfig) -> ct.models.MLModel:
    half = config.precision == FP16
    with _integer_floor_division():
        return ct.convert(
            program,
            inputs=_types(program, half),
            outputs=[ct.TensorType(name=feature_name(name)) for name in outputs],
            minimum_deployment_target=getattr(ct.target, config.target),
            compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
            skip_model_load=True,
        )


def _types(program: ExportedProgram, half: bool) -> list[ct.TensorType] | None:
    """Declare the inputs, which coremltools would keep in fp32; None if a size varies, since it knows the bounds."""
    read, types = {*run_time_inputs(program)}, []
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder" and node.name in read:
            value = node.meta["val"]
            numbers = np.float16 if half else np.float32
            kind = numbers if value.is_floating_point() else np.int32
            if any(not isinstance(size, int) for size in value.shape):
                return None
            types.append(ct.TensorType(node.name, tuple(value.shape) or (1,), dtype=kind))
    return types


@contextmanager
def _integer_floor_division() -> Iterator[None]:
    """Let coremltools keep whole quotients whole: 9.0 casts each one to fp32, also one that becomes a size."""
    functions = _TORCH_OPS_REGISTRY.name_to_func_mapping
    former = functions["floordiv"]

    def floordiv(context: Any, node: Any) -> None:
        x, y = frontend.promote_input_dtypes(frontend._get_inputs(context, node, expected=2))
        context.add(mb.floor_div(x=x, y=y, name=node.name))

    functions["floordiv"] = floordiv
    try:
        yield
    finally:
        functions["floordiv"] = former
