"""Recognises the masked cache write and does it in place, with the values that its formula gives.

The formula is  s * (1 - sum(mask, -1)) + mask @ new,  written back to the state s. Suppose every column of the mask is
one-hot, and `new` and the rows it replaces are finite. The formula then replaces the T selected rows and keeps the
other rows, so only the selected rows are written. In any other case the formula is computed, since 0 * inf is NaN in
the formula, as on a device. An overflow in `new` spreads over all rows, and an overflow in a replaced row stays there.

States are changed in place only if every write of the function has this form, so that no two states share memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_coreml.run.lowered import Arg, Const, Lowered, LoweredStep, Ref, mentions, round_half
from portable_coreml.run.plan import CodeLine
from portable_coreml.run.products import WIDE

States = dict[str, Tensor]
_Index = tuple[EllipsisType, slice | list[int], slice]  # of numpy
ROWS = "\0rows "  # no MIL name begins so


@dataclass(frozen=True, eq=False)
class MaskedWrite:
    """One write: the state, the one-hot mask [.., S, T], the new rows [.., T, D] or transposed, the formula's type."""

    state: str
    mask: Ref
    new: Arg
    transposed: bool
    dtype: str


def find_masked_writes(block: Lowered) -> dict[int, MaskedWrite]:
    """Return id of a write_state step -> its masked write; empty unless every write of the block has the form."""
    makers = {out.name: step for step in block.steps for out in step.outputs}
    uses = Counter(name for step in block.steps for name in mentions(step.args)) + Counter(mentions(block.outputs))
    writes = [step for step in block.steps if step.kernel is None and step.op.kind == "write_state"]
    matches: dict[int, MaskedWrite] = {}
    for step in writes:
        match = _match(step, makers, uses)
        if match is None or match.state in {m.state for m in matches.values()} or _reads_before(step, block) > 1:
            return {}
        matches[id(step)] = match
    return {} if any(step.blocks for step in block.steps) else matches


def _reads_before(write: LoweredStep, block: Lowered) -> int:
    """Return how often the state of a write is read before it.

    A second reader must not see the state change in place.
    """
    before = block.steps[: block.steps.index(write)]
    return sum(step.op.kind == "read_state" and step.args[0] == write.args[0] for step in before)


def _match(write: LoweredStep, makers: Mapping[str, LoweredStep], uses: Mapping[str, int]) -> MaskedWrite | None:
    state, data = write.args
    assert isinstance(state, Ref)
    total = _maker(data, "add", makers, uses)
    dtype = getattr(total.op.outputs[0].type, "dtype", "") if total is not None else ""
    for old, fresh in _orders(total):
        scaled, product = _maker(old, "mul", makers, uses), _maker(fresh, "matmul", makers, uses)
        if scaled is None or product is None or _flag(product.args[2]) is not False:
            continue
        (mask, new), transposed = product.args[:2], _flag(product.args[3])
        for read, keep in _orders(scaled):
            source = _maker(read, "read_state", makers, uses)
            if source is None or source.args[0] != state or not isinstance(keep, Ref) or not isinstance(mask, Ref):
                continue
            if transposed is not None and _is_complement(keep, mask, makers):
                return MaskedWrite(state.name, mask, new, transposed, dtype)
    return None


def _maker(arg: Arg, kind: str, makers: Mapping[str, LoweredStep], uses: Mapping[str, int]) -> LoweredStep | None:
    """Return the step that makes a value, if it is of that kind and nothing else uses the value."""
    step = makers.get(arg.name) if isinstance(arg, Ref) and uses[arg.name] == 1 else None
    return step if step is not None and step.op.kind == kind else None


def _orders(step: LoweredStep | None) -> list[tuple[Arg, Arg]]:
    return [] if step is None else [(step.args[0], step.args[1]), (step.args[1], step.args[0])]


def _flag(arg: Arg) -> bool | None:
    return bool(arg.value) if isinstance(arg, Const) else None


