"""What forms of the matrices cost on a text: rounding, scales that cut off, GPTQ, and what the search buys.

    python benchmarks/precision.py build/MODEL TEXT_FILE [--tokens 8192] [--window 512] [--growths 1.01 1.03 1.05 1.1]

For a build with `convert: {precision: search}`: its codes, and what its matrices cost, are read from it, so that no
quantiser runs again. Everything is measured in transformers and fp32, with the weights as packages of these forms hold
them (question 1 of a build says that its programs are that model). Windows do not overlap; each begins as the tokenizer
begins a text. The text must be none that the build was calibrated with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import log_softmax

from shardmill import plan
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.convert.quantize import to_integers
from shardmill.convert.weights import PartWeights
from shardmill.forms.form import FP16, INT4, INT8, form, matrices, stored_bytes
from shardmill.machine import machine
from shardmill.plan import Part
from shardmill.precision.budget import searched
from shardmill.precision.observe import sites
from shardmill.precision.original import Original, head_blocks, original
from shardmill.precision.quantisers import Codes, clipped
from shardmill.precision.sensitivity import as_stored
from shardmill.precision.windows import windows

CLEAR = 0.1  # nat between the two best tokens; below it either is as good
Values = Callable[[Tensor, str, Part], Tensor]  # of a matrix [rows, columns], its path, and its part


@dataclass(frozen=True)
class Case:
    """A build, its parts, and the windows to measure on."""

    build: Path
    parts: list[Part]
    model: Original
    cut: list[list[int]]

    @property
    def source(self) -> Path:
        return self.build / "source"


@dataclass(frozen=True)
class Found:
    """What was measured of a set of forms."""

    perplexity: float
    kl: float
    top1: float


def open_case(build: Path, text: Path, tokens: int, window: int) -> Case:
    """The build at a folder."""
    summary = json.loads((build / "plan.json").read_text())
    parts = [plan.load_part(build / "parts" / f"{row['name']}.json") for row in summary["parts"]]
    tokenizer = read_tokenizer(build / "source/tokenizer.json")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    cut = windows(ids, tokenizer.encode("").ids, window, tokens // window)
    return Case(build, [p for p in parts if p.kind != "embedding"], original(build / "source", summary), cut)


def changed(case: Case, values: Values) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The checkpoint's tensors of the layers as changed matrices give them, in fp16, and the LM head's rows."""
    tensors: dict[str, Tensor] = {}
    head: list[Tensor] = []
    for part in case.parts:
        weights = PartWeights(part, case.source)
        for path, blocks in sites(part).items():
            new = values(weights[path], path, part)
            if part.kind == "head":
                head.append(new)
            else:
                tensors |= as_stored(blocks, new, case.source)
    return tensors, head or head_blocks(case.model.head)


def measured(case: Case, values: Values, before: list[Tensor]) -> Found:
    """What a set of forms costs. `before` gets the original's log-probabilities of each window if it is empty."""
    tensors, head = changed(case, values)
    known, reference = case.model.weights, case.model.reference
    fill = not before
    loss = kl = same = clear = count = 0.0
    for i, window in enumerate(case.cut):
        logits = reference.run(
            window,
            lambda ids: case.model.table[ids],
            head,
            lambda name: tensors[name] if name in tensors else known(name),
        )["logits"]
        now = log_softmax(logits, dim=-1)
        if fill:
            before.append(now.half())
        was = before[i].float()
        targets = torch.tensor(window[1:])
        loss -= float(now[:-1].gather(1, targets[:, None]).sum())
        kl += float((was.exp() * (was - now)).sum())
        best = was.topk(2, dim=-1)
        decided = best.values[:, 0] - best.values[:, 1] >= CLEAR
        same += float(((now.argmax(dim=-1) == best.indices[:, 0]) & decided).sum())
        clear, count = clear + float(decided.sum()), count + len(window)
    return Found(math.exp(loss / (count - len(case.cut))), kl / count, same / clear)


