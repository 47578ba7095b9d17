"""Finds the experts of a mixture in a program, and computes an expert only for the tokens that take it.

In a program every expert of a mixture runs for every token. It computes  down(hidden(x) * weight), where the weight is
0 for each token that does not take the expert. Zero times a finite number adds nothing, so these tokens are left out
as long as no number can be infinite. If a number could be infinite, the whole formula is computed, since 0 * inf is
NaN in the formula, as on a device. For the same reason this works in float32 only: an overflow in fp16 is known only
after the computation.

An expert by itself is  conv(chain * weight), where the chain is made number by number of products of one x, and the
weight has one channel. Experts of a group share their matrices:  conv(reshape(reshape(chain) * reshape(weight)) *
factor). Then the rows of the first matrices and the columns of the last are cut apart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from portable_coreml.program import TensorType
from portable_coreml.run.fixed_point import FixedPoint, to_fixed_point
from portable_coreml.run.lowered import Arg, Const, Lowered, LoweredStep, Ref, call_kernel, kernel_values, mentions
from portable_coreml.run.ops import Kernel, Param
from portable_coreml.run.products import BLOCK, WEIGHTS, matrix_in_fixed_point, product, takes_fixed_point
from portable_coreml.run.stored import StoredMatrix

LARGEST = 1e9  # bound of a first product: results of two such products, and a third power, are finite in float32
INT8_MAX = 128.0
Matrix = StoredMatrix | Tensor


@dataclass(frozen=True, eq=False)
class First:
    """The first matrix of each expert, the experts' biases [experts, rows], and the name of the product."""

    name: str
    matrices: tuple[Matrix, ...]
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    """Experts that run together.

    Attributes:
        first: the experts' first matrices.
        chain: the elementwise steps after the first products.
        factor: [experts, rows], multiplies the weighted results of the chain.
        down: the last matrix of each expert.
        bias: the bias of the sum, [out].
        most: the largest `reach` of a first matrix.
    """

    first: tuple[First, ...]
    chain: tuple[LoweredStep, ...]
    factor: Tensor | None
    down: tuple[Matrix, ...]
    bias: Tensor | None
    most: float

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return the sum of the experts' results.

        Args:
            x: [1, d, T, 1].
            weight: the experts' weights for every token, one expert after the other.

        Returns:
            [1, out, T, 1].
        """
        tokens = x.reshape(x.shape[1], -1).t()  # [T, d]
        shares = weight.reshape(len(self.down), -1)  # [experts, T]
        bounded = float(x.abs().max()) * self.most < LARGEST  # false for NaN
        taken = shares != 0 if bounded else torch.ones_like(shares, dtype=torch.bool)
        expert, at = taken.nonzero(as_tuple=True)  # N pairs, one expert after the other
        out = torch.zeros(len(tokens), height(self.down[0]))
        if len(at):
            counts: list[int] = taken.sum(1).tolist()
            hidden = self._hidden(tokens[at], expert, counts) * shares[expert, at][:, None]  # [N, rows]
            hidden = hidden if self.factor is None else hidden * self.factor[expert]
            out.index_add_(0, at, _by_expert(self.down, hidden, _fixed(hidden, self.down), counts))
        return (out if self.bias is None else out + self.bias).t()[None, :, :, None]

    def _hidden(self, tokens: Tensor, expert: Tensor, counts: Sequence[int]) -> Tensor:
        """Return tokens [N, d] after the first matrices and the chain: [N, rows]."""
        fixed = _fixed(tokens, [matrix for first in self.first for matrix in first.matrices])
        env: dict[str, Any] = {}
        for first in self.first:
            y = _by_expert(first.matrices, tokens, fixed, counts)
            env[first.name] = y if first.bias is None else y + first.bias[expert]
        for step in self.chain:
            assert step.kernel is not None
            env[step.outputs[0].name] = call_kernel(step.kernel, kernel_values(step, env))
        hidden: Tensor = env[self.chain[-1].outputs[0].name]
        return hidden


def _by_expert(matrices: Sequence[Matrix], rows: Tensor, fixed: FixedPoint | None, counts: Sequence[int]) -> Tensor:
    """Return each expert's rows through its matrix: [N, out]. The first counts[0] rows belong to the first expert."""
    made, begin = torch.empty(len(rows), height(matrices[0])), 0
    for matrix, count in ((matrix, count) for matrix, count in zip(matrices, counts, strict=True) if count):
        some = slice(begin, begin := begin + count)
        if fixed is not None and takes_fixed_point(matrix, count):
            assert isinstance(matrix, StoredMatrix)
            made[some] = matrix_in_fixed_point(matrix, fixed.rows(some))
        else:
            made[some] = product(matrix, rows[some].t(), steady=False).t()
    return made


def _fixed(rows: Tensor, matrices: Sequence[Matrix]) -> FixedPoint | None:
    """Return rows [N, in] in fixed point, for all experts at once, if a matrix takes them so."""
    return to_fixed_point(rows) if any(takes_fixed_point(matrix, 1) for matrix in matrices) else None


