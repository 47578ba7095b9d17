"""Whether a program computes with an adapter as transformers does: question 1, with random matrices in its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from shardmill.checkpoint.peft import LoraModule
from shardmill.gates.measurement import Measurement
from shardmill.gates.nonfinite import explained
from shardmill.gates.parity import PartRunner, relative_error
from shardmill.gates.passes import in_passes
from shardmill.gates.reference import Reference
from shardmill.gates.weights import PackageWeights
from shardmill.machine import is_portable, load_programs_as
from shardmill.models.architecture import name_in_tower, renamed
from shardmill.models.interface import interface
from shardmill.runtime.adapter_inputs import laid_out

SHARE = 0.5  # of a weight's magnitude, which an adapter adds: enough to make a misplaced matrix show


def adapter_parity(
    runner: PartRunner, x: Tensor, reference: Reference, stored: PackageWeights
) -> Iterator[Measurement]:
    """Measure a part of layers with an adapter of the form's rank that changes every projection.

    Nothing is measured on Core ML, which has no fp32; nor of a part with experts, whose choices an adapter may change.

    Args:
        runner: runs the part's program.
        x: the part's input, [n, d].
        reference: transformers' model.
        stored: the package's weights; the reference gets these and, in addition, the adapter's B A.
    """
    part = runner.part
    rank = part.blueprint.adapters
    if not rank or part.blueprint.routes or not is_portable():
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

    entry = {"name": part.name, **interface(part.blueprint, part.calls)}
    inputs = laid_out(read, part.graph, dict(part.blueprint.layers), sources, [entry], rank, runner.program)
    expected = reference.layers(x, range(part.start, part.end), adapted)[-1]
    with load_programs_as("fp32"):
        program = runner.loaded()
        program.adapt({name.removeprefix(f"{part.name}."): array for name, array in inputs.items()})
        again = partial(runner.run, {"x": x.numpy()}, list(in_passes(len(x), [part.tokens])))
        outputs, _ = again()
        error = Measurement("program_error", relative_error(outputs, expected), "with an adapter")
        yield explained(error, again, runner.program)
        program.adapt({})


def _drawn(module: str, weight: Tensor, rank: int) -> LoraModule:
    """Return random matrices for a module of this weight [out, in]; fp16 holds each number."""
    rows, columns = weight.shape
    random = np.random.default_rng(crc32(module.encode()))
    a = random.standard_normal((rank, columns)) / columns**0.5
    b = random.standard_normal((rows, rank)) * SHARE * float(weight.std()) * (columns / rank) ** 0.5
    return LoraModule(a.astype(np.float16).astype(np.float32), b.astype(np.float16).astype(np.float32), 1.0)
