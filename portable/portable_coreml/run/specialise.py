"""Picks, for one step and its observed shapes, the cheapest callable that computes the same result.

On small models the cost of an operation is the cost of calling it. Therefore plain arguments are bound in advance,
views go straight to torch, and a 1x1 convolution becomes one matrix product. Only shapes decide; values never do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.program import TensorType
from portable_coreml.run.codegen import CodeLine
from portable_coreml.run.lowered import Arg, Const, LoweredStep, Ref, call_kernel, kernel_values, round_half, value_of
from portable_coreml.run.ops import Kernel
from portable_coreml.run.products import by_fours

_Fast = tuple[Callable[..., Any], tuple[Arg, ...]]
_Chooser = Callable[[dict[str, Any], dict[str, Arg], Sequence[Tensor]], _Fast | None]


def specialise(
    step: LoweredStep, env: Mapping[str, Any], results: Sequence[Tensor], stable: bool, half: bool
) -> CodeLine:
    """Return the plan's line for a step that was just run in `env` and gave `results`.

    `stable`: shapes will be the same in every run of this plan, so they may be bound.
    """
    assert step.kernel is not None
    values = kernel_values(step, env)
    names = [param.name for param in step.kernel.params]
    choice = None
    if stable and step.kernel.kind in _CHOOSERS:
        choice = _CHOOSERS[step.kernel.kind](
            dict(zip(names, values, strict=True)), dict(zip(names, step.args, strict=True)), results
        )
    targets = tuple(out.name for out in step.outputs)
    if choice is not None:
        call, args = choice
        raw = call(*(value_of(arg, env) for arg in args))
        return CodeLine(targets, call, args, _posts(step, raw, half), isinstance(raw, (tuple, list)))
    raw = step.kernel.call(*values)
    pairs = enumerate(zip(step.kernel.params, step.args, strict=True))
    plain = frozenset(i for i, (param, arg) in pairs if param.kind == "plain" and isinstance(arg, Ref))
    grows = step.kernel.grows and not stable
    call = partial(_grown, step.kernel) if grows else step.kernel.call
    return CodeLine(targets, call, step.args, _posts(step, raw, half), isinstance(raw, (tuple, list)), plain)


def _grown(kernel: Kernel, *values: Any) -> Any:
    return call_kernel(kernel, values)


def _posts(step: LoweredStep, raw: Any, half: bool) -> tuple[Callable[[Tensor], Tensor] | None, ...]:
    assert step.kernel is not None
    posts: list[Callable[[Tensor], Tensor] | None] = []
    for value, out in zip(raw if isinstance(raw, (tuple, list)) else (raw,), step.outputs, strict=True):
        if not isinstance(out.type, TensorType) or not isinstance(value, Tensor):
            posts.append(None)  # a class label or its probabilities
            continue
        held = BY_NAME[out.type.dtype].torch
        if half and out.type.dtype == "fp16" and not (step.kernel.exact and value.dtype == held):
            posts.append(round_half)
        else:
            posts.append(None if value.dtype == held else _caster(held))
    return tuple(posts)


def _caster(held: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda value: value.to(held)


def _view(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
    """Return one reshape, to the shape of the result, in place of reshape, squeeze and expand_dims."""
    return torch.reshape, (args["x"], Const(tuple(results[0].shape)))


def _transpose(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
    return torch.permute, (args["x"], Const(tuple(values["perm"])))


def _softmax(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
    return torch.softmax, (args["x"], Const(values["axis"]))


def _reduce(function: Callable[..., Tensor]) -> _Chooser:
    def choose(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
        x = values["x"]
        if not x.is_floating_point():
            return None
        axes = range(x.dim()) if values["axes"] is None else values["axes"]
        return function, (args["x"], Const(tuple(int(a) for a in axes)), Const(bool(values["keep_dims"])))

    return choose


def _concat(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
    if values["interleave"] or not isinstance(args["values"], tuple) or values["values"][0].dim() == 0:
        return None
    return _cat, (args["axis"], *args["values"])


def _cat(axis: int, *parts: Tensor) -> Tensor:
    return torch.cat(parts, axis)


def _split(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
    sizes = tuple(part.shape[values["axis"]] for part in results)
    return torch.split_with_sizes, (args["x"], Const(sizes), Const(values["axis"]))  # what torch.split calls


def _matmul(plain: Callable[..., Tensor], transposed: Callable[..., Tensor]) -> _Chooser:
    def choose(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
        x, y = values["x"], values["y"]
        if x.dtype != y.dtype or values["transpose_x"] or x.dim() < 2 or y.dim() < 2:
            return None
        return (transposed if values["transpose_y"] else plain), (args["x"], args["y"])

    return choose


def _matmul_nt(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x, y.mT)


def _wide_matmul(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x.double(), y.double())


def _wide_matmul_nt(x: Tensor, y: Tensor) -> Tensor:
    return torch.matmul(x.double(), y.double().mT)


def _wide(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return torch.sum or torch.mean, in float64."""
    return lambda x, axes, keep: function(x, axes, keep, dtype=torch.float64)


