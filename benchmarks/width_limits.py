"""How near do widths of a pass come to their limits, whatever the processor and however it adds?

    python benchmarks/width_limits.py build/MODEL [--settings plain avx2 default sse] [--parts stack] [--apart]

Runs the parity gates of a build, finished or not, under several settings of the CPU's arithmetic, each in a process of
its own, and prints for each part and measure the worst number, its limit, and their ratio. Packages, programs and
reference are the build's. The exit code is 1 if a number missed its limit under some setting.

With --apart the portable engine computes passes of one token with fp16 rounding and wider ones in fp32, and the numbers
are held against the limits of fp16: what an engine does that is right and rounds once in another way for each width.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
# What the variables do: ATEN_CPU_CAPABILITY chooses torch's own kernels, MKL_CBWR and the ISA those of matrix products.
SETTINGS: dict[str, dict[str, str]] = {
    "plain": {},
    "2 threads": {"THREADS": "2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "sse": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}


def judged(build: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the parity gates of some parts, `stack` for all of them chained."""
    from safetensors.torch import load_file

    from shardmill import plan as plans
    from shardmill.files import read_json
    from shardmill.gates import measurement
    from shardmill.gates.weights import PackageWeights
    from shardmill.pipeline.steps import parity, parity_stack
    from shardmill.pipeline.task import source_folder
    from shardmill.runtime.manifest import in_place

    plan, states = read_json(build / "plan.json"), build / "reference.safetensors"
    source = source_folder(build / "source.receipt.json")
    pieces = {row["name"]: plans.load_part(build / "parts" / f"{row['name']}.json") for row in plan["parts"]}
    embedding = pieces.pop("embedding")
    packed = {name: (piece, build / "packages" / f"{name}.mlpackage") for name, piece in pieces.items()}
    programs = {name: build / "compiled" / f"{name}.mlmodelc" for name in pieces}
    for name in names:
        if name == "stack":
            manifest = in_place(plan, programs, build / "embedding.safetensors")
            found = parity_stack._decoder(manifest, packed, embedding, plan, source, states)
        else:
            stored = PackageWeights(packed[name][1], pieces[name], plan["prefix"])
            found = parity.measurements(programs[name], pieces[name], plan, load_file(states), source, stored)
        answers = list(found)
        numbers = [one for one in answers if isinstance(one, measurement.Measurement)]
        for other in (one for one in answers if not isinstance(one, measurement.Measurement)):
            print(name, other, file=sys.stderr, flush=True)
        yield from ({"part": name, **row} for row in measurement.compare(numbers))


def worker(build: Path, names: Sequence[str], threads: int, apart: bool) -> None:
    """Print the rows as lines of JSON."""
    import torch

    from shardmill.imports import quiet_coremltools

    torch.set_num_threads(threads)
    sys.path.insert(0, str(ROOT / "tests"))
    import apart as engine

    with quiet_coremltools(), engine.installed() if apart else nullcontext():
        for row in judged(build, names):
            print(json.dumps(row), flush=True)


def measured(build: Path, names: Sequence[str], setting: str, apart: bool) -> list[dict[str, Any]]:
    """Return the rows under a setting, in a process of its own: its arithmetic is chosen when it starts."""
    chosen = dict(SETTINGS[setting])
    threads = chosen.pop("THREADS", "1")
    variables = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")} | chosen
    command = [sys.executable, __file__, str(build), "--worker", threads, "--parts", *names]
    command += ["--apart"] if apart else []
    run = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def worst(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, float, float]]:
    """Yield part, measure, number and limit where it comes nearest to it."""
    for part, name in dict.fromkeys((row["part"], row["name"]) for row in rows if "error" in row["name"]):
        same = [row for row in rows if (row["part"], row["name"]) == (part, name)]
        value, limit = max((row["value"], float(row["threshold"].split()[-1])) for row in same)
        yield part, name, value, limit


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--settings", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--parts", nargs="*", help="names of parts, and stack; default: all")
    parser.add_argument("--apart", action="store_true", help="an engine whose widths round apart, as Core ML's may")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    plan = json.loads((args.build / "plan.json").read_text())
    names = args.parts or [*(row["name"] for row in plan["parts"] if row["kind"] != "embedding"), "stack"]
    if args.worker:
        worker(args.build, names, args.worker, args.apart)
        return 0
    missed = 0
    print("| setting | part | measure | worst | limit | of the limit |\n|---|---|---|---|---|---|")
    for setting in args.settings:
        rows = measured(args.build, names, setting, args.apart)
        for part, name, value, limit in worst(rows):
            print(f"| {setting} | {part} | {name} | {value:.2e} | {limit:.2g} | {value / limit:.1%} |", flush=True)
        for row in (row for row in rows if not row["passed"]):
            print(f"MISSED under {setting}: {row['part']} {row['name']} {row['value']} {row['threshold']}", flush=True)
            missed += 1
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
