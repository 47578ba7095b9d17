"""Records what transformers gives with the packages' weights for the inputs of `runtime.expected`, for `check`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmill.files import dumps
from shardmill.gates.case import experts_contribution, part_case
from shardmill.gates.disturbed import FP16, NOISE, Probe, disturbed
from shardmill.gates.encoder import part_weights, stored_answers, with_tables
from shardmill.gates.encoder_reference import EncoderReference
from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.stack import StoredModel
from shardmill.gates.stored import StoredWeights
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.gates.tower import TowerReference
from shardmill.models.architecture import CLASSIFY
from shardmill.models.part_kinds import PART_KINDS, inputs, pass_inputs
from shardmill.plan import Part
from shardmill.runtime.engine import Table
from shardmill.runtime.expected import (
    ABOUT,
    FORMAT,
    LARGEST,
    PLACES,
    ROWS,
    below,
    grids,
    lengths_of,
    made_columns,
    rows,
    spread,
)

MOST_BYTES = 1_000_000  # of all results of a build
PROMPT, ANSWER = 16, 8  # tokens
Seed = tuple[int, int]  # a seed and an exponent
STRIDE = 1000  # between the first seeds of parts and attempts: a part has one for each of its layers
SEEDS = 8  # that are tried for a part, until rounding to fp16 changes no choice of experts
LARGEST_EXPONENT, SMALLEST_EXPONENT = 8, -8  # of the inputs: far from both ends of fp16
UNMADE = {
    "drafter": "it drafts, and changes no text",
    "lent": "it reads the caches of other parts: the first answer runs it",
    "choices": "rounding to fp16 alone changes which experts its tokens take: the first answer runs it",
}


@dataclass
class Recording:
    """What is written to the file."""

    about: dict[str, Any] = field(default_factory=lambda: {"format": FORMAT, "parts": {}})
    arrays: dict[str, NDArray[Any]] = field(default_factory=dict)

    def add(self, part: Part, entry: dict[str, Any], results: Mapping[str, NDArray[Any]]) -> None:
        """Add a part's entry, and its arrays by their names."""
        self.about["parts"][part.name] = entry
        self.arrays |= {f"{part.name}/{name}": array for name, array in results.items()}

    def thinned(self) -> None:
        """Keep only every n-th channel of hidden states, if all results would take more than MOST_BYTES."""
        logits = {name.split("/")[0] for name in self.arrays if name.endswith("/largest")}
        hidden = {name: array for name, array in self.arrays.items() if name.split("/")[0] not in logits}
        rest = sum(array.nbytes for name, array in self.arrays.items() if name not in hidden)
        every = math.ceil(sum(array.nbytes for array in hidden.values()) / max(MOST_BYTES - rest, 1))
        for name, array in hidden.items() if every > 1 else ():
            self.arrays[name] = np.ascontiguousarray(array[:, ::every])
            self.about["parts"][name.split("/")[0]]["every"] = every

    def write(self, file: Path) -> None:
        """Write everything to a file."""
        from safetensors.numpy import save_file

        save_file(self.arrays, file, {ABOUT: dumps(self.about)})


def record_decoder(
    recording: Recording,
    part: Part,
    place: int,
    plan: Mapping[str, Any],
    reference: Reference,
    known: Mapping[str, Tensor],
    source: Path,
    stored: StoredWeights,
) -> None:
    """Record what a part of a decoder gives.

    Args:
        recording: what is written.
        part: any part but the embedding.
        place: the part's number, which decides its seeds.
        plan: plan.json's content.
        reference: transformers' model.
        known: the reference step's output, which decides how large inputs are.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    why = "drafter" if part.drafter else "lent" if part.spec.lent else ""
    for attempt in range(0 if why else SEEDS):
        seeds = _seeds(part, known, (place * SEEDS + attempt) * STRIDE)
        made = _made(part, seeds, _results(part, plan, reference, known, source, stored, seeds), reference)
        if made is not None:
            recording.add(part, *made)
            return
    recording.add(part, {"why_not": UNMADE[why or "choices"]}, {})


def _made(
    part: Part, seeds: Mapping[str, Seed], run: Callable[[], Tensor], reference: Reference
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return a part's entry and arrays, given what computes its results; None if fp16 changes a choice of experts."""
    exact = run()
    if part.kind != "head":
        limits, hopeless = _limits(reference.model, exact, run)
        return None if hopeless else ({"seeds": seeds, "limits": limits} | _taken(part), {"rows": exact.numpy()})
    largest = exact.topk(min(LARGEST, exact.shape[1])).indices
    at = below(seeds["places"][0], PLACES, exact.shape[1])

    def picked(logits: Tensor) -> Tensor:
        return torch.cat([logits[:, at], logits.gather(1, largest)], dim=1)

    limits, _ = _limits(reference.model, picked(exact), lambda: picked(run()))
    return {"seeds": seeds, "limits": limits}, {"rows": picked(exact).numpy(), "largest": largest.int().numpy()}


