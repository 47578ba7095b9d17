"""Each operator that coremltools lacks or gets wrong: the prepared program computes what torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import coremltools as ct
import limits
import numpy as np
import portable_coreml
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers_coreml.graph import prepared, within_half
from transformers_coreml.lowering import REPLACEMENTS

EDGES = torch.tensor([0.25, 0.5, 0.75])
AMONG = torch.tensor([0.1, 0.25, 0.6, 0.9])
TWO = torch.tensor([1, 2], dtype=torch.int32)
SPARSE = torch.tensor([0, 1, 1, 3])
Case = tuple[Callable[..., Any], tuple[Any, ...]]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, Case] = {
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), (numbers(5),)),
    "gelu": (F.gelu, (numbers(5),)),
    "a tensor or a number": (lambda x: torch.where(x > 0, x, 0.5), (numbers(5),)),
    "a number or a tensor": (lambda x: torch.where(x > 0, 0.5, x), (numbers(5),)),
    "one of two numbers": (lambda x: torch.where(x > 0, 1.0, -1.0), (numbers(2, 5),)),
    "one of two scalars": (lambda x: torch.where(x > 0, torch.tensor(1.0), torch.tensor(-1.0)), (numbers(2, 5),)),
    "bucketize": (lambda x: torch.bucketize(x, EDGES), (AMONG,)),
    "bucketize right": (lambda x: torch.bucketize(x, EDGES, right=True), (AMONG,)),
    "searchsorted": (lambda x: torch.searchsorted(EDGES, x), (AMONG,)),
    "searchsorted right": (lambda x: torch.searchsorted(EDGES, x, side="right"), (AMONG,)),
    "searchsorted in rows": (lambda x: torch.searchsorted(EDGES[None], x), (AMONG[None],)),
    "histc": (lambda x: torch.histc(x, bins=4, min=0, max=3), (torch.tensor([0.0, 1, 1, 3]),)),
    "diff": (torch.diff, (numbers(2, 5),)),
    "multiply": (lambda x: torch.multiply(x, x), (numbers(3),)),
    "new_ones": (lambda x: x + x.new_ones(2, 3), (numbers(2, 3),)),
    "softmax of nothing": (
        lambda x: torch.ops.aten._safe_softmax(x.masked_fill(x < 9, float("-inf")), -1), (numbers(2, 4),)
    ),
    "isin": (lambda x: torch.isin(x, TWO), (torch.arange(4, dtype=torch.int32),)),
    "not isin": (lambda x: torch.isin(x, TWO, invert=True), (torch.arange(4, dtype=torch.int32),)),
    "unfold": (lambda x: x.unfold(1, 3, 2), (numbers(2, 9),)),
    "unfold the last axis": (lambda x: x.unfold(-1, 3, 2), (numbers(2, 9),)),
    "index_add": (lambda x: torch.zeros(4, 2).index_add(0, SPARSE, x), (numbers(4, 2),)),
    "alias": (lambda x: torch.ops.aten.alias(x) + 1, (numbers(3),)),
    "and": (lambda x, y: (x > 0) & (y > 0), (numbers(2, 3), numbers(2, 3).flip(0))),
    "or": (lambda x, y: (x > 0) | (y > 0), (numbers(2, 3), numbers(2, 3).flip(0))),
    "xor": (lambda x, y: (x > 0) ^ (y > 0), (numbers(2, 3), numbers(2, 3).flip(0))),
    "fft": (lambda x: torch.fft.fftn(x, dim=(-2, -1)).real, (numbers(2, 4, 4),)),
    "bicubic": (lambda x: F.interpolate(x, size=(6, 5), mode="bicubic"), (numbers(1, 2, 4, 3),)),
    "bicubic by a factor": (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), (numbers(1, 2, 4, 3),)),
    "bilinear, antialiased": (
        lambda x: F.interpolate(x, size=(3, 2), mode="bilinear", antialias=True), (numbers(1, 2, 6, 6),)
    ),
    "a number as argument": (lambda x, n: x * 2, (numbers(3), 4)),
    "None as argument": (lambda x, n: x * 2, (numbers(3), None)),
    "an input as output": (lambda x: (x, x + 1), (numbers(3),)),
    "a constant as output": (lambda x: (x + 1, torch.arange(3)), (numbers(3),)),
    "numbers of fp64": (lambda x: x * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), (numbers(3),)),
}  # fmt: skip


class Module(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        return self.function(*arguments)


def run(program: torch.export.ExportedProgram, inputs: list[Tensor], precision: str = "fp32") -> list[np.ndarray]:
    portable_coreml.install(precision)
    half = precision == "fp16"
    chosen = ct.precision.FLOAT16 if half else ct.precision.FLOAT32
    model = ct.convert(program, minimum_deployment_target=ct.target.iOS18, compute_precision=chosen)
    description = model.get_spec().description
    arrays = {one.name: value.numpy() for one, value in zip(description.input, inputs, strict=True)}
    found = model.predict({n: a.astype(np.int32 if a.dtype == np.int64 else a.dtype) for n, a in arrays.items()})
    return [np.asarray(found[one.name]) for one in description.output]


@pytest.mark.parametrize("name", CASES)
def test_a_replacement_computes_what_torch_computes(name: str) -> None:
    function, arguments = CASES[name]
    expected = function(*arguments)
    program = prepared(torch.export.export(Module(function), arguments), {})
    found = run(program, [one for one in arguments if isinstance(one, Tensor)])
    for result, tensor in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        wanted = tensor.to(torch.float64).numpy()
        limits.numbers_agree(name, result.reshape(wanted.shape), wanted, limits.sums("fp32", 16, 4))


def test_every_replacement_stands_in_for_an_operator_of_torch() -> None:
    """Else a name would be misspelt. transformers brings its own operator when it is imported."""
    missing = []
    for name in REPLACEMENTS:
        space, packet, overload = name.split(".")
        if space == "aten" and not hasattr(getattr(torch.ops.aten, packet), overload):
            missing.append(name)
    assert not missing


def test_a_mask_s_smallest_number_stays_finite_in_fp16() -> None:
    """Cast to fp16 it would be -inf, and NaN where it is multiplied by 0."""
    mask = torch.tensor([1.0, 1.0, 0.0])
    program = torch.export.export(Module(lambda x, m: x + (1 - m) * torch.finfo(torch.float32).min), (numbers(3), mask))
    program = prepared(program, {})
    within_half(program)
    (found,) = run(program, [numbers(3), mask], "fp16")
    assert np.isfinite(found).all() and found[2] < -1e4
    limits.numbers_agree("unmasked", found[:2], numbers(3)[:2].numpy(), limits.roundings("fp16", 2))


def test_constants_are_computed_once() -> None:
    """A value that depends on no input is a constant, and so is a value that depends on frozen inputs alone."""
    program = torch.export.export(Module(lambda x, n: x * torch.arange(4).cumsum(0)[n]), (numbers(4), torch.tensor(3)))
    (frozen,) = [node.name for node in program.graph.nodes if node.name.endswith("_1")] or ["n"]
    program = prepared(program, {frozen: torch.tensor(3)})
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called == ["aten.mul.Tensor"]
    (found,) = run(program, [numbers(4)])
    limits.numbers_agree("product", found, (numbers(4) * 6).numpy(), limits.roundings("fp32", 2))
