"""The steps of a lowered program, and how one step is computed.

A step is a kernel with resolved arguments: constants, or references to values of the run. Results are brought to
the type that the program declares for them; in fp16 mode that includes rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import ExecutionError, PortableError, first_line
from portable_coreml.program import Named, Op, TensorType
from portable_coreml.run.ops import Kernel

MAX_ELEMENTS = 1 << 28  # no activation comes near: 1 GiB as it is held


@dataclass(frozen=True)
class Ref:
    """A value that exists only while the program runs."""

    name: str


@dataclass(frozen=True, eq=False)
class Const:
    """A value known now: a tensor in its held type, or a plain Python value."""

    value: Any


Arg = Ref | Const | tuple["Arg", ...]


@dataclass(frozen=True, eq=False)
class LoweredStep:
    """One operation ready to run.

    `blocks` holds the lowered blocks of control flow; `args` are then the values that the blocks capture.
    """

    op: Op
    kernel: Kernel | None
    args: tuple[Arg, ...]
    outputs: tuple[Named, ...]
    blocks: tuple[Lowered, ...] = ()


@dataclass(frozen=True, eq=False)
class Lowered:
    """A block ready to run: parameters, steps, results, and the names it takes from the blocks around it."""

    inputs: tuple[str, ...]
    steps: tuple[LoweredStep, ...]
    outputs: tuple[Arg, ...]
    captured: tuple[str, ...] = ()

    @cached_property
    def dying(self) -> Mapping[int, list[str]]:
        """Return the index of a step -> the values that nothing needs after it."""
        outputs = used(self.outputs)
        last = last_mentions([used(step.args) | {out.name for out in step.outputs} for step in self.steps])
        return {index: [name for name in names if name not in outputs] for index, names in last.items()}


def used(args: Sequence[Arg]) -> set[str]:
    """Return the names of run-time values among arguments."""
    return set(mentions(args))


def mentions(args: Sequence[Arg]) -> list[str]:
    """Return the names of run-time values among arguments, as often as they stand there."""
    names: list[str] = []
    for arg in args:
        names += mentions(arg) if isinstance(arg, tuple) else [arg.name] if isinstance(arg, Ref) else []
    return names


def last_mentions(by_step: Sequence[set[str]]) -> dict[int, list[str]]:
    """Return the index of a step -> the names that no later step mentions, given the names each step mentions."""
    last = {name: index for index, names in enumerate(by_step) for name in names}
    by_index: dict[int, list[str]] = {}
    for name, index in last.items():
        by_index.setdefault(index, []).append(name)
    return by_index


def value_of(arg: Arg, env: Mapping[str, Any]) -> Any:
    """Return the present value of an argument."""
    if isinstance(arg, Const):
        return arg.value
    if isinstance(arg, Ref):
        return env[arg.name]
    return [value_of(item, env) for item in arg]


def kernel_values(step: LoweredStep, env: Mapping[str, Any]) -> list[Any]:
    """Return a kernel's arguments; plain arguments that the program computed become Python values."""
    assert step.kernel is not None
    values = []
    for param, arg in zip(step.kernel.params, step.args, strict=True):
        value = value_of(arg, env)
        values.append(value.tolist() if param.kind == "plain" and isinstance(value, Tensor) else value)
    return values


def evaluate(step: LoweredStep, values: Sequence[Any], half: bool) -> tuple[Any, ...]:
    """Run one kernel and brings its results to their declared types. Raises ExecutionError naming the operation."""
    assert step.kernel is not None
    try:
        results = call_kernel(step.kernel, values)
        results = results if isinstance(results, (tuple, list)) else (results,)
        check_number(results, step.outputs)
        return tuple(settle(r, out, half) for r, out in zip(results, step.outputs, strict=True))
    except PortableError:
        raise
    except Exception as error:
        name = step.outputs[0].name
        raise ExecutionError(f"operation '{step.op.kind}' (output '{name}') failed: {first_line(error)}") from error


def call_kernel(kernel: Kernel, values: Sequence[Any]) -> Any:
    """Call a kernel. If its arguments decide how large the result is, the size is checked first."""
    if kernel.grows:
        for ghost in _ghosts(kernel, values):
            _check_size(ghost, f"the result of {kernel.kind}")
    return kernel.call(*values)


def _ghosts(kernel: Kernel, values: Sequence[Any]) -> Sequence[Tensor]:
    """Return the results without data, or none if torch needs the data to tell their shapes."""
    try:
        with torch.device("meta"):
            ghosts = kernel.call(*(without_data(value) for value in values))
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or "meta" in str(error):
            return ()
        raise
    return ghosts if isinstance(ghosts, (tuple, list)) else (ghosts,)


def without_data(argument: Any) -> Any:
    """Return an argument of a kernel with its tensors on torch's "meta" device."""
    if isinstance(argument, Tensor):
        return argument.to("meta")
    if isinstance(argument, list) and any(isinstance(item, Tensor) for item in argument):
        return [item.to("meta") for item in argument]
    return argument


def settle(result: Tensor, declared: Named, half: bool) -> Tensor:
    """Return `result` in the type of its declaration, rounded to fp16 if that is declared and `half` is true."""
    kind = declared.type
    if not isinstance(kind, TensorType) or kind.dtype == "string" or not isinstance(result, Tensor):
        return result  # a class label or its probabilities
    check_shape(result, kind, declared.name)
    if half and kind.dtype == "fp16":
        return round_half(result)
    dtype = BY_NAME[kind.dtype].torch
    return result if result.dtype == dtype else result.to(dtype)


def round_half(value: Tensor) -> Tensor:
    """Return the nearest fp16 value, held in float32."""
    return value.half().float()  # to(dtype) twice takes twice as long


def check_number(results: Sequence[Any], declared: Sequence[Named]) -> None:
    """Raise ExecutionError if an operation gives more or fewer values than the program names."""
    if len(results) != len(declared):
        names = ", ".join(f"'{item.name}'" for item in declared) or "none"
        raise ExecutionError(f"an operation gives {len(results)} values, the program names {len(declared)}: {names}")


def _check_size(result: Tensor, what: str) -> None:
    """Raise ExecutionError if a value is absurdly large."""
    if result.numel() > MAX_ELEMENTS:
        raise ExecutionError(f"{what} of shape {list(result.shape)} is larger than {MAX_ELEMENTS} elements")


def check_shape(result: Tensor, declared: TensorType, name: str) -> None:
    """Raise ExecutionError if a computed shape contradicts the declared one, or is absurdly large."""
    _check_size(result, f"value '{name}'")
    if declared.variadic:
        return
    fits = len(result.shape) == len(declared.shape) and all(
        want is None or want == got for want, got in zip(declared.shape, result.shape, strict=True)
    )
    if not fits:
        raise ExecutionError(
            f"value '{name}' has shape {list(result.shape)}, the program declares {list(declared.shape)}"
        )
