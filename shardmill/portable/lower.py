"""Lowers a function of the intermediate representation to steps: kernels with resolved arguments, constants folded.

Everything that does not depend on the inputs happens here, once per loaded model: weights are read and dequantised,
plain arguments become Python values, operations on constants are computed. What remains runs in program order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dtypes import BY_NAME
from .errors import ProgramError, UnsupportedOp
from .ops import KERNELS, Kernel, Param
from .program import Binding, Block, Function, ListType, Named, Op, TensorType, Value
from .steps import Arg, Const, Lowered, Ref, Step, evaluate

CONTROL = frozenset({"cond", "while_loop"})
STATE_OPS = frozenset({"read_state", "write_state"})
Loader = Callable[[Value], np.ndarray]
Known = Ref | Const | Value  # what a name stands for; a Value is a literal that nobody has asked for yet
Scope = dict[str, Known]


def to_held(array: np.ndarray, dtype: str) -> Tensor:
    """A torch tensor of the type in which values of MIL type `dtype` are held."""
    source = array.astype(np.int64) if array.dtype.kind == "u" and array.dtype.itemsize > 1 else array
    return torch.from_numpy(np.array(source)).to(BY_NAME[dtype].torch)


def lower_function(function: Function, load: Loader, half: bool) -> Lowered:
    """Steps of a function. `half`: results declared fp16 are rounded to fp16, folded constants included."""
    return _Lowering(load, half).block(function.block, function.inputs, {})


class _Lowering:
    """State of one pass over a function: the loader and what is known of every name seen so far."""

    def __init__(self, load: Loader, half: bool) -> None:
        self.load = load
        self.half = half

    def block(self, block: Block, inputs: Sequence[Named], outer: Scope) -> Lowered:
        scope: Scope = dict(outer)
        captured: dict[str, None] = {}
        own = {item.name for item in inputs}
        scope.update({item.name: Ref(item.name) for item in inputs})
        steps: list[Step] = []
        for op in block.ops:
            step = self._op(op, scope)
            if step is not None:
                steps.append(step)
                own.update(out.name for out in step.outputs)
                captured.update(dict.fromkeys(n for n in _ref_names(step.args) if n not in own))
        results = tuple(self._tensor(name, scope, f"block result '{name}'") for name in block.outputs)
        captured.update(dict.fromkeys(n for n in _ref_names(results) if n not in own))
        return Lowered(tuple(item.name for item in inputs), tuple(steps), results, tuple(captured))

    def _op(self, op: Op, scope: Scope) -> Step | None:
        for out in op.outputs:
            if out.name in scope:
                raise ProgramError(f"the name '{out.name}' is defined twice")
        if op.kind == "const":
            scope[op.outputs[0].name] = _const_value(op)
            return None
        if op.kind in CONTROL:
            return self._control(op, scope)
        if op.kind in STATE_OPS:
            return self._state(op, scope)
        found = KERNELS.get(op.kind)
        if found is None:
            target = op.outputs[0].name if op.outputs else op.name
            raise UnsupportedOp(f"operation '{op.kind}' (output '{target}') is not supported by the portable engine")
        step = Step(op, found, self._args(op, found, scope), op.outputs)
        if not any(_ref_names(step.args)) and not found.impure:
            for out, value in zip(
                op.outputs, evaluate(step, [_constant(a) for a in step.args], self.half), strict=True
            ):
                scope[out.name] = Const(value)
            return None
        scope.update({out.name: Ref(out.name) for out in op.outputs})
        return step

    def _args(self, op: Op, found: Kernel, scope: Scope) -> tuple[Arg, ...]:
        given: dict[str, tuple[Binding, ...]] = dict(op.inputs)
        if op.kind.startswith("constexpr_"):  # iOS16 keeps their arguments among the attributes
            given.update({key: (value,) for key, value in op.attributes.items() if key != "name"})
        known = {param.name for param in found.params}
        for name in given:
            if name not in known:
                raise UnsupportedOp(f"operation '{op.kind}' ('{op.name}'): argument '{name}' is not supported")
        return tuple(self._arg(op, param, given.get(param.name, ()), scope) for param in found.params)

    def _arg(self, op: Op, param: Param, bindings: tuple[Binding, ...], scope: Scope) -> Arg:
        where = f"argument '{param.name}' of {op.kind} '{op.name}'"
        if not bindings:
            if param.default is inspect.Parameter.empty:
                raise ProgramError(f"{where} is missing")
            return Const(param.default)
        if param.kind == "tensors":
            return tuple(self._tensor(b, scope, where) for b in bindings)
        if param.kind == "plain":
            if len(bindings) > 1:
                items = [self._plain(b, scope, where) for b in bindings]
                if any(isinstance(item, Ref) for item in items):
                    raise UnsupportedOp(f"{where} is a list of computed values")
                return Const([item.value for item in items if isinstance(item, Const)])
            return self._plain(bindings[0], scope, where)
        return self._tensor(bindings[0], scope, where)

    def _tensor(self, binding: Binding, scope: Scope, where: str) -> Ref | Const:
        found = _lookup(binding, scope, where)
        if isinstance(found, Value):
            if not isinstance(found.type, TensorType):
                raise UnsupportedOp(f"{where}: only tensors are supported")
            if found.type.dtype == "string":
                raise ProgramError(f"{where} is a string, not a tensor")
            made = Const(to_held(self.load(found), found.type.dtype))
            if isinstance(binding, str):
                scope[binding] = made
            return made
        return found

    def _plain(self, binding: Binding, scope: Scope, where: str) -> Ref | Const:
        found = _lookup(binding, scope, where)
        if isinstance(found, Value):
            return Const(self._python(found, where))
        if isinstance(found, Const) and isinstance(found.value, Tensor):
            return Const(found.value.tolist())
        return found

    def _python(self, value: Value, where: str) -> Any:
        """A literal as a plain value: a number, a string, or a list."""
        if isinstance(value.type, TensorType):
            return self.load(value).tolist()
        if isinstance(value.type, ListType) and isinstance(value.data, tuple):
            return [self._python(item, where) for item in value.data if isinstance(item, Value)]
        raise UnsupportedOp(f"{where}: only tensors and lists are supported")

    def _state(self, op: Op, scope: Scope) -> Step:
        where = f"argument 'input' of {op.kind} '{op.name}'"
        source = _lookup(_single(op, "input"), scope, where)
        if not isinstance(source, Ref):
            raise ProgramError(f"{where} is not a state")
        args: tuple[Arg, ...] = (source,)
        if op.kind == "write_state":
            args += (self._tensor(_single(op, "data"), scope, f"argument 'data' of {op.kind} '{op.name}'"),)
        scope.update({out.name: Ref(out.name) for out in op.outputs})
        return Step(op, None, args, op.outputs)

    def _control(self, op: Op, scope: Scope) -> Step:
        if op.kind == "cond":
            heads: tuple[Arg, ...] = (self._tensor(_single(op, "pred"), scope, f"argument 'pred' of cond '{op.name}'"),)
        else:
            heads = tuple(self._tensor(b, scope, f"argument of while_loop '{op.name}'") for b in op.inputs["loop_vars"])
        blocks = tuple(self.block(block, block.inputs, scope) for block in op.blocks)
        if len(blocks) != 2:  # noqa: PLR2004 - then and else, or condition and body
            raise ProgramError(f"{op.kind} '{op.name}' has {len(blocks)} blocks, not 2")
        names = dict.fromkeys(name for block in blocks for name in block.captured)
        scope.update({out.name: Ref(out.name) for out in op.outputs})
        return Step(op, None, (heads, *(Ref(name) for name in names)), op.outputs, blocks)


def _single(op: Op, name: str) -> Binding:
    bindings = op.inputs.get(name, ())
    if len(bindings) != 1:
        raise ProgramError(f"{op.kind} '{op.name}' needs one argument '{name}'")
    return bindings[0]


def _lookup(binding: Binding, scope: Scope, where: str) -> Known:
    if isinstance(binding, Value):
        return binding
    if binding not in scope:
        raise ProgramError(f"{where} refers to '{binding}', which is not defined before it")
    return scope[binding]


def _const_value(op: Op) -> Value:
    value = op.attributes.get("val")
    if value is None:
        bound = op.inputs.get("val", ())
        value = bound[0] if bound and isinstance(bound[0], Value) else None
    if value is None or len(op.outputs) != 1:
        raise ProgramError(f"const '{op.name}' has no value")
    declared = op.outputs[0].type
    if isinstance(declared, TensorType) and declared != value.type:
        raise ProgramError(f"const '{op.name}' is declared {declared}, its value is {value.type}")
    return value


def _ref_names(args: Sequence[Arg]) -> list[str]:
    names: list[str] = []
    for arg in args:
        if isinstance(arg, tuple):
            names += _ref_names(arg)
        elif isinstance(arg, Ref):
            names.append(arg.name)
    return names


def _constant(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return [_constant(item) for item in arg]
    assert isinstance(arg, Const)
    return arg.value
