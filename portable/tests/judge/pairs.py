"""Pairs of programs of which one operation differs, with the same names or with other names for every value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# The operation that is changed -> how the other program has it. Each is the type of the operation, or its arguments.
CHANGES: dict[str, dict[str, Any]] = {
    "stem": {"kernel": 1.01},
    "act": {"kind": "gelu"},
    "norm": {"epsilon": 1e-2},
    "scaled": {"y": np.float32(0.3)},
    "turned": {"perm": [0, 1, 2, 3]},
    "product": {"transpose_y": True},
    "weights": {"axis": -2},
    "bounded": {"beta": np.float32(0.3)},
    "padded": {"constant_val": np.float32(0.5)},
    "cut": {"begin": [0, 0, 1, 1]},
    "pooled": {"kind": "reduce_max"},
    "joined": {"swapped": True},
}


def built(path: Path, changed: str = "") -> Path:
    """Save a program of convolution, norm, attention and pooling, [1, 8, 6, 6] -> [1, 16, 6], and return its path."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    rng = np.random.default_rng(7)
    kernel = rng.standard_normal((8, 8, 3, 3)).astype(np.float32) * 0.2

    def op(name: str, kind: Callable[..., Any], **arguments: Any) -> Any:
        change = dict(CHANGES[name]) if name == changed else {}
        kind = getattr(mb, change.pop("kind", ""), kind)
        if "kernel" in change:
            arguments["weight"] = arguments["weight"] * np.float32(change.pop("kernel"))
        if change.pop("swapped", False):
            arguments["values"] = arguments["values"][::-1]
        arguments |= {"mode": "EXACT"} if kind is mb.gelu else {}
        return kind(**{**arguments, **change}, name=name)

    @mb.program(input_specs=[mb.TensorSpec((1, 8, 6, 6))], opset_version=ct.target.iOS17)
    def program(x: Any) -> Any:
        stem = op("stem", mb.conv, x=x, weight=kernel, pad_type="same")
        act = op("act", mb.relu, x=stem)
        norm = op("norm", mb.layer_norm, x=act, axes=[3], epsilon=1e-5)
        scaled = op("scaled", mb.mul, x=norm, y=np.float32(0.25))
        turned = op("turned", mb.transpose, x=scaled, perm=[0, 1, 3, 2])
        product = op("product", mb.matmul, x=turned, y=act, transpose_y=False)
        weights = op("weights", mb.softmax, x=product, axis=-1)
        bounded = op("bounded", mb.clip, x=weights, alpha=np.float32(0.0), beta=np.float32(0.9))
        padded = op("padded", mb.pad, x=bounded, pad=[1, 1, 1, 1], mode="constant", constant_val=np.float32(0.0))
        cut = op("cut", mb.slice_by_size, x=padded, begin=[0, 0, 0, 1], size=[1, 8, 6, 6])
        pooled = op("pooled", mb.reduce_mean, x=cut, axes=[2], keep_dims=False)
        mixed = mb.mul(x=scaled, y=act, name="mixed")
        other = mb.reduce_mean(x=mixed, axes=[3], keep_dims=False, name="mean")
        return op("joined", mb.concat, values=[pooled, other], axis=1)

    options = {"compute_precision": ct.precision.FLOAT32, "pass_pipeline": ct.PassPipeline.EMPTY}
    ct.convert(program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS17, **options).save(str(path))
    return path


def renamed(path: Path) -> Path:
    """Give every value of a package but inputs and outputs another name, and return the package's path."""
    from coremltools.proto import Model_pb2

    (file,) = path.rglob("*.mlmodel")
    spec = Model_pb2.Model.FromString(file.read_bytes())
    (function,) = spec.mlProgram.functions.values()
    block = function.block_specializations[function.opset]
    kept = {item.name for item in [*spec.description.input, *spec.description.output]}
    number = {
        out.name: f"value_{i}" for i, op in enumerate(block.operations) for out in op.outputs if out.name not in kept
    }
    for op in block.operations:
        for out in op.outputs:
            out.name = number.get(out.name, out.name)
        for argument in op.inputs.values():
            for binding in argument.arguments:
                if binding.WhichOneof("binding") == "name":
                    binding.name = number.get(binding.name, binding.name)
    file.write_bytes(spec.SerializeToString())
    return path
