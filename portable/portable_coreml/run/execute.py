"""Runs a lowered function.

Interpreted the first time at each set of input shapes, compiled to straight-line Python after.

The interpreted run is a real prediction that also learns what these shapes decide. Values that depend on shapes
alone become constants. Each operation gets the cheapest callable for the shapes it saw (plan.py). Plans are
cached per input shapes. Any number of threads may run one Executable; a state belongs to one call at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ExecutionError, ProgramError
from portable_coreml.program import Function, StateType, TensorType
from portable_coreml.run import observe
from portable_coreml.run.ane import options_of
from portable_coreml.run.experts import skip_unchosen
from portable_coreml.run.fuse import MaskedWrite, find_masked_writes, masked_write_lines
from portable_coreml.run.lower import Loader, Placer, lower_function, nowhere
from portable_coreml.run.lowered import (
    Arg,
    Const,
    Lowered,
    LoweredStep,
    Ref,
    evaluate,
    kernel_values,
    settle,
    used,
    value_of,
)
from portable_coreml.run.pieces import one_thread
from portable_coreml.run.plan import CodeLine, compile_lines, fixed_point_lines, specialise

_MAX_PLANS = 64
MAX_ITERATIONS = 1 << 20
_States = dict[str, Tensor]
_Plan = Callable[..., tuple[Tensor, ...]]


class Executable:
    """One function of a program at one precision."""

    def __init__(self, function: Function, load: Loader, precision: str, place: Placer = nowhere) -> None:
        """Lower the function.

        Args:
            function: what to run.
            load: gives a tensor literal's array.
            precision: "fp32", "fp16", or "ane" with its options (ane.py). Raises ValueError for any other.
            place: where a literal's array is; functions that expand the same one share the result.
        """
        options = options_of(precision)
        self.half = precision != "fp32"
        self.fuses = not options  # the formula of a masked write is fp16's
        self.function = function
        self.inputs = tuple(item for item in function.inputs if not isinstance(item.type, StateType))
        self.states = {item.name: item.type.wrapped for item in function.inputs if isinstance(item.type, StateType)}
        self.outputs = function.block.outputs
        with torch.inference_mode():
            self.lowered = lower_function(function, load, self.half, place, options)
            self.quick = self.lowered if self.half else skip_unchosen(self.lowered)
        self._plans: OrderedDict[tuple[torch.Size, ...], _Plan] = OrderedDict()
        self._lock = threading.Lock()

    def new_state(self) -> _States:
        """Return every state of the function, zero-filled. Raises ProgramError for a state without a static shape."""
        made: _States = {}
        for name, kind in self.states.items():
            sizes = [d for d in kind.shape if d is not None]
            if len(sizes) != len(kind.shape):
                raise ProgramError(f"state '{name}' has no static shape")
            made[name] = torch.zeros(sizes, dtype=BY_NAME[kind.dtype].torch)
        return made

    def run(self, inputs: Mapping[str, Tensor], states: _States) -> tuple[Tensor, ...]:
        """Return outputs in program order.

        `states` is updated. `inputs` must fit the parameters (signature.py checks them).
        """
        values = [inputs[item.name] for item in self.inputs]
        with torch.inference_mode(), one_thread():
            observer = observe.current()
            if observer is not None:
                return self._interpret(dict(zip([i.name for i in self.inputs], values, strict=True)), states, observer)
            key = tuple(value.shape for value in values)
            plan = self._plans.get(key)
            return plan(states, *values) if plan is not None else self._first_run(key, values, states)

    def _first_run(self, key: tuple[torch.Size, ...], values: list[Tensor], states: _States) -> tuple[Tensor, ...]:
        tracer = _Tracer(self.half, states, self.fuses)
        env: dict[str, Any] = dict(zip([item.name for item in self.inputs], values, strict=True))
        results = tracer.run(self.quick, env)
        names = tuple(item.name for item in self.inputs)
        plan = compile_lines(names, tuple(tracer.lines), tracer.outputs)
        with self._lock:
            self._plans[key] = plan
            while len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return results

    def _interpret(self, env: dict[str, Any], states: _States, observer: observe.Observer) -> tuple[Tensor, ...]:
        results = _run_block(self.lowered, env, states, self.half, observer)
        return tuple(_owned(value) if isinstance(value, Tensor) else value for value in results)


def walk(
    block: Lowered, env: dict[str, Any], states: _States, half: bool, observer: observe.Observer | None = None
) -> Iterator[tuple[LoweredStep, Sequence[Any]]]:
    """Interpret a block, and yield each operation with its results as soon as it has run.

    Args:
        block: an executable's `lowered`, or a block inside of it.
        env: the inputs by name. It gets every result until nothing needs it any more; operations take what it holds
            when they run, so a caller may change it in between.
        states: every state's tensor by name; they are updated.
        half: whether results declared fp16 are rounded.
        observer: sees the results of blocks inside of this one.

    Hold `torch.inference_mode()` and `one_thread()` around it, as `Executable.run` does.
    """
    for index, step in enumerate(block.steps):
        results = _run_step(step, env, states, half, observer)
        env.update((out.name, value) for out, value in zip(step.outputs, results, strict=True))
        yield step, results
        for name in block.dying.get(index, ()):
            env.pop(name, None)


def _run_block(
    block: Lowered, env: dict[str, Any], states: _States, half: bool, observer: observe.Observer | None
) -> tuple[Tensor, ...]:
    """Interpret a block in `env`, which it uses up. Nested blocks and observed runs come here."""
    for step, results in walk(block, env, states, half, observer):
        for out, value in zip(step.outputs, results, strict=True):
            if observer is not None and isinstance(value, Tensor):
                observer(out.name, step.op.kind, value)
    return tuple(value_of(arg, env) for arg in block.outputs)


def _run_step(
    step: LoweredStep, env: dict[str, Any], states: _States, half: bool, observer: observe.Observer | None = None
) -> tuple[Any, ...]:
    """Run one step and return its results in their declared types."""
    if step.kernel is not None:
        return evaluate(step, kernel_values(step, env), half)
    if step.op.kind == "read_state":
        return (states[_state_name(step)],)
    if step.op.kind == "write_state":
        states[_state_name(step)] = _owned(value_of(step.args[1], env))
        return tuple(states[_state_name(step)] for _ in step.outputs)
    if step.op.kind == "cond":
        return _settled(step, _run_cond(step, env, states, half, observer), half)
    return _settled(step, _run_while(step, env, states, half, observer), half)


def _settled(step: LoweredStep, results: tuple[Tensor, ...], half: bool) -> tuple[Tensor, ...]:
    return tuple(settle(value, out, half) for value, out in zip(results, step.outputs, strict=True))


def _owned(value: Tensor) -> Tensor:
    """Return a copy: a state must not share memory with the caller's arrays, which may change after the call."""
    return value.clone(memory_format=torch.contiguous_format)


