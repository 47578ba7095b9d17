"""The plan of a function for one set of input shapes: a line for each step, compiled to one Python function.

A line is the cheapest callable that computes a step's result. On small models the cost of an operation is the cost of
calling it. Therefore plain arguments are bound in advance, views go straight to torch, and a 1x1 convolution becomes
one matrix product. Only shapes decide; values never do.

The lines become a function without branches, lookups or bookkeeping. Values are local variables, constants are globals
of the generated function, and a value is deleted after its last use. The generated source mentions only names made
here (v0, c0, f0, ...), never text from the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from portable_coreml.dtypes import BY_NAME
from portable_coreml.program import TensorType
from portable_coreml.run.fixed_point import FixedPoint, to_fixed_point
from portable_coreml.run.lowered import (
    Arg,
    Const,
    LoweredStep,
    Ref,
    call_kernel,
    kernel_values,
    last_mentions,
    round_half,
    used,
    value_of,
)
from portable_coreml.run.ops import Kernel
from portable_coreml.run.ops.linear import batched
from portable_coreml.run.products import (
    matrix_in_fixed_point,
    steady_tokens,
    takes_fixed_point,
    times_tokens,
    times_vector,
)


@dataclass(frozen=True, eq=False)
class CodeLine:
    """One statement: `targets = call(*args)`.

    With `state`, an access of that state: a write if there is an argument, through `call` if given. `post`: applied
    to the single result. `tupled`: the call returns a tuple. `plain`: positions of arguments to convert to Python
    values. `needs_states`: the states dictionary is the first argument.
    """

    targets: tuple[str, ...]
    call: Callable[..., Any] | None
    args: tuple[Arg, ...]
    post: tuple[Callable[[Tensor], Tensor] | None, ...] = ()
    tupled: bool = False
    plain: frozenset[int] = frozenset()
    state: str | None = None
    needs_states: bool = False


class _Source:
    """The text being generated and the globals it uses."""

    def __init__(self, inputs: Sequence[str]) -> None:
        self.globals: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.body: list[str] = []
        self.known: dict[int, str] = {}
        for name in inputs:
            self.variable(name)

    def variable(self, name: str) -> str:
        return self.names.setdefault(name, f"v{len(self.names)}")

    def bind(self, value: Any) -> str:
        """Return a global name for a callable or constant."""
        if id(value) not in self.known:
            self.known[id(value)] = f"g{len(self.known)}"
            self.globals[self.known[id(value)]] = value
        return self.known[id(value)]

    def expression(self, arg: Arg, plain: bool = False) -> str:
        if isinstance(arg, Ref):
            return f"{self.variable(arg.name)}.tolist()" if plain else self.variable(arg.name)
        if isinstance(arg, Const):
            if arg.value is None or isinstance(arg.value, (bool, int)):
                return repr(arg.value)
            return self.bind(arg.value)
        return "[" + ", ".join(self.expression(item) for item in arg) + "]"

    def add(self, line: CodeLine) -> None:
        targets = [self.variable(name) for name in line.targets]
        if line.state is not None:
            self._state(line, targets)
            return
        args = [self.expression(arg, i in line.plain) for i, arg in enumerate(line.args)]
        call = f"{self.bind(line.call)}({', '.join((['states'] if line.needs_states else []) + args)})"
        post = line.post or (None,) * len(targets)
        if not line.tupled:
            wrapped = call if post[0] is None else f"{self.bind(post[0])}({call})"
            self.body.append(f"{targets[0]} = {wrapped}")
            return
        self.body.append(f"{', '.join(targets)}, = {call}" if targets else call)
        for target, fix in zip(targets, post, strict=True):
            if fix is not None:
                self.body.append(f"{target} = {self.bind(fix)}({target})")

    def _state(self, line: CodeLine, targets: list[str]) -> None:
        key = self.bind(line.state)
        if line.args:
            source = self.expression(line.args[0])
            self.body.append(f"states[{key}] = {source if line.call is None else f'{self.bind(line.call)}({source})'}")
        self.body.extend(f"{target} = states[{key}]" for target in targets)


def compile_lines(
    inputs: Sequence[str], lines: Sequence[CodeLine], outputs: Sequence[Arg]
) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function `(states, *inputs) -> outputs` that runs the lines.

    Lines whose results nobody uses are left out.
    """
    source = _Source(inputs)
    parameters = ", ".join(["states", *(source.variable(name) for name in inputs)])
    live = _prune(lines, outputs)
    last = last_mentions([used(line.args) | set(line.targets) for line in live])
    needed = used(outputs)
    for index, line in enumerate(live):
        source.add(line)
        dead = [source.variable(n) for n in last.get(index, ()) if n not in needed]
        if dead:
            source.body.append(f"del {', '.join(sorted(dead))}")
    results = "".join(source.expression(arg) + ", " for arg in outputs)
    text = f"def plan({parameters}):\n" + "".join(f"    {s}\n" for s in source.body) + f"    return ({results})\n"
    exec(compile(text, "<plan>", "exec"), source.globals)  # the source is ours: see the module's docstring
    plan: Callable[..., tuple[Tensor, ...]] = source.globals.pop("plan")  # a cycle would keep its constants in memory
    return plan


