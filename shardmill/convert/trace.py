"""Conversion by coremltools: trace at T = upper bound, then ct.convert with RangeDim and states."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Block, Program
from coremltools.converters.mil.mil.ops.defs.iOS15 import tensor_transformation
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import register_pass
from torch import Tensor

from shardmill.forms.form import INT8
from shardmill.models.caches import Shape, T
from shardmill.models.contract import new_rows, output, states, taps, traced_inputs
from shardmill.models.interface import FIXED
from shardmill.models.parts import build
from shardmill.plan import Part

WHOLE_STATE_UPDATE = "shardmill::whole_state_update"


@register_pass(namespace="shardmill")
class whole_state_update(AbstractGraphPass):  # type: ignore[misc]
    """The removal of slice_update on a whole buffer: the Neural Engine takes it in few patterns only (ST3, ST4).

    Given:
        %a = slice_update(x=%cache, update=%new, begin=0.., end=shape)
        %b = coreml_update_state(state=%state, value=%a)
    Result:
        %b = coreml_update_state(state=%state, value=%new)
    """

    def apply(self, prog: Any) -> None:
        for function in prog.functions.values():
            for op in list(function.operations):
                if op.op_type == "slice_update" and _covers_everything(op):
                    function.replace_uses_of_var_after_op(anchor_op=op, old_var=op.outputs[0], new_var=op.update)
                    function.remove_ops([op])


def _covers_everything(op: Any) -> bool:
    """Return whether a slice_update replaces all of x."""
    if op.begin.val is None or op.end.val is None or tuple(op.update.shape) != tuple(op.x.shape):
        return False
    rank = len(op.x.shape)

    def axes(var: Any, default: Any) -> Any:
        return np.full(rank, default) if var is None or var.val is None else np.asarray(var.val)

    starts = axes(op.begin_mask, False) | (op.begin.val == 0)
    ends = axes(op.end_mask, False) | (op.end.val >= np.asarray(op.x.shape))
    plain = (axes(op.stride, 1) == 1) & ~axes(op.squeeze_mask, False).astype(bool)
    return bool((starts & ends & plain).all())


logging.getLogger("coremltools").setLevel(logging.ERROR)
TARGET = ct.target.iOS18  # the first target with states
# These passes fold constants of the graph into weights, which would then no longer be the checkpoint's rows.
FOLDING = {
    "common::fuse_conv_scale",
    "common::fuse_conv_bias",
    "common::fuse_conv_batchnorm",
    "common::fuse_elementwise_to_batchnorm",
}
QUANTIZED = "compression::linear_quantize_weights"
BOTH_SIDES = 2  # terms of an equation of two symbols


def convert(part: Part, weights: Mapping[str, Tensor], quantization: str) -> Any:
    """Return the Model_pb2.Model of a part, in a third of the time that coremltools alone would take.

    Passes are `hurried`, and a last pass quantises the weights. coremltools' own quantisation step would run all passes
    once more.

    Args:
        part: the part; if its shapes are fixed, it has one width.
        weights: the weights in fp32, by the contract's paths.
        quantization: "int8" or "fp16", for all matrices.
    """
    pipeline = passes()
    if quantization == INT8:
        pipeline.append_pass(QUANTIZED)
        pipeline.set_options(QUANTIZED, {"config": cto.OptimizationConfig(op_type_configs={"conv": integers(8)})})
    with hurried():
        spec = converted(part, weights, pipeline).get_spec()
    if quantization == INT8:  # coremltools' own step drops the record of the build's tools, too
        spec.mlProgram.ClearField("attributes")
    return spec


def integers(bits: int) -> Any:
    """Return the configuration for symmetric integers with one scale per output channel (rules W6 and W7)."""
    return cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype=f"int{bits}", granularity="per_channel", weight_threshold=0
    )


@contextmanager
def hurried() -> Iterator[None]:
    """Skip coremltools' work that changes no program, inside the `with` block.

    coremltools has no option for this. It then does not check a program after each of its ninety passes, nor print the
    program for a log level that nobody sees. On each insertion, it searches for operations that depend on compressed
    constants only if the program has compressed constants. A program gets compressed constants at the end. The
    n a = n b of every reshape is solved without sympy. After a conversion, coremltools does not search all objects of
    the process for dead cycles; Python's own searches find them.
    """
    spread, solve = Block._propagate_nonreplaceable_vars, tensor_transformation.sm.solve

    def spread_if_any(block: Block) -> None:
        if any(op.op_type.startswith("constexpr_") for op in _all_operations(block)):
            spread(block)

    def solve_at_sight(equations: Sequence[Any], unknowns: Sequence[Any], **options: Any) -> Any:
        terms = equations[0].as_coefficients_dict() if len(equations) == len(unknowns) == 1 else {}
        known = [term for term in terms if term != unknowns[0]]
        if len(terms) == BOTH_SIDES and len(known) == 1 and known[0].is_Symbol and not sum(terms.values()):
            return [{unknowns[0]: known[0]}]
        return solve(equations, unknowns, **options)

    with _replaced(
        (Program, "validate", lambda *_, **__: None),
        (Program, "__str__", object.__repr__),
        (Block, "_propagate_nonreplaceable_vars", spread_if_any),
        (tensor_transformation.sm, "solve", solve_at_sight),
        (gc, "collect", lambda *_, **__: 0),
    ):
        yield


@contextmanager
def _replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes inside the `with` block; each is given as its owner, its name and its new value."""
    with ExitStack() as stack:
        for owner, name, other in attributes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, other)
        yield