def nearest(weight: Tensor, bits: int) -> Tensor:
    """As conversion rounds."""
    codes, scale, _ = to_integers(weight, form(f"int{bits}").levels)
    return Codes(codes.to(torch.int8), scale).values


def calibrated(build: Path, forms: Mapping[str, str]) -> Values:
    """INT4 by the build's codes, INT8 to nearest."""

    def values(weight: Tensor, path: str, part: Part) -> Tensor:
        if forms[path] != INT4:
            return nearest(weight, 8)
        with safe_open(build / "codes" / f"{part.name}.safetensors", framework="pt") as stored:
            return Codes(*(stored.get_tensor(f"{path}.{INT4}.{what}") for what in ("codes", "scale"))).values

    return values


@dataclass(frozen=True)
class Variant:
    """Forms, the values they give, and the growth of the perplexity that is foreseen."""

    name: str
    forms: Mapping[str, str]
    values: Values
    foreseen: float | None = None


def variants(case: Case, growths: Sequence[float]) -> Iterator[Variant]:
    """What is compared, the original first."""
    paths = [path for part in case.parts for path in matrices(part.shapes)]
    four = {path: INT4 if path.startswith("layers.") else INT8 for path in paths}

    def by_form(of_four: Callable[[Tensor], Tensor]) -> Values:
        return lambda weight, path, _: of_four(weight) if four[path] == INT4 else nearest(weight, 8)

    yield Variant("original", dict.fromkeys(paths, FP16), lambda weight, *_: weight, 1.0)
    yield Variant("int8", dict.fromkeys(paths, INT8), lambda weight, *_: nearest(weight, 8))
    yield Variant("int4, head int8: to nearest", four, by_form(lambda weight: nearest(weight, 4)))
    yield Variant("int4, head int8: scales that cut off", four, by_form(lambda weight: clipped(weight, 4).values))
    yield Variant("int4, head int8: GPTQ", four, calibrated(case.build, four))
    budgets = [(f"perplexity x {growth:g}", {"perplexity": growth}) for growth in growths]
    budgets.append(("as many bytes as int4 with the head in int8", {"bytes_per_token": bytes_of(case, four)}))
    files = [case.build / "sensitivity" / f"{part.name}.json" for part in case.parts]
    costs = [json.loads(file.read_text())["matrices"] for file in files]
    for name, budget in budgets:
        found = searched(case.parts, costs, budget)
        if found:
            forms = {path: found["forms"].get(path, INT8) for path in paths}
            yield Variant(f"search: {name}", forms, calibrated(case.build, forms), found["estimate"]["perplexity"])


def bytes_of(case: Case, forms: Mapping[str, str]) -> int:
    """Of all weights that a pass reads."""
    constants = [item for part in case.parts for item in part.shapes.items()]
    return sum(stored_bytes(forms.get(path, FP16), shape) for path, shape in constants)


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--growths", type=float, nargs="*", default=[1.01, 1.03, 1.05, 1.1])
    args = parser.parse_args()
    case = open_case(args.build, args.text, args.tokens, args.window)
    before: list[Tensor] = []
    rows: list[dict[str, Any]] = []
    numbers = sum(math.prod(shape) for part in case.parts for shape in matrices(part.shapes).values())
    for one in variants(case, args.growths):
        found = measured(case, one.values, before)
        kept = sum(stored_bytes(one.forms[p], s) for part in case.parts for p, s in matrices(part.shapes).items())
        row = {"name": one.name, "bytes": bytes_of(case, one.forms), "bits_per_weight": 8 * kept / numbers}
        row |= {"foreseen": one.foreseen, "perplexity": found.perplexity, "kl": found.kl, "top1": found.top1}
        rows.append(row | {"growth": found.perplexity / (rows[0]["perplexity"] if rows else found.perplexity)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    points = sorted((row["foreseen"], row["growth"]) for row in rows if row["foreseen"])
    monotone = all(a[1] <= b[1] for a, b in pairwise(points))
    tokens = sum(map(len, case.cut))
    print(json.dumps({"machine": machine(), "tokens": tokens, "monotone": monotone, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