def _prune(lines: Sequence[CodeLine], outputs: Sequence[Arg]) -> list[CodeLine]:
    """Return the lines whose results are used, in order. Writes to states and control flow always stay."""
    wanted = used(outputs)
    live: list[CodeLine] = []
    for line in reversed(lines):
        writes = line.state is not None and bool(line.args)
        if writes or line.needs_states or wanted & set(line.targets):
            live.append(line)
            wanted |= used(line.args)
    return live[::-1]


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


FIXED = "\0fixed "  # no MIL name begins so


def fixed_point_lines(step: LoweredStep, env: Mapping[str, Any], result: Tensor, seen: set[str]) -> list[CodeLine]:
    """Return the plan's lines for a 1x1 convolution of one image with a stored matrix; none for any other step.

    Products of the same rows share their fixed-point form, which a line of its own makes.

    Args:
        step: a step that was just run.
        env: this run's values.
        result: what the step gave.
        seen: rows that a line has in fixed point; the step's are added.
    """
    if step.kernel is None or step.kernel.kind != "stored_conv":
        return []
    x, matrix, bias = step.args[0], value_of(step.args[1], env), value_of(step.args[2], env)
    if not isinstance(x, Ref) or env[x.name].shape[0] != 1:
        return []
    columns, plain, shape = env[x.name].numel() // env[x.name].shape[1], step.kernel.call, result.shape
    if not takes_fixed_point(matrix, columns):
        return []
    fixed, size = Ref(FIXED + x.name), (env[x.name].shape[1], columns)
    strides = torch.empty(columns, len(matrix.values)).t().view(shape).stride()
    rest = tuple(value_of(arg, env) for arg in step.args[3:])

    def call(x: Tensor, fixed: FixedPoint | None) -> Tensor:
        if fixed is None:
            whole: Tensor = plain(x, matrix, bias, *rest)
            return whole
        y = matrix_in_fixed_point(matrix, fixed)
        return (y if bias is None else y.add_(bias)).as_strided(shape, strides)

    lines = [CodeLine(tuple(out.name for out in step.outputs), call, (x, fixed), _posts(step, result, half=False))]
    if fixed.name not in seen:
        seen.add(fixed.name)
        lines.insert(0, CodeLine((fixed.name,), lambda x: to_fixed_point(x.reshape(size).t()), (x,)))
    return lines


def _grown(kernel: Kernel, *values: Any) -> Any:
    return call_kernel(kernel, values)


def _posts(step: LoweredStep, raw: Any, half: bool) -> tuple[Callable[[Tensor], Tensor] | None, ...]:
    assert step.kernel is not None
    posts: list[Callable[[Tensor], Tensor] | None] = []
    for value, out in zip(raw if isinstance(raw, (tuple, list)) else (raw,), step.outputs, strict=True):
        if not isinstance(out.type, TensorType) or not isinstance(value, Tensor):
            posts.append(None)  # a class label or its probabilities
            continue
        dtype = BY_NAME[out.type.dtype].torch
        if half and out.type.dtype == "fp16" and not (step.kernel.exact and value.dtype == dtype):
            posts.append(round_half)
        else:
            posts.append(None if value.dtype == dtype else _caster(dtype))
    return tuple(posts)


def _caster(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda value: value.to(dtype)


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
    return batched(x, y.mT)


def _wide_matmul(x: Tensor, y: Tensor) -> Tensor:
    return batched(x, y, torch.float64)


def _wide_matmul_nt(x: Tensor, y: Tensor) -> Tensor:
    return batched(x, y.mT, torch.float64)


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
        return lambda x: times_vector(matrix, x.reshape(size)).view(shape)
    # Some kernels of BLAS begin their sums with the bias, and then the interpreter's have other last bits.
    return lambda x: times_vector(matrix, x.reshape(size)).add_(bias).view(shape)


def _tokens_product(
    matrix: Tensor, bias: Tensor | None, shape: tuple[int, ...], columns: int, steady: bool
) -> Callable[[Tensor], Tensor]:
    rows = (matrix.shape[1], columns)
    strides = torch.empty(columns, len(matrix)).t().view(shape).stride()
    widen = steady_tokens if steady and columns % 4 else None

    def call(x: Tensor) -> Tensor:
        tokens = x.reshape(rows).t() if widen is None else widen(x.reshape(rows).t())
        y = times_tokens(matrix, tokens, steady=steady)
        return (y if bias is None else y.add_(bias)).as_strided(shape, strides)

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
    "matmul": _matmul(batched, _matmul_nt),
    "wide_matmul": _matmul(_wide_matmul, _wide_matmul_nt),
    "wide_reduce_sum": _reduce(_wide(torch.sum)),
    "wide_reduce_mean": _reduce(_wide(torch.mean)),
    "plain_conv": _pointwise(steady=False),
    "steady_conv": _pointwise(steady=True),
    "slice_by_index": _slice,
}
