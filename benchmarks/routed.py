"""What routing experts by the host saves and costs on the portable engine: both forms of a model, side by side.

    python benchmarks/routed.py --scratch /somewhere [--model zaya1-8b] [--layers 2] [--groups 2 8 16] [--threads 1]

A synthetic checkpoint of the first layers of a model, at their real width but with a small vocabulary, is converted
with dense experts and with so many groups a layer. Each form is fed the same random tokens, with T = 1 and with T = 4.
A router of random weights takes much the same experts for all of them, so each token's experts are drawn instead.
For each it prints the time of a pass, the programs that it called, and the bytes of the weight files that those read,
beside what shardmill plan expects. The portable engine reads weights at the speed of the memory and calls a program
within microseconds; here it runs every expert of a program for all tokens, as a device does. So it shows what is saved.
What a call costs on the Neural Engine, only a Mac can tell.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import portable_coreml
import torch
from convert import machine
from flagships import MODELS
from portable_coreml.run import find_experts

from shardmill import config, plan, topology
from shardmill.checkpoint.headers import read_tensors
from shardmill.convert.package import WEIGHT_FILE
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.table import write_table
from shardmill.models import family
from shardmill.models.architecture import Experts
from shardmill.models.hf_config import load_hf_config
from shardmill.models.synthetic import write_synthetic_checkpoint
from shardmill.runtime.engine import Engine, Layers
from shardmill.runtime.manifest import in_place
from shardmill.runtime.program import Program

VOCAB, CONTEXT, TOKENS, WIDTHS = 4096, 256, 96, (1, 4)


@dataclass(frozen=True)
class Form:
    """One form of the model, converted and loaded."""

    name: str
    engine: Engine
    weights: dict[str, int]  # bytes of each part's weight file
    called: list[str]  # names of the programs that ran, in order
    expected: dict[int, topology.PassTraffic]


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scratch", type=Path, help="where to write")
    parser.add_argument("--model", choices=MODELS, default="zaya1-8b")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--groups", type=int, nargs="+", default=[2, 8, 16])
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    portable_coreml.install("fp32")
    find_experts.LEAST = sys.maxsize  # a device runs all experts of a program, for every token
    with tempfile.TemporaryDirectory(dir=args.scratch) as name:
        folder, content = Path(name), {**MODELS[args.model][1], "num_hidden_layers": args.layers, "vocab_size": VOCAB}
        write_synthetic_checkpoint(content, folder / "checkpoint", seed=0)
        forms = [built(folder, form, args.threads) for form in ("dense", *args.groups)]
        threads = f"{args.threads} thread{'s' * (args.threads > 1)}"
        print(f"{args.model}, {args.layers} layers, INT8, fp32 arithmetic, {threads}; {machine()}")
        print("| experts | T | ms a pass | programs called | expected | MB of weights | expected, with states |")
        print("|---|---|---|---|---|---|---|")
        for width in WIDTHS:
            for form in forms:
                print(row(form, width))


def built(folder: Path, experts: str | int, threads: int) -> Form:
    """Return a form of the checkpoint in a folder."""
    source, made = folder / "checkpoint", folder / f"experts-{experts}"
    made.mkdir()
    asked = config.checked(
        {"model": "m", "source": {"path": str(source)}, "context": CONTEXT, "experts": experts, "head": {"slices": 1}}
    )
    hf = load_hf_config(source)
    model = topology.as_configured(asked, family(hf.model_type).describe(hf, CONTEXT))
    settings = topology.resolve_topology(asked, model.architecture)
    parts = plan.draft_parts(settings, model, read_tensors(source))
    paths = {part.name: made / f"{part.name}.mlpackage" for part in parts if part.kind != "embedding"}
    for part in parts[:-1]:
        convert_stamped(part, source, "int8", paths[part.name], folder / "templates", threads)
    write_table(parts[-1], source, made / "embedding.safetensors", threads)
    said = plan.plan_json(settings, model, parts) | {"eos_token_ids": []}
    engine = Engine(in_place(said, paths, made / "embedding.safetensors"), Path("/"))
    programs = engine.programs
    if model.architecture.graph.experts is not None:
        engine.layers = [drawing(layer, model.architecture.graph.experts) for layer in engine.layers]
    called: list[str] = []
    for program in programs:
        watch(program, called)
    weights = {name: (path / WEIGHT_FILE).stat().st_size for name, path in paths.items()}
    form = "dense" if experts == "dense" else "routed"
    expected = {p.tokens: p for p in topology.pass_traffic(settings, model.architecture) if p.experts == form}
    return Form(str(experts), engine, weights, called, expected)


def drawing(layer: Layers, experts: Experts) -> Layers:
    """Replace the weights of experts that a part of layers gives: each token takes some at random."""
    rng = np.random.default_rng(0)

    def drawn(given: Any) -> Any:
        hidden = layer.program(given)
        tokens = hidden.shape[2]
        weights = np.zeros((experts.classes, tokens), np.float32)
        for t in range(tokens):
            weights[rng.permutation(experts.classes)[: experts.chosen], t] = 1 / experts.chosen
        hidden[0, -experts.count :, :, 0] = weights[: experts.count]
        return hidden

    return replace(layer, program=cast(Program, drawn)) if layer.experts else layer


def watch(program: Any, called: list[str]) -> None:
    """Take down every call of a program."""
    around = program.around

    def noted() -> Any:
        called.append(program.name)
        return around()

    program.around = noted


def row(form: Form, width: int) -> str:
    """Return a line of the table: the median of passes that follow each other."""
    times, counts, read = measured(form, width)
    expected = form.expected[width]
    figures = (f"{statistics.median(times):.1f}", f"{counts:.1f}", f"{expected.dispatches:.1f}")
    return f"| {form.name} | {width} | {' | '.join(figures)} | {read / 1e6:.1f} | {expected.bytes / 1e6:.1f} |"


def measured(form: Form, width: int) -> tuple[Sequence[float], float, float]:
    """Return milliseconds of each pass; and on average how many programs it called, and the bytes of their weights."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, TOKENS).tolist()
    form.engine.reset()
    times: list[float] = []
    form.called.clear()
    for at in range(0, TOKENS, width):
        places, start = range(at, at + width), time.perf_counter()
        form.engine.forward(tokens[at : at + width], places, places)
        times.append(1e3 * (time.perf_counter() - start))
    passes = len(times)
    return times[2:], len(form.called) / passes, sum(form.weights[name] for name in form.called) / passes


if __name__ == "__main__":
    main()