def _pointwise(steady: bool) -> _Chooser:
    """Return a 1x1 convolution of one image with a constant matrix (products.py): one product."""

    def choose(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
        x, matrix = values["x"], values["weight"].flatten(1)
        if x.shape[0] != 1:
            return None
        columns, shape = x.numel() // x.shape[1], tuple(results[0].shape)
        if columns == 1 and not steady:
            return _vector_product(matrix, values["bias"], shape), (args["x"],)
        return _tokens_product(matrix, values["bias"], shape, columns, steady), (args["x"],)

    return choose


def _vector_product(matrix: Tensor, bias: Tensor | None, shape: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    size = (matrix.shape[1],)
    if bias is None:
        return lambda x: torch.mv(matrix, x.reshape(size)).view(shape)
    return lambda x: torch.addmv(bias, matrix, x.reshape(size)).view(shape)


def _tokens_product(
    matrix: Tensor, bias: Tensor | None, shape: tuple[int, ...], columns: int, steady: bool
) -> Callable[[Tensor], Tensor]:
    rows, across = (matrix.shape[1], columns), matrix.t()
    strides = torch.empty(columns, len(matrix)).t().view(shape).stride()
    widen = by_fours if steady and columns % 4 else None

    def call(x: Tensor) -> Tensor:
        tokens = x.reshape(rows).t() if widen is None else widen(x.reshape(rows).t())
        y = torch.mm(tokens, across) if bias is None else torch.addmm(bias, tokens, across)
        return y.as_strided(shape, strides)

    return call


def _slice(values: dict[str, Any], args: dict[str, Arg], results: Sequence[Tensor]) -> _Fast | None:
    """Return a narrow in place of a slice of one axis with step 1."""
    x, stride = values["x"], values["stride"]
    if (stride is not None and any(s != 1 for s in stride)) or (values["squeeze_mask"] and any(values["squeeze_mask"])):
        return None
    changed = [axis for axis in range(x.dim()) if results[0].shape[axis] != x.shape[axis]]
    if not changed:
        return torch.Tensor.view_as, (args["x"], args["x"])
    if len(changed) > 1 or results[0].shape[changed[0]] == 0:
        return None
    axis = changed[0]
    free = values["begin_mask"] is not None and values["begin_mask"][axis]
    start = 0 if free else int(values["begin"][axis])
    start = start + x.shape[axis] if start < 0 else start
    return torch.narrow, (args["x"], Const(axis), Const(start), Const(results[0].shape[axis]))


_CHOOSERS: dict[str, _Chooser] = {
    "reshape": _view,
    "squeeze": _view,
    "expand_dims": _view,
    "transpose": _transpose,
    "softmax": _softmax,
    "reduce_sum": _reduce(torch.sum),
    "reduce_mean": _reduce(torch.mean),
    "reduce_max": _reduce(torch.amax),
    "reduce_min": _reduce(torch.amin),
    "concat": _concat,
    "split": _split,
    "matmul": _matmul(torch.matmul, _matmul_nt),
    "wide_matmul": _matmul(_wide_matmul, _wide_matmul_nt),
    "wide_reduce_sum": _reduce(_wide(torch.sum)),
    "wide_reduce_mean": _reduce(_wide(torch.mean)),
    "plain_conv": _pointwise(steady=False),
    "steady_conv": _pointwise(steady=True),
    "slice_by_index": _slice,
}