def _taken(part: Part) -> dict[str, Any]:
    """Return how many experts of a group each row takes; and what tells readers that can't make such rows."""
    experts = part.spec.graph.experts
    if part.kind != "experts" or experts is None:
        return {}
    return {"taken": min(experts.chosen, part.end - part.start), "why_not": "this version can't make its inputs"}


def _limits(model: Any, exact: Tensor, run: Callable[[], Tensor]) -> tuple[dict[str, float], bool]:
    """Return how far a program may be from a result, by precision, and whether fp16 is no comparison at all."""
    with disturbed(model, NOISE[FP16]):
        probe = Probe(exact, run(), FP16, 0)
    fp16 = min(probe.allowed.limit, THRESHOLDS["width_error_fp16"].limit)
    return {"fp32": THRESHOLDS["program_error"].limit, "fp16": fp16}, bool(probe.hopeless)


def _seeds(part: Part, known: Mapping[str, Tensor], first: int) -> dict[str, Seed]:
    """Return a seed and an exponent for each input that is made of numbers; inputs are as large as in a text.

    Args:
        part: the part.
        known: the reference step's output.
        first: the first seed.
    """
    into = part.spec.graph.stream_scale if PART_KINDS[part.kind].streams[0] else 1.0
    edge, names = known["hidden"][part.start if part.spec.layers else -1], pass_inputs(part.spec)
    if part.kind == "experts":
        edge = torch.ones(1)  # a norm makes their inputs
    seeds = {}
    for name in names:
        if name in ("x", "hidden", "embedded"):
            seeds[name] = first, _exponent(edge * into)
        elif name.startswith("p_"):
            seeds[name] = first + 1 + int(name.removeprefix("p_")), _exponent(known["rows"] * into)
    return seeds | ({"places": (first + 1, 0)} if part.kind == "head" else {})


def _exponent(values: Tensor) -> int:
    """Return the exponent with which numbers of a seed have about the median of some values."""
    median = float(values.abs().median())
    return min(max(round(math.log2(2 * median)) if median else 0, SMALLEST_EXPONENT), LARGEST_EXPONENT)


def _results(
    part: Part,
    plan: Mapping[str, Any],
    reference: Reference,
    known: Mapping[str, Tensor],
    source: Path,
    stored: StoredWeights,
    seeds: Mapping[str, Seed],
) -> Callable[[], Tensor]:
    """Return what computes a part's outputs for the numbers of seeds, [n, channels] in the program's units.

    Every edge between layers has the same rows, so that the part finds its own there. Experts read the rows in place of
    what their layer makes of any token.
    """
    spec, count = part.spec, min(ROWS, plan["context"])
    into, out_of = (spec.graph.stream_scale if scaled else 1.0 for scaled in PART_KINDS[part.kind].streams)
    shapes = pass_inputs(spec)
    made = {n: torch.from_numpy(rows(*seeds[n], count, shapes[n][1])) / into for n in seeds if n in shapes}
    x = made["x" if "x" in made else "hidden"]
    if part.layer is not None:
        token = known["hidden"][part.layer][:1].expand(count, -1)
        weights = stored.over(checkpoint_weights(source, stored.prefix))
        return lambda: experts_contribution(reference, part, token, weights, x)[1] * out_of
    known = {"hidden": x.expand(plan["architecture"]["layers"] + 1, *x.shape)}
    known["logits"] = torch.zeros(()).expand(count, plan["architecture"]["vocab"])
    if width := spec.graph.per_layer:
        by_layer = [made.get(f"p_{i}", torch.zeros(count, width)) for i in range(plan["architecture"]["layers"])]
        known["rows"] = torch.cat(by_layer, dim=1)
    case = part_case(part, reference, known, source, stored)

    return lambda: torch.cat(case.expected(), dim=1) * out_of


