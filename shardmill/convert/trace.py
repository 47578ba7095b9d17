"""Conversion by coremltools: trace at T = upper bound, then ct.convert with RangeDim and states."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import coremltools as ct
import numpy as np
import torch
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import Program
from coremltools.converters.mil.mil.ops.defs.iOS15 import tensor_transformation
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.pass_registry import register_pass
from coremltools.proto import MIL_pb2
from torch import Tensor

from shardmill.convert.package import HALF, constant, copied, main_block, main_function, named_arguments, neutralize
from shardmill.models.caches import Shape, T
from shardmill.models.contract import GraphSpec, new_rows, states, taps
from shardmill.models.interface import FIXED
from shardmill.models.part_kinds import computed, constants, output, stem, traced_inputs
from shardmill.models.parts import build

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
BOTH_SIDES = 2  # terms of an equation of two symbols


def convert(part_spec: GraphSpec) -> Any:
    """Return the Model_pb2.Model of a part, whose weights are constants of fp16 without a place.

    coremltools gets the weights as inputs. So no pass sees their values, or folds one into another, and they take no
    memory. Then each of these inputs becomes a constant, before the first operation that reads it.

    Args:
        part_spec: the part's spec; if its shapes are fixed, it has one width.
    """
    shapes = constants(part_spec)
    module = build(part_spec, {path: torch.zeros(1).expand(shape) for path, shape in shapes.items()})
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    weights = {path: tensors[path].data for path in (*shapes, *computed(part_spec))}
    _take_as_inputs(module, weights, len(traced_inputs(part_spec)))
    named = {f"{stem(path)}{HALF}": value for path, value in weights.items()}
    with hurried(), unmultiplied():
        spec = converted(part_spec, module, named, passes()).get_spec()
    _make_constant(spec, named)
    neutralize(spec)
    return spec


def _take_as_inputs(module: torch.nn.Module, paths: Iterable[str], count: int) -> None:
    """Let a module take its parameters and buffers at `paths` as further arguments, after `count` of its own."""
    places = [(module.get_submodule(owner), leaf) for owner, _, leaf in (path.rpartition(".") for path in paths)]
    for owner, leaf in places:
        delattr(owner, leaf)
    kind: Any = type(module)

    def forward(self: torch.nn.Module, *arguments: Tensor) -> Any:
        for (owner, leaf), value in zip(places, arguments[count:], strict=True):
            setattr(owner, leaf, value)
        return kind.forward(self, *arguments[:count])

    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _make_constant(spec: Any, names: Collection[str]) -> None:
    """Replace inputs of a program by constants in the weight file, each before its first use, in place.

    coremltools puts a convolution's weight before its bias.
    """
    function, block = main_function(spec), main_block(spec)
    kinds = {value.name: value.type for value in function.inputs}
    left, operations = set(names), [copied(operation) for operation in block.operations]
    del block.operations[:]
    for operation in operations:
        read = [argument.name for _, argument in named_arguments(operation)]
        for name in sorted(read, key=lambda name: name.endswith(f"_bias{HALF}")):
            if name in left:
                left.remove(name)
                value = MIL_pb2.Value(type=kinds[name])
                value.blobFileValue.fileName = "@model_path/weights/weight.bin"
                block.operations.append(constant(name, value))
        block.operations.append(operation)
    for inputs in (function.inputs, spec.description.input):
        others = [copied(value) for value in inputs if value.name not in names]
        del inputs[:]
        inputs.extend(others)


@contextmanager
def unmultiplied() -> Iterator[None]:
    """Let convolutions return zeros, inside the `with` block, and not read their weights.

    A trace has no use for numbers, and PyTorch would copy each matrix to multiply by it.
    """

    def zeros(x: Tensor, weight: Tensor, _: Any, steps: Sequence[int], padding: Sequence[int], *__: Any) -> Tensor:
        sides = zip(x.shape[2:], weight.shape[2:], steps, padding, strict=True)
        left = [(side + 2 * more - kernel) // step + 1 for side, kernel, step, more in sides]
        return x.new_zeros(()).expand(len(x), len(weight), *left)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_convolution", zeros, "CPU")
        yield


@contextmanager
def hurried() -> Iterator[None]:
    """Skip coremltools' work that changes no program, inside the `with` block.

    coremltools has no option for this. It then does not check a program after each of its ninety passes, nor print the
    program for a log level that nobody sees. The n a = n b of every reshape is solved without sympy. After a
    conversion, coremltools does not search all objects of the process for dead cycles; Python's own searches find them.
    """
    solve = tensor_transformation.sm.solve

    def solve_at_sight(equations: Sequence[Any], unknowns: Sequence[Any], **options: Any) -> Any:
        terms = equations[0].as_coefficients_dict() if len(equations) == len(unknowns) == 1 else {}
        known = [term for term in terms if term != unknowns[0]]
        if len(terms) == BOTH_SIDES and len(known) == 1 and known[0].is_Symbol and not sum(terms.values()):
            return [{unknowns[0]: known[0]}]
        return solve(equations, unknowns, **options)

    with _replaced(
        (Program, "validate", lambda *_, **__: None),
        (Program, "__str__", object.__repr__),
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


def passes() -> Any:
    """Return coremltools' passes, and `whole_state_update` before them."""
    pipeline = ct.PassPipeline.DEFAULT
    pipeline.insert_pass(0, WHOLE_STATE_UPDATE)
    return pipeline


def converted(part_spec: GraphSpec, module: torch.nn.Module, weights: Mapping[str, Tensor], pipeline: Any) -> Any:
    """Return the MLModel of a part's module, which takes `weights` after the contract's inputs."""
    shapes = traced_inputs(part_spec)
    outputs = (output(part_spec), *new_rows(part_spec), *taps(part_spec))
    example = [*(torch.zeros(sized(shape, part_spec.tokens)) for shape in shapes.values()), *weights.values()]
    with torch.no_grad():
        traced = torch.jit.trace(module, example, check_trace=False)  # type: ignore[no-untyped-call]
    # Reading a program leaves counters that would number this program's operations differently than a fresh process.
    mb.name_count.clear()
    fixed, tokens = part_spec.encodes or part_spec.calls.shapes == FIXED, part_spec.tokens
    # All inputs share one symbol for T: a stateful program must not mix fixed and flexible T (rule D3).
    symbol = tokens if fixed or tokens == 1 else ct.RangeDim(lower_bound=1, upper_bound=tokens, default=1)
    shapes |= {name: tuple(value.shape) for name, value in weights.items()}
    taken = {name: tuple(symbol if extent == T else extent for extent in shape) for name, shape in shapes.items()}
    cached = [
        ct.StateType(ct.TensorType(shape=s, dtype=np.float16), name=name) for name, s in states(part_spec).items()
    ]
    return ct.convert(
        traced,
        inputs=[ct.TensorType(name, shape, np.float16) for name, shape in taken.items()],
        outputs=[ct.TensorType(name, dtype=np.float16) for name in outputs],
        states=cached or None,
        minimum_deployment_target=TARGET,
        compute_units=ct.ComputeUnit.CPU_AND_NE,
        pass_pipeline=pipeline,
        skip_model_load=True,
    )


def sized(shape: Shape, tokens: int) -> Shape:
    """Return a shape with T filled in."""
    return tuple(tokens if extent == T else extent for extent in shape)
