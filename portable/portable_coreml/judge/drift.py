"""What fp16 costs a function: each operation's own error and what has added up before it, and what leaves fp16's range.

Three runs go through the function side by side. One computes in fp32. One rounds as fp16 does, and shows the total
error. The third rounds too, but each of its operations is given what the first run computed, rounded to fp16: the best
that any program could give it. What is still wrong with its result is the operation's own error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from portable_coreml.errors import ExecutionError, PortableError, first_line
from portable_coreml.files.blob import WeightLoader
from portable_coreml.files.model import LoadedModel, pick_function
from portable_coreml.program import TensorType
from portable_coreml.run.execute import Executable, walk
from portable_coreml.run.lowered import Ref, round_half
from portable_coreml.run.observe import FirstNonFinite, NonFinite
from portable_coreml.run.pieces import one_thread
from portable_coreml.run.signature import Signature, to_tensor

NORMAL = 2.0**-14  # the least normal number of fp16: below it there are fewer digits, and some hardware takes zero
States = dict[str, Tensor]


@dataclass(frozen=True)
class OpDrift:
    """One floating-point result of a function's outermost block.

    Attributes:
        output: its name.
        kind: the type of the operation that gives it.
        dtype: the type that the program declares for it.
        total: its error in fp16, as `gap`; infinite if fp16 is not finite where fp32 is.
        own: the same if what the operation takes is as good as fp16 can hold it.
        largest: the largest finite magnitude in fp32.
        subnormal: the error if numbers below fp16's normal ones were taken for zero.
        finite: whether all numbers are finite in fp32.
        state: "" if fp16 is finite where fp32 is, else "overflow" (infinities only) or "NaN".
    """

    output: str
    kind: str
    dtype: str
    total: float
    own: float
    largest: float
    subnormal: float
    finite: bool
    state: str


class Case:
    """One function of a model, lowered in fp32 and in a precision that rounds."""

    def __init__(self, model: LoadedModel, name: str, precision: str = "fp16") -> None:
        """Lower the function. Raises PortableError if it can't be lowered, as for an operation without a kernel."""
        self.function, self.description = pick_function(model, name)
        loader = WeightLoader(model.model_dir)
        self.exact = Executable(self.function, loader, "fp32", loader.place)
        self.half = Executable(self.function, loader, precision, loader.place)

    def tensors(self, data: Mapping[str, Any], executable: Executable) -> dict[str, Tensor]:
        """Return arrays by name as a function takes them; images are arrays of pixels here. Raises InputError."""
        signature = Signature(self.function, self.description, executable.inputs, executable.half)
        pixels = {item.name: item for item in executable.inputs if item.name in signature.images and item.name in data}
        signature.params = tuple(item for item in executable.inputs if item.name not in pixels)
        made = signature.convert(data)
        for name, item in pixels.items():
            assert isinstance(item.type, TensorType)
            made[name] = to_tensor(data[name], item.type, name, executable.half)
        return made

    def filled_states(self, data: Mapping[str, Any]) -> States:
        """Return the states after one prediction in fp32 from zeros: a cache that nobody has written hides faults."""
        states = self.exact.new_state()
        if states:
            for _ in self._walk(self.exact, data, states):
                pass
        return states

    def drift(self, data: Mapping[str, Any], before: States) -> list[OpDrift]:
        """Return one row for each floating-point result, in program order.

        Args:
            data: the inputs.
            before: the states, as `filled_states` returns them.

        Raises:
            InputError: the inputs don't fit.
            ExecutionError: an operation fails.
        """
        rows: list[OpDrift] = []
        halves = {name: _rounded(value, self.half.states[name]) for name, value in before.items()}
        total, alone = (iter(self._walk(self.half, data, dict(halves))) for _ in range(2))
        step_of_total, step_of_own = next(total, None), next(alone, None)
        for step, exact, _ in self._walk(self.exact, data, dict(before)):
            if step_of_total is None or step_of_own is None or step_of_total[0].op is not step.op:
                continue  # a constant that is kept as it is stored in one of the precisions alone
            for out, *values in zip(step.outputs, exact, step_of_total[1], step_of_own[1], strict=True):
                if isinstance(values[0], Tensor):
                    step_of_own[2][out.name] = _rounded(values[0], out.type)
                    if values[0].is_floating_point():
                        rows.append(_row(out.name, step.op.kind, out.type, *values))
            step_of_total, step_of_own = next(total, None), next(alone, None)
        return rows

    def values(self, data: Mapping[str, Any], before: States) -> dict[str, tuple[str, Tensor]]:
        """Return name -> (type of the operation, value) of every result in fp32, inputs included, in program order."""
        computed: dict[str, tuple[str, Tensor]] = {}
        for name, value in self.tensors(data, self.exact).items():
            computed[name] = "input", value
        for step, results, _ in self._walk(self.exact, data, dict(before)):
            for out, value in zip(step.outputs, results, strict=True):
                if isinstance(value, Tensor):
                    computed[out.name] = step.op.kind, value.clone()
        return computed

    def not_finite(self, data: Mapping[str, Any], before: States, half: bool) -> NonFinite | None:
        """Return the first operation whose result is not finite, in fp16 or in fp32, if an output is not finite either.

        A mask of -inf that disappears in a softmax is no fault.
        """
        executable, first, spoilt = self.half if half else self.exact, FirstNonFinite(), FirstNonFinite()
        states = {name: _rounded(v, executable.states[name]) if half else v for name, v in before.items()}
        for step, results, _ in self._walk(executable, data, states):
            for out, value in zip(step.outputs, results, strict=True):
                if isinstance(value, Tensor):
                    first(out.name, step.op.kind, value)
                    if out.name in self.outputs():
                        spoilt(out.name, step.op.kind, value)
        return first.found if spoilt.found else None

    def outputs(self) -> tuple[str, ...]:
        """Return the names of the values that the function returns, as its operations call them."""
        return tuple(arg.name for arg in self.exact.lowered.outputs if isinstance(arg, Ref))

    def _walk(self, executable: Executable, data: Mapping[str, Any], states: States) -> Any:
        """Yield (operation, its results, all values that it may still change) as they run."""
        env: dict[str, Any] = dict(self.tensors(data, executable))
        running = walk(executable.lowered, env, states, executable.half)
        while True:
            with torch.inference_mode(), one_thread():
                try:
                    step, results = next(running)
                except StopIteration:
                    return
                except PortableError:
                    raise
                except (RuntimeError, ValueError, TypeError, IndexError) as error:
                    raise ExecutionError(f"it can't be computed: {first_line(error)}") from error
            yield step, results, env