def _all_operations(block: Block) -> Iterator[Any]:
    """Yield the operations of a block and of its inner blocks."""
    for op in block.operations:
        yield op
        for inner in op.blocks:
            yield from _all_operations(inner)


def passes() -> Any:
    """Return coremltools' passes without the folding passes, and with `whole_state_update`."""
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.insert_pass(0, WHOLE_STATE_UPDATE)
    pipeline.remove_passes(FOLDING)
    return pipeline


def converted(part: Part, weights: Mapping[str, Tensor], pipeline: Any) -> Any:
    """Return the MLModel with weights of fp16."""
    module, blueprint = build(part.blueprint, weights), part.blueprint
    shapes, outputs = traced_inputs(blueprint), (output(blueprint), *new_rows(blueprint), *taps(blueprint))
    example = [torch.zeros(sized(shape, part.tokens)) for shape in shapes.values()]
    with torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    # Reading a program leaves counters that would number this program's operations differently than a fresh process.
    mb.name_count.clear()
    return ct.convert(
        traced,
        inputs=_core_ml_inputs(shapes, part.tokens, fixed=part.kind == "encoder" or part.calls.shapes == FIXED),
        outputs=[ct.TensorType(name, dtype=np.float16) for name in outputs],
        states=_core_ml_states(states(blueprint)) or None,
        minimum_deployment_target=TARGET,
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=pipeline,
        skip_model_load=True,
    )


def sized(shape: Shape, tokens: int) -> Shape:
    """Return a shape with T filled in."""
    return tuple(tokens if extent == T else extent for extent in shape)


def _core_ml_inputs(shapes: Mapping[str, Shape], upper: int, fixed: bool) -> list[Any]:
    """Return inputs that share one symbol for T: a stateful program must not mix fixed and flexible T (rule D3).

    Args:
        shapes: the shapes of the inputs, by name.
        upper: upper bound of T.
        fixed: whether T is always `upper`.
    """
    symbol = upper if fixed or upper == 1 else ct.RangeDim(lower_bound=1, upper_bound=upper, default=1)
    return [
        ct.TensorType(name, tuple(symbol if extent == T else extent for extent in shape), np.float16)
        for name, shape in shapes.items()
    ]


def _core_ml_states(shapes: Mapping[str, Shape]) -> list[Any]:
    """Return the states in fp16."""
    return [ct.StateType(ct.TensorType(shape=shape, dtype=np.float16), name=name) for name, shape in shapes.items()]
