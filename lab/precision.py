"""What forms of the matrices cost on a text: rounding, scales that cut off, GPTQ, and what the search buys.

    python lab/precision.py build/MODEL TEXT_FILE [--tokens 8192] [--every 8] [--growths 1.01 1.03 1.05 1.1]
        [--json OUT.json]

For a build with `convert: {precision: search}`: its codes, and what its matrices cost, are read from it, so that no
quantiser runs again. Everything is measured in transformers and fp32, with the weights as packages of these forms hold
them (question 1 of a build says that its programs are that model). Windows do not overlap; each begins as the tokenizer
begins a text. The text must be none that the build was calibrated with. With --every 8, each
eighth of them is taken, from all over the text.
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
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from shardmill import plan
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.convert.palette import to_integers
from shardmill.convert.weights import PartWeights
from shardmill.errors import ConfigError
from shardmill.forms.form import FP16, INT4, INT8, form, matrices, stored_bytes
from shardmill.gates.stored import Stored, StoredWeights
from shardmill.machine import machine
from shardmill.plan import Part
from shardmill.precision.measured import measured_forms, write_original
from shardmill.precision.original import Original, original
from shardmill.precision.part_codes import FormWeights
from shardmill.precision.quantisers import QuantizedMatrix, clipped
from shardmill.precision.search import searched
from shardmill.precision.windows import windows

Held = Callable[[Part], StoredWeights]


@dataclass(frozen=True)
class Case:
    """A build, its parts, and the windows to measure on."""

    build: Path
    prefix: str
    parts: list[Part]
    model: Original
    cut: list[list[int]]

    @property
    def source(self) -> Path:
        return self.build / "source"


def open_case(build: Path, text: Path, tokens: int | None, window: int, every: int) -> Case:
    """Return the build at a folder."""
    summary = json.loads((build / "plan.json").read_text())
    parts = [plan.load_part(build / "parts" / f"{row['name']}.json") for row in summary["parts"]]
    tokenizer = read_tokenizer(build / "source/tokenizer.json")
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    cut = windows(ids, tokenizer.encode("").ids, window, tokens and tokens // window)
    model = original(build / "source", summary)
    return Case(build, summary["prefix"], [p for p in parts if p.kind != "embedding"], model, cut[::every])


class Changed(StoredWeights):
    """A part's constants with other values in some matrices, and in fp16 else."""

    def __init__(self, part: Part, case: Case, values: Callable[[Tensor, str], Tensor | QuantizedMatrix]) -> None:
        super().__init__(part, part.name, case.prefix)
        self.weights, self.values_of = PartWeights(part, case.source), values

    def stored(self, path: str) -> Stored:
        """Return a constant as it would be stored."""
        values = self.values_of(self.weights[path], path) if path in matrices(self.part.shapes) else self.weights[path]
        if isinstance(values, QuantizedMatrix):
            return Stored(values.codes, scale=values.scale.float()[:, None])
        return Stored(values.half().squeeze())


def nearest(weight: Tensor, bits: int) -> QuantizedMatrix:
    """Round as conversion does."""
    codes, scale, _ = to_integers(weight, form(f"int{bits}").levels)
    return QuantizedMatrix(codes.to(torch.int8), scale)


@dataclass(frozen=True)
class Variant:
    """Forms, what holds the weights in them, and the growth of the perplexity that is foreseen."""

    name: str
    forms: Mapping[str, str]
    held: Held
    foreseen: float | None = None


def variants(case: Case, growths: Sequence[float], allowed: Sequence[str]) -> Iterator[Variant]:
    """Yield what is compared."""
    paths = [path for part in case.parts for path in matrices(part.shapes)]
    four = {path: INT4 if path.startswith("layers.") else INT8 for path in paths}

    def as_codes(forms: Mapping[str, str]) -> Held:
        codes = case.build / "codes"
        return lambda part: FormWeights(part, case.source, codes / f"{part.name}.safetensors", forms, case.prefix)

    def rounded(values: Callable[[Tensor, str], Tensor | QuantizedMatrix]) -> Held:
        return lambda part: Changed(part, case, values)

    def by_form(of_four: Callable[[Tensor], QuantizedMatrix]) -> Held:
        return rounded(lambda weight, path: of_four(weight) if four[path] == INT4 else nearest(weight, 8))

    yield Variant("fp16", dict.fromkeys(paths, FP16), rounded(lambda weight, _: weight))
    yield Variant("int8", dict.fromkeys(paths, INT8), rounded(lambda weight, _: nearest(weight, 8)))
    yield Variant("int4, head int8: to nearest", four, by_form(lambda weight: nearest(weight, 4)))
    yield Variant("int4, head int8: scales that cut off", four, by_form(lambda weight: clipped(weight, 4)))
    yield Variant("int4, head int8: GPTQ", four, as_codes(four))
    budgets = [(f"perplexity x {growth:g}", {"perplexity": growth}) for growth in growths]
    budgets.append(("as many bytes as int4 with the head in int8", {"bytes_per_token": bytes_of(case, four)}))
    files = [case.build / "sensitivity" / f"{part.name}.json" for part in case.parts]
    costs = [json.loads(file.read_text())["matrices"] for file in files]
    for name, budget in budgets:
        try:
            chosen = searched(case.parts, costs, budget, allowed)
        except ConfigError as error:
            print(error)
            continue
        forms = {path: chosen["forms"].get(path, INT8) for path in paths}
        yield Variant(f"search: {name}", forms, as_codes(forms), chosen["estimate"]["perplexity"])


def bytes_of(case: Case, forms: Mapping[str, str]) -> int:
    """Return the bytes of all weights that a pass reads."""
    constants = [item for part in case.parts for item in part.shapes.items()]
    return sum(stored_bytes(forms.get(path, FP16), shape) for path, shape in constants)


def rows_of(case: Case, growths: Sequence[float], allowed: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield what each variant takes and costs."""
    numbers = sum(math.prod(shape) for part in case.parts for shape in matrices(part.shapes).values())
    with TemporaryDirectory() as folder:
        states = Path(folder) / "original.safetensors"
        write_original(case.model, case.cut, states)
        for one in variants(case, growths, allowed):
            figures = measured_forms(case.model, states, [one.held(part) for part in case.parts])
            stored = sum(stored_bytes(one.forms[p], s) for part in case.parts for p, s in matrices(part.shapes).items())
            row = {"name": one.name, "bytes": bytes_of(case, one.forms), "bits_per_weight": 8 * stored / numbers}
            yield row | {"foreseen": one.foreseen, "growth": figures.pop("perplexity")} | figures


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, help="of the text; all of it by default")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--growths", type=float, nargs="*", default=[1.01, 1.03, 1.05, 1.1])
    parser.add_argument("--forms", nargs="*", default=[INT4, INT8], help="that the search may take")
    parser.add_argument("--json", type=Path, help="where to write what is printed, without the solver's remarks")
    args = parser.parse_args()
    case = open_case(args.build, args.text, args.tokens, args.window, args.every)
    rows: list[dict[str, Any]] = []
    for row in rows_of(case, args.growths, args.forms):
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
    points = sorted((row["foreseen"], row["growth"]) for row in rows if row.get("foreseen"))
    monotone = all(a[1] <= b[1] for a, b in pairwise(points))
    tokens = sum(map(len, case.cut))
    text = json.dumps({"machine": machine(), "tokens": tokens, "monotone": monotone, "rows": rows}, indent=1)
    if args.json:
        args.json.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
