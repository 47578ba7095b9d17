"""Lowers a function of the intermediate representation to steps: kernels with resolved arguments, constants folded.

Everything that does not depend on the inputs happens here, once per loaded model: weights are read and dequantised,
plain arguments become Python values, operations on constants are computed. Only the large matrices of products stay as
they are stored (stored.py). What remains runs in program order.

Loaded functions that expand the same arrays of a weight file share the expanded arrays. A program may have one function
for each width of a pass, all with the same weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ProgramError, UnsupportedOp
from portable_coreml.program import Binding, Block, Function, ListType, Named, Op, TensorType, Value
from portable_coreml.run.ane import SCALES, deviating_kernel
from portable_coreml.run.fixed_point import multiplies_in_fixed_point
from portable_coreml.run.fp16_weights import fp16_copies_are_right
from portable_coreml.run.lowered import Arg, Const, Lowered, LoweredStep, Ref, evaluate, mentions
from portable_coreml.run.ops import KERNELS, Kernel, Param, extra_package, find_kernel
from portable_coreml.run.packed import Packed
from portable_coreml.run.products import (
    WEIGHTS,
    WIDE,
    by_columns,
    output_axis,
    product_kernel,
)
from portable_coreml.run.stored import StoredMatrix, is_compressed, least_stored, stored_matrix

_CONTROL = frozenset({"cond", "while_loop"})
_STATE_OPS = frozenset({"read_state", "write_state"})
_EXPANDING = frozenset(kind for kind in KERNELS if kind.startswith("constexpr_"))
_SHARED: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # expanded arrays that some function holds
_PACKED: WeakValueDictionary[Hashable, Packed] = WeakValueDictionary()  # packed copies of stored matrices
Loader = Callable[[Value], np.ndarray]
Placer = Callable[[Value], Hashable]  # identifies a literal in a weight file; None for any other literal
_Known = Ref | Const | Value | Op  # the meaning of a name; a Value or Op is a constant that was not needed yet
Scope = dict[str, _Known]


def to_held(array: np.ndarray, dtype: str) -> Tensor:
    """Return a torch tensor of the type in which values of MIL type `dtype` are held."""
    source = array.astype(np.int64) if array.dtype.kind == "u" and array.dtype.itemsize > 1 else array
    return torch.from_numpy(np.array(source)).to(BY_NAME[dtype].torch)


def nowhere(value: Value) -> None:
    """Return None: a literal whose place is not known is not shared."""
    return None


def lower_function(
    function: Function, load: Loader, half: bool, place: Placer = nowhere, options: Collection[str] = ()
) -> Lowered:
    """Return the steps of a function.

    Args:
        function: what to lower.
        load: gives a tensor literal's array.
        half: whether results declared fp16 are rounded to fp16, folded constants included.
        place: where a literal's array is.
        options: deviations of the Neural Engine (ane.py).
    """
    return _Lowering(load, half, place, options).block(function.block, function.inputs, {})


class _Lowering:
    """State of one pass over a function: the loader, and the known meaning of every name seen so far."""

    def __init__(self, load: Loader, half: bool, place: Placer, options: Collection[str]) -> None:
        self.load = load
        self.place = place
        self.keys: dict[str, Hashable] = {}  # of shared tensors, by the names of the constants
        self.half = half
        self.options = options
        fast = fp16_copies_are_right() if half else multiplies_in_fixed_point()
        self.least = 1 if SCALES in options else least_stored(fast)

    def block(self, block: Block, inputs: Sequence[Named], outer: Scope) -> Lowered:
        scope: Scope = dict(outer)
        captured: dict[str, None] = {}
        inner = {item.name for item in inputs}
        scope.update({item.name: Ref(item.name) for item in inputs})
        steps: list[LoweredStep] = []
        for op in block.ops:
            step = self._op(op, scope)
            if step is not None:
                steps.append(step)
                inner.update(out.name for out in step.outputs)
                captured.update(dict.fromkeys(n for n in mentions(step.args) if n not in inner))
        results = tuple(self._tensor(name, scope, f"block result '{name}'") for name in block.outputs)
        captured.update(dict.fromkeys(n for n in mentions(results) if n not in inner))
        return Lowered(tuple(item.name for item in inputs), tuple(steps), results, tuple(captured))

    def _op(self, op: Op, scope: Scope) -> LoweredStep | None:
        for out in op.outputs:
            if out.name in scope:
                raise ProgramError(f"the name '{out.name}' is defined twice")
        if op.kind == "const":
            scope[op.outputs[0].name] = _const_value(op)
            return None
        if op.kind in _CONTROL:
            return self._control(op, scope)
        if op.kind in _STATE_OPS:
            return self._state(op, scope)
        if is_compressed(op.kind, self._literals(op, scope), self.least):
            scope[op.outputs[0].name] = op
            return None
        return self._kernel_step(op, scope) if op.kind not in _EXPANDING else self._expanded(op, scope)

    def _expanded(self, op: Op, scope: Scope) -> LoweredStep | None:
        """Expand a compressed constant, or take the tensor that another function has expanded."""
        key, name = self._key(op, scope), op.outputs[0].name
        known = None if key is None else _SHARED.get(key)
        if known is not None:
            scope[name] = Const(known)
        elif (step := self._kernel_step(op, scope)) is not None:
            return step
        self._share(name, key, scope)
        return None

    def _key(self, op: Op, scope: Scope) -> Hashable:
        """Return a key that decides the result of an operation if all its arguments are literals, otherwise None."""
        literals = self._literals(op, scope)
        decided = len(literals) == len(given(op)) and any(self.place(value) for value in literals.values())
        arguments = tuple((name, self._content(value)) for name, value in sorted(literals.items()))
        return (op.kind, op.outputs[0].type, self.half, arguments) if decided else None

    def _content(self, value: Value) -> Hashable:
        """Return a key that differs between any two literals."""
        place = self.place(value)
        return value.type, self.load(value).tobytes() if place is None else place

    def _share(self, name: str, key: Hashable, scope: Scope) -> None:
        """Share the tensor of a name with other functions; it may be shared already."""
        constant = scope[name]
        if key is not None and isinstance(constant, Const) and isinstance(constant.value, Tensor):
            _SHARED[key] = constant.value
            self.keys[name] = key

    def _kernel_step(self, op: Op, scope: Scope) -> LoweredStep | None:
        """Return the step of a kernel, or None if its result is a constant, which `scope` then knows."""
        kernel = find_kernel(op.kind)
        if kernel is None:
            target = op.outputs[0].name if op.outputs else op.name
            more = "" if extra_package() else "; portable-coreml-extra, which has more operations, is not installed"
            said = f"operation '{op.kind}' (output '{target}') is not supported by the portable engine{more}"
            raise UnsupportedOp(said)
        kernel = WIDE.get(op.kind, kernel) if self._is_rounded(op) else kernel
        if op.kind != "conv":  # see _product for those that are plain products
            kernel = self._emulated(op, kernel)
        step = self._product(op, kernel, scope) or LoweredStep(op, kernel, self._args(op, kernel, scope), op.outputs)
        if not any(mentions(step.args)) and not kernel.impure:
            for out, value in zip(
                op.outputs, evaluate(step, [_constant(a) for a in step.args], self.half), strict=True
            ):
                scope[out.name] = Const(value)
            return None
        scope.update({out.name: Ref(out.name) for out in op.outputs})
        return step

    def _product(self, op: Op, usual: Kernel, scope: Scope) -> LoweredStep | None:
        """Return a product with a constant matrix, which stays as it is stored if it is large.

        None for anything else.
        """
        weight = op.inputs.get(WEIGHTS.get(op.kind, ""), ())
        name = weight[0] if len(weight) == 1 and isinstance(weight[0], str) else None
        source = None if name is None else scope.get(name)
        if name is None or source is None or isinstance(source, Ref):
            return None
        place = Const(None)  # the weight's, among the arguments
        args = self._args(op, usual, {**scope, name: place})
        out = output_axis(op.kind, dict(zip([p.name for p in usual.params], args, strict=True)), _shape(source))
        matrix = None if out is None else self._matrix(op, name, out, scope)
        if matrix is None:
            return None
        args = tuple(Const(matrix) if arg is place else arg for arg in args)
        kernel = product_kernel(op.kind, isinstance(matrix, StoredMatrix), self._is_rounded(op))
        return LoweredStep(op, self._emulated(op, kernel), args, op.outputs)

    def _emulated(self, op: Op, kernel: Kernel) -> Kernel:
        return deviating_kernel(op.kind, kernel, self.options) if self._is_rounded(op) else kernel

    def _is_rounded(self, op: Op) -> bool:
        kind = op.outputs[0].type if op.outputs else None
        return self.half and isinstance(kind, TensorType) and kind.dtype == "fp16"

    def _matrix(self, op: Op, name: str, out: int, scope: Scope) -> StoredMatrix | Tensor | None:
        """Return a constant as the matrix of a product whose output channels are its axis `out`."""
        source = scope[name]
        if isinstance(source, (Op, Value)):
            literals = self._literals(source, scope) if isinstance(source, Op) else {}
            rounds = self.half and SCALES not in self.options
            stored = stored_matrix(source, literals, out, self.load, rounds, self.least)
            if stored is not None:
                return self._with_shared_copy(stored, source, out, scope)
        dense = self._tensor(name, scope, f"the weight of {op.kind} '{op.name}'") if op.kind != "matmul" else None
        if not isinstance(dense, Const) or not dense.value.is_floating_point():
            return None
        matrix = by_columns(dense.value)
        scope[name] = Const(matrix)
        key = self.keys.get(name)
        if key is not None and _SHARED.get(key) is dense.value:
            self._share(name, key, scope)  # so that other functions need not rearrange it either
        return matrix

    def _with_shared_copy(self, stored: StoredMatrix, source: Op | Value, out: int, scope: Scope) -> StoredMatrix:
        """Return a matrix whose packed copy is shared with other functions that multiply with it."""
        if isinstance(source, Op):
            key = self._key(source, scope)
        else:
            place = self.place(source)
            key = None if place is None else ("const", source.type, place)
        if key is None:
            return stored
        return replace(stored, packed=_PACKED.setdefault((key, out), stored.packed).join(stored.packed))

    def _literals(self, op: Op, scope: Scope) -> dict[str, Value]:
        """Return the arguments of an operation that are literals."""
        bound = {name: b[0] for name, b in given(op).items() if len(b) == 1}
        values = {name: scope.get(b) if isinstance(b, str) else b for name, b in bound.items()}
        return {name: value for name, value in values.items() if isinstance(value, Value)}

    def _args(self, op: Op, kernel: Kernel, scope: Scope) -> tuple[Arg, ...]:
        bound = given(op)
        known = {param.name for param in kernel.params}
        for name in bound:
            if name not in known:
                raise UnsupportedOp(f"operation '{op.kind}' ('{op.name}'): argument '{name}' is not supported")
        return tuple(self._arg(op, param, bound.get(param.name, ()), scope) for param in kernel.params)

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
        if len(bindings) > 1:
            raise ProgramError(f"{where} is a list of {len(bindings)} values, not one")
        return self._tensor(bindings[0], scope, where)

    def _tensor(self, binding: Binding, scope: Scope, where: str) -> Ref | Const:
        bound = self._lookup(binding, scope, where)
        if isinstance(bound, Value):
            if not isinstance(bound.type, TensorType):
                raise UnsupportedOp(f"{where}: only tensors are supported")
            if bound.type.dtype == "string":
                raise ProgramError(f"{where} is a string, not a tensor")
            place = self.place(bound)
            key = None if place is None else ("const", bound.type, place)
            known = None if key is None else _SHARED.get(key)
            made = Const(to_held(self.load(bound), bound.type.dtype) if known is None else known)
            if isinstance(binding, str):
                scope[binding] = made
                self._share(binding, key, scope)
            return made
        return bound

    def _plain(self, binding: Binding, scope: Scope, where: str) -> Ref | Const:
        bound = self._lookup(binding, scope, where)
        if isinstance(bound, Value):
            return Const(self._python(bound, where))
        if isinstance(bound, Const) and isinstance(bound.value, Tensor):
            return Const(bound.value.tolist())
        return bound

    def _lookup(self, binding: Binding, scope: Scope, where: str) -> Ref | Const | Value:
        if isinstance(binding, Value):
            return binding
        if binding not in scope:
            raise ProgramError(f"{where} refers to '{binding}', which is not defined before it")
        bound = scope[binding]
        if isinstance(bound, Op):
            self._expanded(bound, scope)
            bound = scope[binding]
        assert not isinstance(bound, Op)
        return bound

    def _python(self, value: Value, where: str) -> Any:
        """Return a literal as a plain value: a number, a string, or a list."""
        if isinstance(value.type, TensorType):
            return self.load(value).tolist()
        if isinstance(value.type, ListType) and isinstance(value.data, tuple):
            return [self._python(item, where) for item in value.data if isinstance(item, Value)]
        raise UnsupportedOp(f"{where}: only tensors and lists are supported")

    def _state(self, op: Op, scope: Scope) -> LoweredStep:
        where = f"argument 'input' of {op.kind} '{op.name}'"
        source = self._lookup(_single(op, "input"), scope, where)
        if not isinstance(source, Ref):
            raise ProgramError(f"{where} is not a state")
        args: tuple[Arg, ...] = (source,)
        if op.kind == "write_state":
            args += (self._tensor(_single(op, "data"), scope, f"argument 'data' of {op.kind} '{op.name}'"),)
        scope.update({out.name: Ref(out.name) for out in op.outputs})
        return LoweredStep(op, None, args, op.outputs)

    def _control(self, op: Op, scope: Scope) -> LoweredStep:
        if op.kind == "cond":
            heads: tuple[Arg, ...] = (self._tensor(_single(op, "pred"), scope, f"argument 'pred' of cond '{op.name}'"),)
        else:
            bound = op.inputs.get("loop_vars", ())
            heads = tuple(self._tensor(b, scope, f"argument of while_loop '{op.name}'") for b in bound)
        blocks = tuple(self.block(block, block.inputs, scope) for block in op.blocks)
        if len(blocks) != 2:
            raise ProgramError(f"{op.kind} '{op.name}' has {len(blocks)} blocks, not 2")
        names = dict.fromkeys(name for block in blocks for name in block.captured)
        scope.update({out.name: Ref(out.name) for out in op.outputs})
        return LoweredStep(op, None, (heads, *(Ref(name) for name in names)), op.outputs, blocks)


def _single(op: Op, name: str) -> Binding:
    bindings = op.inputs.get(name, ())
    if len(bindings) != 1:
        raise ProgramError(f"{op.kind} '{op.name}' needs one argument '{name}'")
    return bindings[0]


def _shape(source: Const | Value | Op) -> tuple[int | None, ...]:
    """Return the shape of a constant; () if it is not a tensor."""
    if isinstance(source, Const):
        return tuple(source.value.shape) if isinstance(source.value, Tensor) else ()
    kind = source.outputs[0].type if isinstance(source, Op) else source.type
    return kind.shape if isinstance(kind, TensorType) else ()


def given(op: Op) -> dict[str, tuple[Binding, ...]]:
    """Return an operation's arguments."""
    if not op.kind.startswith("constexpr_"):
        return dict(op.inputs)
    among = {key: (value,) for key, value in op.attributes.items() if key != "name"}  # where iOS16 keeps them
    return {**op.inputs, **among}


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


def _constant(arg: Arg) -> Any:
    if isinstance(arg, tuple):
        return [_constant(item) for item in arg]
    assert isinstance(arg, Const)
    return arg.value
