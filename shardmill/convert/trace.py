"""Conversion by coremltools alone: trace at T = upper bound, ct.convert with RangeDim and states, INT8 weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch
from coremltools.converters.mil import Builder as mb
from torch import Tensor, nn

from shardmill.convert.passes import WHOLE_STATE_UPDATE
from shardmill.models import family
from shardmill.models.architecture import Graph
from shardmill.plan import Part

TARGET = ct.target.iOS18  # the first with states


def convert(part: Part, weights: Mapping[str, Tensor], quantization: str) -> Any:
    """The ct.models.MLModel of a part.

    Args: weights in fp32, by the checkpoint's names; quantization "int8" (symmetric, one scale per output channel of
    every projection) or "fp16" (none).
    """
    module = build_module(part, weights)
    shapes = input_shapes(part)
    example = [torch.zeros(sized(shape, part.tokens)) for shape in shapes.values()]
    with torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.insert_pass(0, WHOLE_STATE_UPDATE)
    # Reading a program leaves counters behind that would number this one's operations otherwise than a fresh process.
    mb.name_count.clear()
    model = ct.convert(
        traced,
        inputs=core_ml_inputs(shapes, part.tokens),
        outputs=[ct.TensorType("hidden" if part.kind == "layers" else "logits", dtype=np.float16)],
        states=core_ml_states(part) or None,
        minimum_deployment_target=TARGET,
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=pipeline,
        skip_model_load=True,
    )
    return quantize(model) if quantization == "int8" else model


def build_module(part: Part, weights: Mapping[str, Tensor]) -> nn.Module:
    """The PyTorch module of a part, after the graph contract."""
    models = family(part.graph.model_type)
    module: nn.Module
    if part.kind == "layers":
        module = models.LayersPart(part.graph, part.start, part.end, part.slots, weights)
    else:
        norm, head = weights.values()
        module = models.HeadPart(part.graph, norm, head)
    return module.eval()


T = -1  # stands for the token axis in the shapes below


def input_shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """The graph contract's inputs by name, T as -1."""
    g: Graph = part.graph
    if part.kind == "head":
        return {"hidden": (1, g.hidden, T, 1)}
    return {
        "x": (1, g.hidden, T, 1),
        "rope_cos": (T, g.rope_dim // 2),
        "rope_sin": (T, g.rope_dim // 2),
        "attn_mask": (1, 1, T, part.slots),
        "kv_write_mask": (1, 1, part.slots, T),
    }


def sized(shape: tuple[int, ...], tokens: int) -> tuple[int, ...]:
    """A shape with T filled in."""
    return tuple(tokens if extent == T else extent for extent in shape)


def core_ml_inputs(shapes: Mapping[str, tuple[int, ...]], upper: int) -> list[Any]:
    """Inputs that share one symbol for T: a stateful program must not mix fixed and flexible ones (rule D3)."""
    symbol = ct.RangeDim(lower_bound=1, upper_bound=upper, default=1) if upper > 1 else 1
    return [
        ct.TensorType(name, tuple(symbol if extent == T else extent for extent in shape), np.float16)
        for name, shape in shapes.items()
    ]


def core_ml_states(part: Part) -> list[Any]:
    """k_i and v_i of every layer, [1, kv_heads, S, head_dim] in fp16, by absolute layer index."""
    if part.kind != "layers":
        return []
    shape = (1, part.graph.kv_heads, part.slots, part.graph.head_dim)
    return [
        ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=f"{kind}_{i}")
        for i in range(part.start, part.end)
        for kind in "kv"
    ]


def quantize(model: Any) -> Any:
    """INT8 weights of every projection, symmetric, one scale per output channel (rules W6 and W7)."""
    settings = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype="int8", granularity="per_channel", weight_threshold=0
    )
    return cto.linear_quantize_weights(model, cto.OptimizationConfig(op_type_configs={"conv": settings}))