def height(matrix: Matrix) -> int:
    """Return how many rows a matrix has."""
    return len(matrix) if isinstance(matrix, Tensor) else len(matrix.values)


def reach(matrix: Matrix) -> float:
    """Return a bound of the product with a column whose numbers are at most 1 in magnitude.

    An int8 matrix is bounded by its scales, and not read. A matrix of fp16 numbers is read once, since any number
    may be 65504: with that bound, inputs of magnitude 4 and more would be taken for a cause of infinities.
    """
    if isinstance(matrix, StoredMatrix) and matrix.scale is not None:
        return matrix.values.shape[1] * INT8_MAX * float(matrix.scale.abs().max())
    values = matrix if isinstance(matrix, Tensor) else matrix.values
    sums = [rows.float().abs().sum(1).max() for rows in torch.split(values, max(1, BLOCK // values.shape[1]))]
    return float(torch.stack(sums).max())  # NaN if there is a NaN


KIND = "experts"
_PARAMS = tuple(Param(name, "tensor", Parameter.empty) for name in ("x", "weight"))
_PRODUCTS = frozenset({"plain_conv", "stored_conv"})
_BY_NUMBER = frozenset(
    ("add", "clip", "erf", "gelu", "maximum", "minimum", "mul", "relu", "sigmoid", "silu", "sub", "tanh")
)
_IMAGE = 4  # axes
LEAST = 1 << 18  # numbers in an expert's first matrix: with fewer, calling it costs more than computing it for all


@dataclass(frozen=True)
class _Walk:
    """A walk from a value back to the steps that compute it.

    Attributes:
        makers: the step that computes each value.
        uses: how often each value is used.
        taken: the steps on the walk so far.
    """

    makers: Mapping[str, LoweredStep]
    uses: Mapping[str, int]
    taken: list[LoweredStep] = field(default_factory=list)

    def sole(self, arg: Arg, kind: str) -> LoweredStep | None:
        """Return the step that computes a value, if the step is of that kind and the value is used only once."""
        step = self.makers.get(arg.name) if isinstance(arg, Ref) and self.uses[arg.name] == 1 else None
        if step is None or step.op.kind != kind:
            return None
        self.taken.append(step)
        return step

    def through(self, arg: Arg, *kinds: str) -> Arg:
        """Return the value before a chain of steps of these kinds, last step first, along their first arguments."""
        for kind in kinds:
            step = self.sole(arg, kind)
            if step is None:
                return Const(None)
            arg = step.args[0]
        return arg


@dataclass(frozen=True)
class _Weighed:
    """The inputs of the last product: the chain's result, the weights, the number of experts, and their factor."""

    hidden: Arg
    weight: Arg
    count: int
    factor: Tensor | None = None


def skip_unchosen(block: Lowered) -> Lowered:
    """Return a block with the same results, in which recognised experts run only for the tokens that take them."""
    if any(step.blocks for step in block.steps):
        return block
    makers = {out.name: step for step in block.steps for out in step.outputs}
    uses = Counter(mentions(block.outputs)) + Counter(n for step in block.steps for n in mentions(step.args))
    instead: dict[int, LoweredStep | None] = {}
    for step in block.steps:
        walk = _Walk(makers, uses)
        made = _together(step, walk) if _is_product(step) else None
        if made is not None:
            instead |= dict.fromkeys(map(id, walk.taken)) | {id(step): made}
    steps = (instead.get(id(step), step) for step in block.steps)
    return replace(block, steps=tuple(step for step in steps if step is not None))


def _together(down: LoweredStep, walk: _Walk) -> LoweredStep | None:
    """Return one step for the experts that end with the product `down`, or None."""
    weighed = _alone(down, walk) or _grouped(down, walk)
    chain = None if weighed is None else _chain(weighed.hidden, walk)
    if weighed is None or chain is None or not isinstance(weighed.weight, Ref):
        return None
    firsts = [step for step in chain if _is_product(step)]
    x = _argument(firsts[0], "x")
    if any(_argument(step, "x") != x for step in firsts) or not isinstance(x, Ref):
        return None
    if min(math.prod(_extents(_matrix(step))) for step in firsts) < LEAST * weighed.count:
        return None
    walk.taken.extend(chain)
    group = _group(firsts, [step for step in chain if not _is_product(step)], weighed, down)
    return LoweredStep(down.op, Kernel(KIND, group, _PARAMS), (x, weighed.weight), down.outputs)


def _alone(down: LoweredStep, walk: _Walk) -> _Weighed | None:
    """Return an expert that shares no matrix with other experts."""
    step = walk.makers.get(getattr(_argument(down, "x"), "name", ""))
    weight = step.args[1] if step is not None and step.op.kind == "mul" else None
    if step is None or not isinstance(weight, Ref) or _sizes(walk.makers.get(weight.name), weight)[1:2] != (1,):
        return None
    return _Weighed(step.args[0], weight, 1) if walk.sole(_argument(down, "x"), "mul") else None


def _grouped(down: LoweredStep, walk: _Walk) -> _Weighed | None:
    """Return experts that share their matrices."""
    scaled = walk.sole(_argument(down, "x"), "mul")
    factor = None if scaled is None else _column(scaled.args[1])
    if scaled is None or factor is None:
        return None
    weighed = walk.sole(walk.through(scaled.args[0], "reshape"), "mul")
    count = None if weighed is None else _sizes(weighed)[1]
    if weighed is None or not count:
        return None
    hidden, weight = (walk.through(arg, "reshape") for arg in weighed.args)
    return _Weighed(hidden, weight, count, factor)


def _chain(hidden: Arg, walk: _Walk) -> list[LoweredStep] | None:
    """Return the products and the elementwise steps after them, up to `hidden`, in order; None for any other form.

    No other step may use their results.
    """
    chain: dict[int, LoweredStep] = {}
    waiting = [hidden]
    while waiting:
        arg = waiting.pop()
        step = walk.makers.get(arg.name) if isinstance(arg, Ref) else None
        if step is None or not (_is_product(step) or _is_by_number(step)):
            return None
        if id(step) not in chain and not _is_product(step):
            waiting += [arg for arg in step.args if not isinstance(arg, Const)]
        chain[id(step)] = step
    inside = Counter(name for step in chain.values() for name in mentions(step.args)) + Counter(mentions((hidden,)))
    made = [out.name for step in chain.values() for out in step.outputs]
    if any(walk.uses[name] != inside[name] for name in made) or all(map(_is_product, chain.values())):
        return None
    order = {id(step): index for index, step in enumerate(walk.makers.values())}
    return sorted(chain.values(), key=lambda step: order[id(step)])


def _is_by_number(step: LoweredStep) -> bool:
    """Return whether a step is elementwise, and its constants are single numbers."""
    constants = (arg.value for arg in step.args if isinstance(arg, Const))
    return step.op.kind in _BY_NUMBER and not any(isinstance(c, Tensor) and c.numel() > 1 for c in constants)


def _group(firsts: Sequence[LoweredStep], chain: Sequence[LoweredStep], weighed: _Weighed, down: LoweredStep) -> Group:
    """Return the experts, each with its slice of the shared matrices."""
    count = weighed.count
    first = tuple(First(step.outputs[0].name, _rows(step, count), _vector(step, count)) for step in firsts)
    factor, bias = weighed.factor, _vector(down, 1)
    return Group(
        first,
        tuple(chain),
        None if factor is None else factor.view(count, -1),
        _columns(_matrix(down), count),
        None if bias is None else bias[0],
        max(reach(matrix) for one in first for matrix in one.matrices),
    )


def _is_product(step: LoweredStep) -> bool:
    """Return whether a step is the product of a matrix and one image [1, channels, T, 1]."""
    sizes = _sizes(step)
    known = step.kernel is not None and step.kernel.kind in _PRODUCTS
    return known and len(sizes) == _IMAGE and sizes[0] == sizes[3] == 1


def _argument(step: LoweredStep, name: str) -> Any:
    """Return an argument of a step's kernel."""
    assert step.kernel is not None
    return step.args[[param.name for param in step.kernel.params].index(name)]


def _sizes(step: LoweredStep | None, of: Ref | None = None) -> tuple[int | None, ...]:
    """Return the declared shape of a step's first result, or of the result named by `of`; () if unknown."""
    kinds = [out.type for out in step.outputs if of is None or out.name == of.name] if step is not None else []
    return kinds[0].shape if kinds and isinstance(kinds[0], TensorType) else ()


def _column(arg: Arg) -> Tensor | None:
    """Return a constant with a number for each channel, as [channels, 1]."""
    value = arg.value if isinstance(arg, Const) else None
    return value.reshape(-1, 1) if isinstance(value, Tensor) and value.numel() == max(value.shape, default=0) else None


def _matrix(step: LoweredStep) -> Matrix:
    value: Matrix = _argument(step, WEIGHTS["conv"]).value
    return value.flatten(1) if isinstance(value, Tensor) else value


def _extents(matrix: Matrix) -> Sequence[int]:
    return matrix.shape if isinstance(matrix, Tensor) else matrix.values.shape


def _vector(step: LoweredStep, count: int) -> Tensor | None:
    """Return the bias of a product, a row for each of `count` experts."""
    bias = _argument(step, "bias")
    return bias.value.view(count, -1) if isinstance(bias, Const) and isinstance(bias.value, Tensor) else None


def _rows(step: LoweredStep, count: int) -> tuple[Matrix, ...]:
    """Return the rows of a product's matrix for each of `count` experts."""
    matrix = _matrix(step)
    if isinstance(matrix, Tensor):
        return matrix.chunk(count)
    scales = [None] * count if matrix.scale is None else matrix.scale.chunk(count)
    return tuple(StoredMatrix(v, s, matrix.half) for v, s in zip(matrix.values.chunk(count), scales, strict=True))


def _columns(matrix: Matrix, count: int) -> tuple[Matrix, ...]:
    """Return the columns of a matrix for each of `count` experts."""
    if isinstance(matrix, Tensor):
        return matrix.chunk(count, dim=1)
    return tuple(StoredMatrix(values, matrix.scale, matrix.half) for values in matrix.values.chunk(count, dim=1))