def _is_complement(keep: Ref, mask: Ref, makers: Mapping[str, LoweredStep]) -> bool:
    """Return whether `keep` is 1 minus the sum of `mask` over its last axis."""
    sub = makers.get(keep.name)
    if sub is None or sub.op.kind != "sub" or not isinstance(sub.args[0], Const) or not isinstance(sub.args[1], Ref):
        return False
    total = makers.get(sub.args[1].name)
    if total is None or total.op.kind != "reduce_sum" or not bool((sub.args[0].value == 1).all()):
        return False
    source, axes, keep_dims = total.args
    if source != mask or not isinstance(axes, Const) or not isinstance(keep_dims, Const) or not keep_dims.value:
        return False
    kind = total.op.outputs[0].type
    return axes.value in ([-1], [len(getattr(kind, "shape", ())) - 1])


def masked_write_lines(
    write: MaskedWrite, env: Mapping[str, Any], state: Tensor, seen: set[str], half: bool
) -> list[CodeLine] | None:
    """Return the plan's lines for one write, given this run's values; None where shapes don't fit."""
    state_rows, mask = env[write.mask.name].shape[-2], env[write.mask.name]
    new = env[write.new.name] if isinstance(write.new, Ref) else None
    if new is None or mask.numel() != mask.shape[-1] * state_rows or not _fits(write, new, state):
        return None
    rows = Ref(ROWS + write.mask.name)
    lines = []
    if rows.name not in seen:
        seen.add(rows.name)
        lines.append(CodeLine((rows.name,), _one_hot_rows, (write.mask,)))
    lines.append(CodeLine((), _writer(write, half), (rows, write.mask, write.new), tupled=True, needs_states=True))
    return lines


def _fits(write: MaskedWrite, new: Tensor, state: Tensor) -> bool:
    """Return whether the new rows have the state's shape, apart from their number."""
    shape = list(new.mT.shape if write.transposed else new.shape)
    return len(shape) == state.dim() and shape[:-2] == list(state.shape[:-2]) and shape[-1] == state.shape[-1]


def _one_hot_rows(mask: Tensor) -> _Index | None:
    """Return where a state [.., S, D] has the rows that a mask [.., S, T] selects.

    None if they repeat or it is not one-hot.

    It counts with numpy, whose calls take half as long as torch's on so few numbers.
    """
    flat = mask.numpy().reshape(-1, mask.shape[-1])
    rows: list[int] = flat.argmax(0).tolist()
    count = len(rows)
    if np.count_nonzero(flat) != count or any(flat.item(row, column) != 1 for column, row in enumerate(rows)):
        return None
    if count and rows == list(range(rows[0], rows[0] + count)):
        return (..., slice(rows[0], rows[0] + count), slice(None))  # a view; a list of rows would make a copy
    return (..., rows, slice(None)) if len(set(rows)) == count else None


def _writer(write: MaskedWrite, half: bool) -> Callable[..., tuple[()]]:
    state, transposed, formula = write.state, write.transposed, _formula(half and write.dtype == "fp16")

    def apply(states: States, rows: _Index | None, mask: Tensor, new: Tensor) -> tuple[()]:
        new = new.mT if transposed else new
        if rows is not None:
            stored, fresh = states[state].numpy(), new.numpy()
            # A factor that is inf or NaN makes the sum of products inf or NaN, so one product checks both arrays. If
            # a sum of finite numbers overflows, the formula is computed, which costs time and changes nothing.
            if math.isfinite(np.vdot(fresh, stored[rows])):
                stored[rows] = fresh
                return ()
        states[state] = formula(states[state], mask, new)
        return ()

    return apply


def _formula(rounded: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return the formula as the interpreter computes it: in fp16 mode every result is rounded."""
    if not rounded:
        return lambda old, mask, new: old * (1 - mask.sum(-1, keepdim=True)) + torch.matmul(mask, new)
    product, total = WIDE["matmul"].call, WIDE["reduce_sum"].call

    def call(old: Tensor, mask: Tensor, new: Tensor) -> Tensor:
        keep = round_half(1 - round_half(total(mask, [-1], True)))
        return round_half(round_half(old * keep) + round_half(product(mask, new)))

    return call
