"""What quantisers of four bits leave of the error of each matrix' outputs in one layer.

    python benchmarks/quantisers.py build/MODEL TEXT_FILE [--layer 0] [--windows 16] [--window 512]

Squared error of the outputs over their squares, on inputs that transformers' original model has on the text's windows.
Compared are rounding to nearest, scales that cut off, and coremltools' GPTQ with its own scales and with those; and
what is to be won by changing a matrix' inputs first: a factor for each (AWQ), the best of a few powers of the root mean
square of the inputs, or a random rotation. Each matrix has the factors that suit it alone, whereas in a model those
behind one norm would have to share them: what is told of them is the most that they can win.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from coremltools.optimize.torch.layerwise_compression.algorithms import GPTQ, ModuleGPTQConfig
from torch import Generator, Tensor, linalg, nn, randn, zeros

from shardmill import plan
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.convert.palette import to_integers
from shardmill.forms.form import INT4, form
from shardmill.machine import machine
from shardmill.precision.calibration import calibrated_matrices
from shardmill.precision.original import original
from shardmill.precision.quantisers import QuantizedMatrix, clipped, error, gptq
from shardmill.precision.windows import windows

BITS = form(INT4).bits
POWERS = (0.0, 0.25, 0.5, 0.75)  # of AWQ's factors; with the first they are all one


def nearest(weight: Tensor, hessian: Tensor) -> float:
    """Round as conversion does."""
    codes, scale, _ = to_integers(weight, form(INT4).levels)
    return error(weight, QuantizedMatrix(codes, scale).values, hessian)


def own_scales(weight: Tensor, hessian: Tensor) -> float:
    """Return coremltools' GPTQ as it is."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    algorithm = GPTQ(layer, ModuleGPTQConfig(weight_dtype=f"uint{BITS}", use_activation_order_heuristic=True))
    algorithm.add_batch(zeros(1, weight.shape[1]), zeros(1, weight.shape[0]))
    algorithm._hessian = hessian.clone()
    algorithm.compress()
    off = weight - layer.weight.data
    return float(((off @ hessian) * off).sum() / ((weight @ hessian) * weight).sum())


def by_factors(weight: Tensor, hessian: Tensor, quantise: Callable[[Tensor, Tensor], QuantizedMatrix]) -> float:
    """Return AWQ's error: columns are multiplied by factors, inputs divided by them."""
    found = []
    for power in POWERS:
        factors = (hessian.diagonal() / hessian.diagonal().mean()).clamp(min=1e-4) ** (power / 2)
        codes = quantise(weight * factors, hessian / factors[:, None] / factors)
        found.append(error(weight, codes.values / factors, hessian))
    return min(found)


def rotated(weight: Tensor, hessian: Tensor) -> float:
    """Return GPTQ's error after a random rotation has spread large weights and inputs over all columns."""
    turn = linalg.qr(randn(len(hessian), len(hessian), generator=Generator().manual_seed(0)))[0]
    return error(weight, gptq(weight @ turn, BITS, turn.T @ hessian @ turn).values @ turn.T, hessian)


QUANTISERS: dict[str, Callable[[Tensor, Tensor], float]] = {
    "to nearest": nearest,
    "scales that cut off": lambda w, h: error(w, clipped(w, BITS, h.diagonal()).values, h),
    "GPTQ, its own scales": own_scales,
    "GPTQ with those scales": lambda w, h: error(w, gptq(w, BITS, h).values, h),
    "AWQ": lambda w, h: by_factors(w, h, lambda v, k: clipped(v, BITS, k.diagonal())),
    "AWQ's factors, then GPTQ": lambda w, h: by_factors(w, h, lambda v, k: gptq(v, BITS, k)),
    "a rotation, then GPTQ": rotated,
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    summary, source = json.loads((args.build / "plan.json").read_text()), args.build / "source"
    parts = [plan.load_part(args.build / "parts" / f"{row['name']}.json") for row in summary["parts"]]
    part = next(part for part in parts if part.kind == "layers" and part.start <= args.layer < part.end)
    tokenizer, model = read_tokenizer(source / "tokenizer.json"), original(source, summary)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    cut = windows(ids, tokenizer.encode("").ids, args.window, args.windows)
    states = [model.reference.first(window, lambda ids: model.table[ids], model.weights) for window in cut]
    for index in range(part.start):
        states = [model.reference.layers(one, [index], model.weights)[0] for one in states]
    rows = {}
    for matrix in calibrated_matrices(part, source, model, states, []):
        if matrix.index == args.layer and matrix.hessian is not None:
            rows[matrix.path] = {name: find(matrix.weight, matrix.hessian) for name, find in QUANTISERS.items()}
        elif matrix.index > args.layer:
            break
    print(json.dumps({"machine": machine(), "tokens": sum(map(len, cut)), "errors": rows}, indent=1))


if __name__ == "__main__":
    main()
