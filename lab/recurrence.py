"""Measures what fp16 does to a gated DeltaNet layer over a long text, by how fast its heads forget.

    python lab/recurrence.py [--tokens 4000] [--widths 1 8]

A layer of one head for each of RATES, with heads of 128 numbers as in Qwen3.5, is fed random tokens in passes of one
width. The result of every operation is rounded to fp16, and what is below fp16's normal numbers becomes 0, as is
reported of the Neural Engine (docs/precision.md). With `tables`, tanh and the sigmoid are read from its tables.
Sums inside a product are in fp32. The error is relative to transformers' layer in fp32 with the same weights, after the
gated norm, for each head and each quarter of the text.

Magnitudes are as Anemll/anemll-forge publishes them of a model of 27B (ANE_DELTANET_NUMERICS.md at 117ded6): outputs
of the convolution are about 0.02, and values about 0.012.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from portable_coreml.run.ane import TABLES, deviating_kernel
from portable_coreml.run.ops import KERNELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import BLOCK, DECAY_SCALE, GraphSpec, caches
from shardmill.models.delta_net import GatedDeltaNet
from shardmill.models.families.qwen3_5_text import KINDS
from shardmill.models.part_kinds import computed
from shardmill.models.recurrences import DeltaNet
from shardmill.models.shared import LayerCaches, Shared
from shardmill.runtime.kv import KVLayout

RATES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)  # -g of a token, on average: what each head forgets
HEAD, EPS, LEAST = 128, 1e-6, 2.0**-14
SIZES = DeltaNet(key_heads=len(RATES), value_heads=len(RATES), key_dim=HEAD, value_dim=HEAD, taps=4)
WIDTH = HEAD * len(RATES)  # of the stream too, so that the last projection can be the identity, and heads stay apart


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds what every operation computes to fp16, subnormal numbers to 0.

    Args:
        tables: whether tanh and the sigmoid are read from tables, as in the precision `ane`.
    """

    def __init__(self, tables: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = {name: KERNELS[name] for name in ("sigmoid", "tanh")} if tables else {}
        self.read = {name: deviating_kernel(name, kernel, {TABLES}).call for name, kernel in named.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what the operation gives, rounded unless it only moves numbers."""
        name = func.overloadpacket.__name__
        out = self.read[name](*args) if name in self.read else func(*args, **(kwargs or {}))
        return out if func.is_view or not isinstance(out, Tensor) else rounded(out)


def rounded(x: Tensor) -> Tensor:
    """Return fp32 numbers as fp16 holds them, without subnormal numbers; others as they are."""
    if x.dtype != torch.float32:
        return x
    y = x.half().float()
    return torch.where(y.abs() < LEAST, 0.0, y)


def layer(seed: int = 0) -> Any:
    """Return transformers' layer, with weights that fp16 holds without subnormal numbers."""
    heads = len(RATES)
    sizes: Any = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": SIZES.taps}
    dims: Any = {"linear_key_head_dim": HEAD, "linear_value_head_dim": HEAD}
    config: Any = Qwen3_5TextConfig(hidden_size=WIDTH, rms_norm_eps=EPS, **sizes, **dims)
    made: Any = Qwen3_5GatedDeltaNet(config, 0).eval()
    generator, fan = torch.Generator().manual_seed(seed), WIDTH**-0.5
    spread = {"in_proj_qkv": 0.04 * fan, "in_proj_z": fan, "in_proj_b": 1.5 * fan, "in_proj_a": 0.7 * fan}
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.normal_(0, spread.get(name.partition(".")[0], 0.5), generator=generator)
        made.norm.weight.fill_(1)
        made.dt_bias.fill_(float(np.log(np.e - 1)))  # whose softplus is 1
        made.A_log.copy_(torch.tensor(RATES).log())
        made.out_proj.weight.copy_(torch.eye(WIDTH))
        for weight in made.parameters():
            weight.copy_(rounded(weight))
    return made


def ours(theirs: Any) -> tuple[GatedDeltaNet, GraphSpec]:
    """Return our layer with these weights."""
    graph = Graph(WIDTH, 4, 2, 32, 8, 96, EPS, delta=SIZES)
    spec = GraphSpec("layers", graph, ((0, KINDS["linear_attention"]),), slots=BLOCK)
    tensors = dict(theirs.state_dict())
    taps = tensors.pop("conv1d.weight")[:, 0]
    weights = tensors | {f"tap_{j}": taps[:, j] for j in range(SIZES.taps)}
    weights["in_proj_ba.weight"] = torch.cat([weights.pop("in_proj_b.weight"), weights.pop("in_proj_a.weight")])
    weights["rate"] = -DECAY_SCALE * weights.pop("A_log").exp()
    mixer = GatedDeltaNet(graph, LayerSpec("delta"), weights, "")
    for tensor in (*mixer.parameters(), *mixer.buffers()):
        tensor.data = rounded(tensor.data)
    return mixer, spec


@torch.no_grad()
def fed(theirs: Any, x: Tensor, width: int, tables: bool = False, host: type[KVLayout] = KVLayout) -> Tensor:
    """Return what our layer gives in emulated fp16 for inputs [n, d], in passes of a width: [n, d]."""
    mixer, spec = ours(theirs)
    runtime = {"context": len(x) + BLOCK, "rope": {}, "window": None, "window_slots": 0, "conv_taps": 0}
    layout = host(runtime | {"recurrent": {"block": BLOCK, "taps": SIZES.taps}})
    layer_caches = LayerCaches({name[0]: torch.zeros(shape) for name, shape in caches(spec).items()}, False)
    constants = {name: rounded(torch.from_numpy(values)) for name, values in computed(spec).items()}
    outputs = []
    with Rounded(tables):
        for start in range(0, len(x), width):
            at = range(start, min(start + width, len(x)))
            arrays = {name: torch.from_numpy(values) for name, values in layout.arrays(at, at).items()}
            rows = x[at.start : at.stop].T[None, :, :, None]
            outputs.append(mixer(rows, Shared(spec, arrays, constants), layer_caches)[0, :, :, 0].T)
    return torch.cat(outputs)


def errors(
    tokens: int, width: int, tables: bool = False, host: type[KVLayout] = KVLayout, stretches: int = 4
) -> NDArray[np.float64]:
    """Return the relative error of each head in each stretch of a text, [stretches, heads]."""
    theirs = layer()
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1)).half().float()
    with torch.no_grad():
        right = theirs(x[None])[0].double().reshape(stretches, -1, len(RATES), HEAD)
    got = fed(theirs, x, width, tables, host).double().reshape(right.shape)
    relative: NDArray[np.float64] = ((got - right).norm(dim=(1, 3)) / right.norm(dim=(1, 3))).numpy()
    return relative


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="a multiple of 4")
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8], help="tokens of a pass, up to 8")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| passes of | tables | tokens | " + " | ".join(f"{rate:g}" for rate in RATES) + " |")
    print("|---" * (3 + len(RATES)) + "|")
    quarter = args.tokens // 4
    for width in args.widths:
        for tables in (False, True):
            for number, row in enumerate(errors(args.tokens, width, tables)):
                where = f"{number * quarter + 1} to {(number + 1) * quarter}"
                print(f"| {width} | {'yes' if tables else 'no'} | {where} | {' | '.join(f'{e:.1e}' for e in row)} |")


if __name__ == "__main__":
    main()
