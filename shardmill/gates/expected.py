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
from shardmill.gates.case import cache_of, experts_contribution, part_case
from shardmill.gates.disturbed import FP16, NOISE, Probe, disturbed
from shardmill.gates.drafters import drafter_case
from shardmill.gates.encoder import part_weights, stored_answers, with_tables
from shardmill.gates.encoder_reference import EncoderReference
from shardmill.gates.naming import Weights
from shardmill.gates.reference import Reference, checkpoint_weights
from shardmill.gates.replacements import replaced
from shardmill.gates.stack import StoredModel
from shardmill.gates.stored import StoredWeights
from shardmill.gates.thresholds import THRESHOLDS
from shardmill.gates.tower import TowerReference
from shardmill.models.architecture import CLASSIFY
from shardmill.models.part_kinds import PART_KINDS, pass_inputs
from shardmill.plan import Part
from shardmill.runtime.engine import Table
from shardmill.runtime.expected import ABOUT, FORMAT, LARGEST, PLACES, ROWS, below, grids, lengths_of, rows, spread

MOST_BYTES = 1_000_000  # of all results of a build
PROMPT, ANSWER = 16, 8  # tokens
Seed = tuple[int, int]  # a seed and an exponent
STRIDE = 1000  # between the first seeds of parts and attempts: a part has one for each of its layers
SEEDS = 8  # that are tried for a part, until rounding to fp16 changes no choice of experts
STREAMS = ("x", "hidden", "embedded")  # inputs with the residual stream's scale
LARGEST_EXPONENT, SMALLEST_EXPONENT = 8, -8  # of the inputs: far from both ends of fp16
UNMADE = "rounding to fp16 alone changes which experts its tokens take"
UNREAD = {"why_not": "this version can't make its inputs"}  # for readers that don't know a key


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
    if part.drafter:
        _record_drafter(recording, part, place, plan, known, source, stored)
        return
    caches = _lent(part, reference, known, source, stored)
    for attempt in range(SEEDS):
        seeds = _seeds(part, known, caches, (place * SEEDS + attempt) * STRIDE)
        run = _results(part, plan, reference, known, source, stored, seeds, caches)
        made = _made(part, seeds, run, reference.model)
        if made is not None:
            recording.add(part, *made)
            return
    recording.add(part, {"why_not": f"{UNMADE}: the first answer runs it"}, {})


def _record_drafter(
    recording: Recording,
    part: Part,
    place: int,
    plan: Mapping[str, Any],
    known: Mapping[str, Tensor],
    source: Path,
    stored: StoredWeights,
) -> None:
    """Record what a part of a drafter gives by the reference with which its gates compare it."""
    case, into = drafter_case(part, plan, known, source, stored), _scale(part, 0)
    assert case.fed is not None
    scales = {name: into if name in STREAMS else 1.0 for name in case.rows}
    seeds: dict[str, Seed] = {
        name: (place * SEEDS * STRIDE + number, _exponent(torch.from_numpy(each) * scales[name]))
        for number, (name, each) in enumerate(case.rows.items())
    }
    count = min(ROWS, plan["context"])
    made = {
        name: torch.from_numpy(rows(*seeds[name], count, each.shape[1])) / scales[name]
        for name, each in case.rows.items()
    }
    seeds |= {"places": (place * SEEDS * STRIDE + len(seeds), 0)} if part.kind == "head" else {}
    fed = case.fed
    entry = _made(part, seeds, lambda: fed(made) * _scale(part, 1), case.model)
    recording.add(part, *(entry or ({"why_not": UNMADE}, {})))


def _scale(part: Part, end: int) -> float:
    """Return the factor of a program's input, or for 1 of its output, in its own units."""
    return float(part.spec.graph.stream_scale) if PART_KINDS[part.kind].streams[end] else 1.0


