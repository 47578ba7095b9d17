"""Whether a program computes with an adapter as transformers does: question 1, with random matrices in its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from zlib import crc32

import numpy as np
import torch
from kit_runner.figures import relative_error
from torch import Tensor

from shardmill.checkpoint.peft import LoraModule
from shardmill.gates.measurement import Measurement, NotRun
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import IN_FP32
from shardmill.gates.passes import Pass, at_lengths, compared_widths, in_passes
from shardmill.gates.reference import Reference
from shardmill.gates.runner import PartRunner
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.architecture import name_in_tower, renamed
from shardmill.models.part_kinds import interface
from shardmill.runtime.adapter_inputs import laid_out

SHARE = 0.5  # of a weight's magnitude, which an adapter adds: enough to make a misplaced matrix show
ROUTED = "an adapter may change which experts a token is routed to, and the two models would then compute differently"


def adapter_parity(
    runner: PartRunner, x: Tensor, reference: Reference, stored: PackageWeights
) -> Iterator[Measurement | NotRun]:
    """Measure a part of layers with an adapter of the form's rank that changes every projection.

    Every width is run, and every context: each is a graph of its own in a program of fixed shapes.

    Nothing is measured on Core ML, which has no fp32; nor of a part with experts, whose choices an adapter may change.

    Args:
        runner: runs the part's program.
        x: the part's input, [n, d].
        reference: transformers' model.
        stored: the package's weights; the reference gets these and, in addition, the adapter's B A.
    """
    part, where = runner.part, runner.program
    rank = part.spec.calls.adapters
    if not rank:
        return
    if part.spec.routes or not is_portable():
        yield NotRun("adapter_error", ROUTED if part.spec.routes else IN_FP32)
        return
    sources = {
        path: tuple(
            renamed(one.source, partial(name_in_tower, stored.prefix)) for one in part.tensors if one.path == path
        )
        for path in part.shapes
    }
    drawn: dict[str, LoraModule] = {}

    def read(module: str) -> LoraModule:
        drawn[module] = _drawn(module, stored(f"{module}.weight").float(), rank)
        return drawn[module]

    def adapted(name: str) -> Tensor:
        weight, lora = stored(name), drawn.get(name.removesuffix(".weight"))
        return weight if lora is None else weight.float() + torch.from_numpy(lora.b @ lora.a)

    entry = {"name": part.name, **interface(part.spec)}
    inputs = laid_out(read, part.spec.graph, dict(part.spec.layers), sources, [entry], rank, where)
    expected = reference.layers(x, range(part.start, part.end), adapted)[-1]
    with load_programs_as("fp32"):
        program = runner.loaded()
        program.adapt({name.removeprefix(f"{part.name}."): array for name, array in inputs.items()})
        for name, passes in _ways(runner, len(x)).items():
            fed = passes[-1].positions[-1] + 1  # all, unless a shorter context holds no more
            again = partial(runner.run, {"x": x[:fed].numpy()}, passes)
            outputs, _ = again()
            yield explained(Measurement("adapter_error", relative_error(outputs, expected[:fed]), name), again, where)
        program.adapt({})


def _ways(runner: PartRunner, count: int) -> dict[str, list[Pass]]:
    """Return passes over `count` tokens, of every width that decoding may use, and in every context, by name."""
    part, verify = runner.part, runner.runtime["verify"]
    ways = {f"T={width}": list(in_passes(count, [width])) for width in (1, *compared_widths(verify, part.spec.tokens))}
    return ways | at_lengths(count, part.spec.calls.widths, verify, runner.lengths)


def _drawn(module: str, weight: Tensor, rank: int) -> LoraModule:
    """Return random matrices for a module of this weight [out, in]; fp16 holds each number."""
    rows, columns = weight.shape
    random = np.random.default_rng(crc32(module.encode()))
    a = random.standard_normal((rank, columns)) / columns**0.5
    b = random.standard_normal((rows, rank)) * SHARE * float(weight.std()) * (columns / rank) ** 0.5
    return LoraModule(a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32), 1.0)
