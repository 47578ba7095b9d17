"""What fp16 makes of a norm whose squares it can't add up: the plain formula beside shardmill's.

    python lab/norms.py

eeANE reports squares of 710 to 2,000 in EmbeddingGemma 2, whose norms overflow. Here rows of as many channels as that
model has get such mean squares, and every result is rounded to fp16, sums included. It is arithmetic, and no
measurement of a device.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmill.models.primitives import RMSNorm

CHANNELS, ROWS, EPS = 768, 64, 1e-6
SQUARES = (10, 80, 90, 710, 1000, 2000)  # means of a row; fp16 ends at 65,504, which is 85 times the channels


class SumsInFp16(TorchFunctionMode):
    """Makes a mean a sum in fp16 that is divided, in place of a sum in fp32 that is rounded once."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.mean:
            axis = (kwargs or {})["dim"]
            return args[0].sum(dim=axis, keepdim=True) / args[0].shape[axis]
        return func(*args, **(kwargs or {}))


def plain(x: Tensor) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) over axis 1, as it is written in papers."""
    return x * torch.rsqrt((x * x).mean(dim=1, keepdim=True) + EPS)


def cosine(norm: Callable[[Tensor], Tensor], square: float) -> float:
    """Return the least cosine of a row in fp16 with the row in fp64; 0 if fp16 gives zeros, or no numbers."""
    x = torch.randn(1, CHANNELS, 1, ROWS, generator=torch.Generator().manual_seed(1)).double()
    x = (x * (square / (x * x).mean(dim=1, keepdim=True)).sqrt()).half()
    with torch.no_grad(), SumsInFp16():
        rounded = norm(x).double()
    cosines = torch.nn.functional.cosine_similarity(rounded, plain(x.double()), dim=1).nan_to_num(0.0)
    return float(cosines.min())


def main() -> None:
    """Print a line for each mean square."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    ours = RMSNorm(None, EPS).half()
    print(f"mean square  cosine of the plain norm  of shardmill's ({CHANNELS} channels, {ROWS} rows, the least)")
    for square in SQUARES:
        print(f"{square:11}  {cosine(plain, square):24.6f}  {cosine(ours, square):14.6f}")


if __name__ == "__main__":
    main()