def _state_name(step: LoweredStep) -> str:
    source = step.args[0]
    assert isinstance(source, Ref)
    return source.name


def _run_cond(
    step: LoweredStep, env: dict[str, Any], states: _States, half: bool, observer: observe.Observer | None
) -> tuple[Tensor, ...]:
    (head,) = step.args[0] if isinstance(step.args[0], tuple) else (step.args[0],)
    chosen = step.blocks[0] if bool(value_of(head, env)) else step.blocks[1]
    return _run_block(chosen, dict(env), states, half, observer)


def _run_while(
    step: LoweredStep, env: dict[str, Any], states: _States, half: bool, observer: observe.Observer | None
) -> tuple[Tensor, ...]:
    test, body = step.blocks
    values = tuple(value_of(step.args[0], env))
    for _ in range(MAX_ITERATIONS):
        inner = dict(env) | dict(zip(test.inputs, values, strict=True))
        if not bool(_run_block(test, inner, states, half, observer)[0]):
            return values
        inner = dict(env) | dict(zip(body.inputs, values, strict=True))
        values = _run_block(body, inner, states, half, observer)
    raise ExecutionError(f"while_loop '{step.op.name}' did not end after {MAX_ITERATIONS} iterations")


class _Tracer:
    """One interpreted run that writes down the lines of a plan."""

    def __init__(self, half: bool, states: _States, fuses: bool) -> None:
        self.half = half
        self.fuses = fuses
        self.states = states
        self.lines: list[CodeLine] = []
        self.outputs: tuple[Arg, ...] = ()
        self.inputs: tuple[Tensor, ...] = ()
        self.constants: set[int] = set()  # addresses of the memory of the program's constants
        self.known: dict[str, Const] = {}
        self.writes: dict[int, MaskedWrite] = {}
        self.seen: set[str] = set()  # what further steps share: the rows of masks, and inputs in fixed point
        self.unstable: set[str] = set()  # values whose shape or owner may be another in the next run of these shapes

    def run(self, block: Lowered, env: dict[str, Any]) -> tuple[Tensor, ...]:
        self.inputs = tuple(env.values())
        self.constants = {_memory(const.value) for step in block.steps for const in _constants(step.args)}
        self.writes = find_masked_writes(block) if self.fuses else {}
        wanted = used([arg for write in self.writes.values() for arg in (write.mask, write.new)])  # small, and later
        for index, step in enumerate(block.steps):
            results = _run_step(step, env, self.states, self.half)
            env.update({out.name: value for out, value in zip(step.outputs, results, strict=True)})
            self._record(step, env, results)
            for name in set(block.dying.get(index, ())) - wanted:
                env.pop(name, None)
        taken = self._taken()
        self.outputs = tuple(self._result(self._fold(arg), env, taken) for arg in block.outputs)
        return tuple(value_of(arg, env) for arg in self.outputs)

    def _taken(self) -> set[int]:
        """Return the addresses of the memory of inputs, constants and present states.

        A state that was written anew no longer owns its old memory, which may already hold another result.
        """
        owners = (*self.inputs, *self.states.values(), *(const.value for const in self.known.values()))
        return self.constants | {_memory(owner) for owner in owners if isinstance(owner, Tensor)}

    def _result(self, arg: Arg, env: dict[str, Any], taken: set[int]) -> Arg:
        """Return an output; a copy if the output's memory belongs to something else, or might do so in another run.

        Args:
            arg: the output.
            env: values by name.
            taken: addresses of memory that belongs to something else; the output's own address is added.
        """
        value = value_of(arg, env)
        if not isinstance(value, Tensor):
            return arg
        name = arg.name if isinstance(arg, Ref) else f"constant{len(self.lines)}"
        if _memory(value) not in taken and name not in self.unstable and isinstance(arg, Ref):
            taken.add(_memory(value))
            return arg
        copy = Ref(f"{COPY}{name}")
        while copy.name in env:  # one value may be several outputs
            copy = Ref(f"{COPY}{copy.name}")
        self.lines.append(CodeLine((copy.name,), _owned, (arg,)))
        env[copy.name] = _owned(value)
        return copy

    def _record(self, step: LoweredStep, env: dict[str, Any], results: tuple[Any, ...]) -> None:
        args = tuple(self._fold(arg) for arg in step.args)
        names = used(args)
        write = self.writes.get(id(step))
        if write is not None:
            fused = masked_write_lines(write, env, self.states[write.state], self.seen, self.half)
            if fused is not None:
                self.lines.extend(fused)
                return
        if step.kernel is None:
            unsettled = bool(step.blocks)
            self.lines.append(self._control_line(step, args, env))
        elif (step.kernel.shape_only and not self.unstable & names) or (not names and not step.kernel.impure):
            self.known.update({out.name: Const(value) for out, value in zip(step.outputs, results, strict=True)})
            return
        else:
            dynamic = any(
                p.kind == "plain" and isinstance(a, Ref) for p, a in zip(step.kernel.params, args, strict=True)
            )
            unsettled = step.kernel.data_shape or dynamic or bool(self.unstable & names)
            folded = LoweredStep(step.op, step.kernel, args, step.outputs)
            shared = [] if unsettled or self.half else fixed_point_lines(folded, env, results[0], self.seen)
            self.lines.extend(shared or [specialise(folded, env, results, stable=not unsettled, half=self.half)])
        if unsettled:
            self.unstable.update(out.name for out in step.outputs)

    def _fold(self, arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return self.known.get(arg.name, arg)
        return tuple(self._fold(item) for item in arg) if isinstance(arg, tuple) else arg

    def _control_line(self, step: LoweredStep, args: tuple[Arg, ...], env: dict[str, Any]) -> CodeLine:
        targets = tuple(out.name for out in step.outputs)
        if step.op.kind == "read_state":
            return CodeLine(targets, None, (), state=_state_name(step))
        if step.op.kind == "write_state":
            copy = None if self._is_fresh(value_of(step.args[1], env), step) else _owned
            return CodeLine(targets, copy, (args[1],), state=_state_name(step))
        captured = tuple(arg.name for arg in step.args[1:] if isinstance(arg, Ref))
        known = {name: const.value for name, const in self.known.items()}
        half, inner = (
            self.half,
            LoweredStep(step.op, None, (_placeholders(step.args[0]), *step.args[1:]), step.outputs, step.blocks),
        )

        def run_control(states: _States, heads: list[Tensor], *values: Tensor) -> tuple[Tensor, ...]:
            env: dict[str, Any] = known | dict(zip(captured, values, strict=True))
            env.update({f"{HEAD}{i}": value for i, value in enumerate(heads)})
            return _run_step(inner, env, states, half)

        return CodeLine(targets, run_control, args, tupled=True, needs_states=True)

    def _is_fresh(self, value: Tensor, step: LoweredStep) -> bool:
        """Return whether a value to be stored owns its memory in every run.

        Neither a constant, nor (a view of) an input or another value.
        """
        source, storage = step.args[1], value.untyped_storage()
        whole = storage.nbytes() == value.numel() * value.element_size() and value.is_contiguous()
        stable = isinstance(source, Ref) and source.name not in self.unstable
        return stable and whole and _memory(value) not in self._taken()


HEAD, COPY = "\0head", "\0copy "  # no MIL name begins so


def _memory(value: Tensor) -> int:
    """Return the address of a tensor's memory; views of one tensor have the same address."""
    return value.untyped_storage().data_ptr()


def _constants(args: Iterable[Arg]) -> Iterator[Const]:
    """Yield the arguments that are tensors and known before a run."""
    for arg in args:
        if isinstance(arg, tuple):
            yield from _constants(arg)
        elif isinstance(arg, Const) and isinstance(arg.value, Tensor):
            yield arg


def _placeholders(heads: Arg) -> Arg:
    count = len(heads) if isinstance(heads, tuple) else 1
    return tuple(Ref(f"{HEAD}{i}") for i in range(count))


def declared_types(function: Function) -> dict[str, TensorType]:
    """Return the declared tensor type of every name of a function's outermost block, parameters included."""
    items = [*function.inputs, *(out for op in function.block.ops for out in op.outputs)]
    return {item.name: item.type for item in items if isinstance(item.type, TensorType)}
