"""How far rounding moves transformers' result, and so how far apart two widths of a pass may be.

Two widths compute the same numbers but round them differently. How large the difference is at the end depends on the
model: on its depth, on how its layers amplify an error, and on how much of a sum cancels. So transformers runs its
model once more, with noise of the size of a rounding on all inputs and outputs of its modules. How far the result moves
is a property of the model and of the text. It is the same on every processor, and a wrong program can't change it.

In fp32, sums are rounded too: in the worst order after each addition. The error of n roundings grows as the square root
of n. Both of two widths that are compared round so, and the worst of all tokens counts: a sound program is away by up
to two fifths of what the square root alone would allow, and twice that root is allowed. An engine that computes in fp16
is assumed to accumulate in a wider format.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardmill.gates.thresholds import THRESHOLDS, Allowed
from shardmill.machine import is_portable

FP32, FP16 = "fp32", "fp16"
UNITS = {FP32: 2.0**-24, FP16: 2.0**-11}  # the largest relative error of one rounding
# Amplitude of the injected noise. For fp32 it is much larger than transformers' own rounding, yet small enough to
# change no choice of experts; how far a result moves grows in proportion to it.
NOISE = {FP32: 2.0**-17, FP16: 2.0**-11}
# A correct engine that rounds the results of all operations in one width only is two thirds of the probe's move away
# from the other widths; one that rounds in two ways is away by the whole move. How a device accumulates is not known.
TIMES = 8.0
RIVALS = 5  # logits of a row whose distances from the best one show how far rounding moves such a distance
DEVIATIONS = 6.0  # of such a distance: if both widths round, they are 1.5 times as far apart; four times is rare


@dataclass(frozen=True)
class Probe:
    """A result of transformers, rows [n, channels], without and with noise."""

    exact: Tensor
    found: Tensor
    precision: str  # whose rounding errors are as large as the noise
    longest: int  # products in the longest sum of a matrix product

    @property
    def moved(self) -> float:
        """Return how far rounding moves the result, relative to the result: the worst row; NaN if one is not finite.

        It is at least the error of one rounding.
        """
        norms = torch.linalg.vector_norm(self.exact.double(), dim=-1).clamp(min=1e-30)
        worst = float((torch.linalg.vector_norm((self.found - self.exact).double(), dim=-1) / norms).max())
        noise = NOISE[self.precision]
        if not math.isfinite(worst):  # no limit follows from it, so that nothing is within the limit
            return math.nan
        return UNITS[self.precision] * (1.0 if worst < noise else worst / noise)

    @property
    def allowed(self) -> Allowed:
        """Return how far apart two widths may be, relative to the result."""
        times = 2 * math.sqrt(self.longest) if self.precision == FP32 else TIMES
        sums = f", twice the square root of the longest sum, {self.longest}" if self.precision == FP32 else ""
        moved = f"the {self.moved:.2g} by which rounding to {self.precision} moves transformers' own result"
        return Allowed(float(f"{times * self.moved:.2g}"), f"{times:.3g} times {moved}{sums}")

    @property
    def hopeless(self) -> str:
        """Return why widths can't be compared, or '' if they are to be.

        If rounding changes a choice of experts, a token's result moves far, in a correct program as in a wrong one. A
        result that is not finite excuses nothing: it is compared, and misses its limit.
        """
        limit = THRESHOLDS["width_error_fp16"].limit
        if self.precision == FP32 or not 2 * self.moved > limit:  # NaN is not
            return ""
        return f"rounding to fp16 alone moves transformers' own result by {self.moved:.2g}: widths can't be compared"

    @property
    def margin(self) -> float:
        """Return how close two logits may be that can change places if two widths of a pass round to fp16 differently.

        It follows from how far rounding moves the distance of the best logit from each of the next ones.
        """
        best = self.exact.topk(min(RIVALS, self.exact.shape[-1]), dim=-1).indices
        before, after = (rows.gather(-1, best) for rows in (self.exact.double(), self.found.double()))
        apart = (after[:, :1] - after[:, 1:]) - (before[:, :1] - before[:, 1:])
        deviation = float(apart.square().mean().sqrt()) * UNITS[FP16] / NOISE[self.precision]
        return DEVIATIONS * deviation


def probe(model: nn.Module, run: Callable[[], Tensor], exact: Tensor) -> Probe:
    """Run transformers' model with noise of the size of this machine's rounding errors.

    Args:
        model: transformers' model, which `run` calls.
        run: computes the result, rows [n, channels].
        exact: the result without noise.
    """
    precision = FP32 if is_portable() else FP16
    with disturbed(model, NOISE[precision]):
        return Probe(exact, run(), precision, longest_sum(model))


@contextmanager
def disturbed(model: nn.Module, noise: float) -> Iterator[None]:
    """Multiply each number that enters or leaves a module by 1 + e, with e uniformly distributed within +-`noise`.

    Modules that contain other modules are skipped, except layers: a layer's output is the residual stream, a sum. A
    module gets the same noise in every call, so the difference of two runs contains only the runs' own difference.
    """

    def spoilt(value: Any, number: int) -> Any:
        if isinstance(value, tuple):
            return tuple(spoilt(each, number) for each in value)
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        generator = torch.Generator().manual_seed(number)
        return value * (1 + noise * (2 * torch.rand(value.shape, generator=generator) - 1))

    def before(number: int) -> Callable[..., Any]:
        return lambda module, args: spoilt(args, number)

    def after(number: int) -> Callable[..., Any]:
        return lambda module, args, result: spoilt(result, number)

    with ExitStack() as stack:
        for number, module in enumerate(_rounding(model)):
            stack.callback(module.register_forward_pre_hook(before(2 * number)).remove)
            stack.callback(module.register_forward_hook(after(2 * number + 1)).remove)
        yield


def _rounding(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules whose inputs and outputs are rounded: modules without children, and layers."""
    layers = {id(layer) for each in model.modules() if isinstance(each, nn.ModuleList) for layer in each}
    for module in model.modules():
        if id(module) in layers or not list(module.children()):
            yield module


def longest_sum(model: nn.Module) -> int:
    """Return the number of products in the longest sum of any matrix product."""
    by_module = (module.parameters(recurse=False) for module in model.modules() if not isinstance(module, nn.Embedding))
    return max(parameter.shape[-1] for parameters in by_module for parameter in parameters if parameter.ndim > 1)