def _lent(
    part: Part, reference: Reference, known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> dict[str, dict[str, Tensor]]:
    """Return by type the keys and values that earlier parts lend a part for a text, by the names of its inputs."""
    lent = dict[str, dict[str, Tensor]]()
    for layer, _ in part.spec.lent:
        original = checkpoint_weights(source, stored.prefix)
        reference.given(known["hidden"][0], known["rows"])
        for name, pair in reference.shared_caches(known["hidden"][layer], layer, original).items():
            lent[name] = {f"{letter}_{layer}": each for letter, each in zip("kv", pair, strict=True)}
    return lent


def _made(
    part: Part, seeds: Mapping[str, Seed], run: Callable[[], Tensor], model: Any
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return a part's entry and arrays, given what computes its results by transformers' model.

    None if fp16 changes a choice of experts.
    """
    exact, entry = run(), _entry(part, seeds)
    if part.kind != "head":
        limits, hopeless = _limits(model, exact, run)
        return None if hopeless else (entry | {"limits": limits}, {"rows": exact.numpy()})
    largest = exact.topk(min(LARGEST, exact.shape[1])).indices
    at = below(seeds["places"][0], PLACES, exact.shape[1])

    def picked(logits: Tensor) -> Tensor:
        return torch.cat([logits[:, at], logits.gather(1, largest)], dim=1)

    limits, _ = _limits(model, picked(exact), lambda: picked(run()))
    return entry | {"limits": limits}, {"rows": picked(exact).numpy(), "largest": largest.int().numpy()}


def _entry(part: Part, seeds: Mapping[str, Seed]) -> dict[str, Any]:
    """Return a part's entry but its limits: how its inputs are made, in keys that tell readers if they can't."""
    experts = part.spec.graph.experts
    if part.drafter or part.spec.lent:
        return {"inputs": seeds} | UNREAD
    if part.kind == "experts" and experts is not None:
        return {"seeds": seeds, "taken": min(experts.chosen, part.end - part.start)} | UNREAD
    return {"seeds": seeds}


def _limits(model: Any, exact: Tensor, run: Callable[[], Tensor]) -> tuple[dict[str, float], bool]:
    """Return how far a program may be from a result, by precision, and whether fp16 is no comparison at all."""
    with disturbed(model, NOISE[FP16]):
        probe = Probe(exact, run(), FP16, 0)
    fp16 = min(probe.allowed.limit, THRESHOLDS["width_error_fp16"].limit)
    return {"fp32": THRESHOLDS["program_error"].limit, "fp16": fp16}, bool(probe.hopeless)


def _seeds(
    part: Part, known: Mapping[str, Tensor], caches: Mapping[str, Mapping[str, Tensor]], first: int
) -> dict[str, Seed]:
    """Return a seed and an exponent for each input that is made of numbers; inputs are as large as in a text.

    Args:
        part: the part.
        known: the reference step's output.
        caches: the lent caches, see `_lent`.
        first: the first seed.
    """
    into = _scale(part, 0)
    edge, names = known["hidden"][part.start if part.spec.layers else -1], pass_inputs(part.spec)
    if part.kind == "experts":
        edge = torch.ones(1)  # a norm makes their inputs
    seeds = {}
    for name in names:
        if name in STREAMS:
            seeds[name] = first, _exponent(edge * into)
        elif name.startswith("p_"):
            seeds[name] = first + 1 + int(name.removeprefix("p_")), _exponent(known["rows"] * into)
    lent = [(name, each) for pair in caches.values() for name, each in pair.items()]
    seeds |= {name: (first + STRIDE // 2 + number, _exponent(each)) for number, (name, each) in enumerate(lent)}
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
    caches: Mapping[str, Mapping[str, Tensor]],
) -> Callable[[], Tensor]:
    """Return what computes a part's outputs for the numbers of seeds, [n, channels] in the program's units.

    Every edge between layers has the same rows, so that the part finds its own there. Experts read the rows in place of
    what their layer makes of any token. Rows of lent caches take the place of what the model makes for them.
    """
    spec, count = part.spec, min(ROWS, plan["context"])
    into, out_of = _scale(part, 0), _scale(part, 1)
    shapes, lent = pass_inputs(spec), {name: each for pair in caches.values() for name, each in pair.items()}
    inputs = [name for name in seeds if name in shapes and name not in lent]
    made = {name: torch.from_numpy(rows(*seeds[name], count, shapes[name][1])) / into for name in inputs}
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
    fed = {
        name: tuple(
            cache_of(torch.from_numpy(rows(*seeds[n], count, each.shape[1] * each.shape[3])), each)
            for n, each in pair.items()
        )
        for name, pair in caches.items()
    }

    def run() -> Tensor:
        with replaced(reference, "lent", fed):
            return torch.cat(case.expected(), dim=1) * out_of

    return run


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
    recording.add(part, {"why_not": UNMADE}, {})


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
    assert part.spec.tower is not None
    reference, channels = TowerReference(source), part.spec.tower.column // rules["frames"]
    every = grids(part.spec.tokens, rules)

    def run() -> list[Tensor]:
        made = [rows(place, 0, down * across, channels).T.copy() for down, across in every]
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
