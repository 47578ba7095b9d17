"""Measures the portable engine's decode against transformers eager, at T=1 and T=4, on the same threads.

    python lab/portable_decode.py build/demo --checkpoint resources/demo --threads 2

`build/demo` is a built model: its layer and head packages are run one after the other as a runtime
does, without sampling. transformers runs the same checkpoint in float32 with its own cache, filled to the same length.
Prints one JSON object: milliseconds per pass, the best of `--repeats`, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import portable_coreml
import torch

WIDTHS = (1, 4)
FILLED = 200  # positions in the cache when the clock runs


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--precision", choices=("fp32", "fp16"), default="fp32")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    portable_coreml.install(args.precision)
    runs: list[Callable[[], None]] = []
    for width in WIDTHS:
        runs += [portable_pass(args.build, width), eager_pass(args.checkpoint, width)]
    times = best_of(runs, args.repeats)
    ours, theirs = (dict(zip(WIDTHS, times[i::2], strict=True)) for i in (0, 1))
    report: dict[str, Any] = {"threads": args.threads, "precision": args.precision}
    report |= {f"portable_T{w}_ms": round(ms, 3) for w, ms in ours.items()}
    report |= {f"eager_T{w}_ms": round(ms, 3) for w, ms in theirs.items()}
    report |= {"T1_ratio": round(ours[1] / theirs[1], 3), "T4_over_T1": round(ours[4] / ours[1], 3)}
    print(json.dumps(report, indent=2))


def best_of(runs: list[Callable[[], None]], repeats: int) -> list[float]:
    """Return the shortest of `repeats` runs of each, in milliseconds, after three that don't count.

    The runs take turns, so that a busy spell of the machine strikes all of them.
    """
    best = [float("inf")] * len(runs)
    for turn in range(repeats + 3):
        for index, run in enumerate(runs):
            start = time.perf_counter()
            run()
            if turn >= 3:
                best[index] = min(best[index], time.perf_counter() - start)
    return [seconds * 1e3 for seconds in best]


def portable_pass(build: Path, width: int) -> Callable[[], None]:
    """Return a pass of `width` tokens through every part of a built model."""
    import coremltools as ct

    paths = sorted((build / "packages").glob("*.mlpackage"))
    layers = [ct.models.MLModel(str(p)) for p in paths if p.name.startswith("layers")]
    heads = [ct.models.MLModel(str(p)) for p in paths if p.name.startswith("head")]
    states = [model.make_state() for model in layers]
    inputs = pass_inputs(layers[0], width)

    def run() -> None:
        hidden = inputs["x"]
        for model, state in zip(layers, states, strict=True):
            hidden = model.predict({**inputs, "x": hidden}, state)["hidden"]
        for model in heads:
            model.predict({"hidden": hidden})

    return run


def pass_inputs(model: Any, width: int) -> dict[str, np.ndarray]:
    """Return inputs of a layers part for tokens at slots FILLED ..., every earlier slot visible."""
    shapes = {}
    for feature in model.get_spec().description.input:
        ranges = feature.type.multiArrayType.shapeRange.sizeRanges
        shapes[feature.name] = [width if r.lowerBound != r.upperBound else int(r.lowerBound) for r in ranges]
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    mask, write = np.full(shapes["attn_mask"], -1e4, np.float32), np.zeros(shapes["kv_write_mask"], np.float32)
    for token in range(width):
        mask[0, 0, token, : FILLED + token + 1] = 0
        write[0, 0, FILLED + token, token] = 1
    return made | {"attn_mask": mask, "kv_write_mask": write}


def eager_pass(checkpoint: Path, width: int) -> Callable[[], None]:
    """Return a pass of `width` tokens through transformers with a cache of FILLED positions."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        filled = model(torch.zeros(1, FILLED, dtype=torch.long), use_cache=True).past_key_values
    assert isinstance(filled, DynamicCache)
    tokens = torch.zeros(1, width, dtype=torch.long)

    def run() -> None:
        with torch.inference_mode():
            model(tokens, past_key_values=filled, use_cache=True)
            filled.crop(-width)

    return run


if __name__ == "__main__":
    main()