def gap(exact: Tensor, other: Tensor) -> float:
    """Return the size of the difference relative to the size of `exact`, both as roots of sums of squares.

    Infinite if the numbers of elements differ, or one is finite where the other is not. If `exact` is all zeros, the
    size of the difference itself.
    """
    a, b = exact.reshape(-1).double(), other.reshape(-1).double()
    finite = a.isfinite()
    if a.numel() != b.numel() or not torch.equal(finite, b.isfinite()):
        return float("inf")
    size, difference = float(a[finite].norm()), float((a[finite] - b[finite]).norm())
    return difference / size if size else difference


def percent(share: float) -> str:
    """Return a gap in words."""
    return "without bound" if math.isinf(share) else f"{share:.2%}" if share >= 1e-4 or not share else f"{share:.1e}"


def _rounded(value: Tensor, kind: Any) -> Tensor:
    return round_half(value) if isinstance(kind, TensorType) and kind.dtype == "fp16" else value


def _row(name: str, op: str, kind: Any, exact: Tensor, total: Tensor, alone: Tensor) -> OpDrift:
    dtype = kind.dtype if isinstance(kind, TensorType) else ""
    finite = exact[exact.isfinite()].double()
    small = finite[finite.abs() < NORMAL] if dtype == "fp16" else finite[:0]
    size = float(finite.norm())
    state = (
        "" if bool((total.isfinite() | ~exact.isfinite()).all()) else "NaN" if bool(total.isnan().any()) else "overflow"
    )
    return OpDrift(
        name,
        op,
        dtype,
        gap(exact, total),
        gap(exact, alone),
        float(finite.abs().max()) if finite.numel() else 0.0,
        float(small.norm()) / size if size else 0.0,
        finite.numel() == exact.numel(),
        state,
    )