def record_encoder(
    recording: Recording,
    part: Part,
    place: int,
    plan: Mapping[str, Any],
    reference: EncoderReference,
    known: Mapping[str, Tensor],
    tables: Mapping[str, Table],
    original: Weights,
    stored: StoredWeights,
) -> None:
    """Record what a program of an encoder's bucket gives for texts of some lengths.

    A part that begins with a later layer is fed with numbers of a seed, as large as in a text.

    Args:
        recording: what is written.
        part: the part.
        place: the part's number, which decides its seeds.
        plan: plan.json's content.
        reference: transformers' model.
        known: the reference step's output, which decides how large inputs are.
        tables: the host's.
        original: the checkpoint's weights, for what other parts hold.
        stored: the package's weights.
    """
    last, scale, table = part.end == len(reference.layers), part.spec.graph.stream_scale, plan["tables"]["embedding"]
    weights = with_tables(tables, plan, part_weights(part, reference, stored, original))
    answers, by_text = stored_answers(plan, stored) if last else None, last and plan["task"] == CLASSIFY
    tokens, positions = below(place, part.spec.tokens, plan["architecture"]["vocab"]), lengths_of(part.spec.tokens)
    texts = [tokens[: places[-1] + 1] for places in positions.values()]

    def run(seeds: Mapping[str, Seed]) -> Tensor:
        made = [rows(*seeds["x"], len(text), part.spec.graph.hidden) for text in texts] if "x" in seeds else []
        hidden = torch.from_numpy(np.concatenate(made)) / scale if made else None
        joined = reference.between(part.start, part.end, hidden, texts, weights, table, answers)
        outputs = torch.split(joined if last else joined * scale, [1 if by_text else len(text) for text in texts])
        return torch.cat([out if by_text else out[at] for out, at in zip(outputs, positions.values(), strict=True)])

    for attempt in range(SEEDS if part.start else 1):
        seeds: dict[str, Seed] = {"tokens": (place, 0)}
        if part.start:
            seeds["x"] = (place * SEEDS + attempt) * STRIDE, _exponent(known[part.edge(part.start)] * scale)
        exact = run(seeds)
        limits, hopeless = _limits(reference.model, exact, partial(run, seeds))
        if not (hopeless and part.start):
            counts = [1 if by_text else len(at) for at in positions.values()]
            results = {f"rows/{way}": r.numpy() for way, r in zip(positions, torch.split(exact, counts), strict=True)}
            recording.add(part, {"seeds": seeds, "limits": limits}, results)
            return
    recording.add(part, {"why_not": UNMADE["choices"].partition(":")[0]}, {})


def record_tower(
    recording: Recording, part: Part, place: int, rules: Mapping[str, Any], source: Path, stored: StoredWeights
) -> None:
    """Record what a tower's program gives for images of some grids.

    Args:
        recording: what is written.
        part: the part.
        place: the part's number, which is the seed of its images.
        rules: plan.json's `tower`.
        source: the checkpoint's folder.
        stored: the package's weights.
    """
    reference, every, x = TowerReference(source), grids(part.spec.tokens, rules), inputs(part.spec)["x"]

    def run() -> list[Tensor]:
        made = [made_columns([int(n) for n in x], place, 0, grid, rules) for grid in every]
        whole = [reference.rows(each, grid, rules, stored) for each, grid in zip(made, every, strict=True)]
        return [each[spread(len(each))] for each in whole]

    exact = run()
    limits, _ = _limits(reference.tower, torch.cat(exact), lambda: torch.cat(run()))
    limits |= {"fp32": THRESHOLDS["tower_error"].limit}
    results = {f"rows/{down} x {across}": r.numpy() for (down, across), r in zip(every, exact, strict=True)}
    recording.add(part, {"seeds": {"x": (place, 0)}, "limits": limits}, results)


def greedy(stored: StoredModel, text: Sequence[int], table: Table, second: Table | None) -> dict[str, Any]:
    """Return transformers' greedy continuation of the beginning of a text, as `runtime.expected.Answer` has it.

    All tokens are guessed at once, at first from the text. Each pass corrects at least the first wrong token,
    and often later ones, too. The last token is fed to no pass: nothing follows it.
    """
    prompt, guess = [*text[:PROMPT]], [*text[PROMPT : PROMPT + ANSWER]]
    guess += [0] * (ANSWER - len(guess))
    for _ in range(ANSWER):
        fed = guess[:-1]
        best = stored.logits([*prompt, *fed], table, second)[len(prompt) - 1 :].topk(2)
        guess = best.indices[:, 0].tolist()
        if guess[:-1] == fed:
            break
    gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
    rivals = [[int(token), float(f"{gap:.4g}")] for token, gap in zip(best.indices[:, 1], gaps, strict=True)]
    return {"prompt": prompt, "tokens": guess, "rivals": rivals}
