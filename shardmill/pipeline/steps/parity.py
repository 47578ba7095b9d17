"""parity: a part against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import plan as plans
from shardmill.files import digest, read_json
from shardmill.forms import recipe as recipes
from shardmill.gates import by_bits
from shardmill.models.architecture import PREFIX
from shardmill.models.interface import FIXED, TOWER
from shardmill.pipeline.steps.coded import has_codes
from shardmill.pipeline.steps.reference import seen
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder
from shardmill.pipeline.verdict import write_verdict
from shardmill.runtime.bundles import reshaping
from shardmill.runtime.manifest import of_drafter

if TYPE_CHECKING:
    from torch import Tensor

    from shardmill.gates.measurement import Margin, Measurement, NotRun, Stretch
    from shardmill.gates.weights import PackageWeights
    from shardmill.plan import Part


def task(
    summary: Path,
    part: Path,
    recipe: Artifact,
    record: Path,
    states: Artifact,
    package: Artifact,
    bundle: Artifact,
    codes: list[Artifact],
    reshape: str,
    engine: Mapping[str, str],
    tools: Tools,
) -> Task:
    """Describe a verdict, which depends on the part, its programs, the reference, and the engine.

    The bits that the recipe gives the matrices decide the part's limits. The package's weights are read; the bundle
    runs.
    """
    piece, plan = plans.load_part(part), read_json(summary)
    followed = recipes.read_recipe(read_json(recipe.path), recipe.path.name)
    forms = piece.forms(followed)
    judged = by_bits.part_limits(piece, followed)
    file = codes[0].path if codes and has_codes(codes[0].path, forms) else None
    told = hint([piece], reshape)

    def work(made: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.gates.rounding import furthest
        from shardmill.gates.weights import Chosen, PackageWeights

        chosen = Chosen(file, forms) if file else None
        # The names of a tower's tensors are the whole model's.
        stored = PackageWeights(package.path, piece, PREFIX if piece.kind == TOWER else plan["prefix"], chosen)
        source = source_folder(record)
        with reshaping(told.get("reshape_frequency", "")):
            measured = measurements(bundle.path, piece, plan, load_file(states.path), source, stored, forms)
            content = parity_verdict(piece.name, engine, measured, judged, partial(furthest, [stored], source)) | told
        write_verdict(f"parity {piece.name}", content, made["verdict"])

    inputs = {
        "part": digest(piece.content),
        "forms": digest(forms),
        "package": package.sha256,
        "bundle": bundle.sha256,
        "reference": _config_of(record) if piece.kind == TOWER else seen(states.path, piece),
    } | ({"codes": codes[0].sha256} if file else {})
    inputs |= {"drafter": drafter_files(record)} if piece.drafter else {}
    of = {**host_side(of_drafter(plan)), "taps": plan["drafter"]["taps"]} if piece.drafter else host_side(plan)
    of = {TOWER: plan[TOWER]} if piece.kind == TOWER else of
    params = {**of, "tokens": piece.spec.tokens, "verify": plan["verify"], "engine": engine, **judged, **told}
    return Task(work, Action("parity", inputs, params, **tools), {"engine": engine, **told})


def measurements(
    bundle: Path,
    piece: Part,
    plan: Mapping[str, Any],
    known: Mapping[str, Tensor],
    source: Path,
    stored: PackageWeights,
    forms: Mapping[str, str],
) -> Iterator[Measurement | NotRun]:
    """Yield the measurements of a program: layers, experts, an LM head, an encoder, a tower, or a drafter.

    Measurements of weights come first: coremltools holds a matrix twice while reading it, so the transformers model is
    loaded later.

    Args:
        bundle: the .mlmodelc, which runs.
        piece: the part behind the bundle.
        plan: plan.json's content.
        known: the output of the step reference.
        source: the checkpoint's folder.
        stored: the package's weights.
        forms: the form that the recipe gives to each matrix, by its path in the program.
    """
    from shardmill.gates import adapters, case, drafters, encoder, parity, tower
    from shardmill.gates.encoder_reference import EncoderReference, passages
    from shardmill.gates.reference import Reference, carried_channels, checkpoint_weights
    from shardmill.gates.rounding import weights_kept
    from shardmill.gates.runner import PartRunner

    yield from weights_kept(stored, source, forms)
    if piece.kind == TOWER:
        yield from tower.tower_parity(bundle, piece, plan[TOWER], source, stored)
        return
    runner = PartRunner(bundle, piece, of_drafter(plan) if piece.drafter else plan)
    if piece.spec.encodes:
        classes, weights = EncoderReference(source, plan["task"]), checkpoint_weights(source, plan["prefix"])
        texts = passages(known["tokens"].tolist(), piece.spec.tokens, plan["task"])
        part_case = encoder.encoder_case(piece, plan, classes, texts, encoder.known_of(piece, known), stored, weights)
    elif piece.drafter:
        part_case = drafters.drafter_case(piece, plan, known, source, stored)
    else:
        reference = Reference(source, plan["context"], carried_channels(plan))
        part_case = case.part_case(piece, reference, known, source, stored)
    yield from parity.part_parity(runner, part_case)
    if piece.spec.calls.adapters:
        yield from adapters.adapter_parity(runner, known["hidden"][piece.start], reference, stored)


def _config_of(record: Path) -> str:
    """Return the sha256 of the checkpoint's config.json: with the tower's weights it decides transformers' rows."""
    return str(read_json(record)["files"]["config.json"]["sha256"])


def drafter_files(record: Path) -> str:
    """Return a digest of the checkpoints that a drafter is made of: its own, and the model's.

    A part of a drafter is compared on what all of the drafter's other tensors make, and its taps in the model.
    """
    fetched = read_json(record)
    return digest([fetched.get("drafter", {}).get("files", {}), fetched["files"]])


def host_side(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return plan entries that decide, beside the part, the host's arrays and the use of an encoder's outputs."""
    shared = ("rope", "window", "window_slots")
    of_encoder = ("band", "causal", "task", "labels") if plan["buckets"] else ()
    scale = {"embedding_scale": plan["architecture"]["embedding_scale"]} if plan["buckets"] else {}
    return {key: plan[key] for key in (*shared, *of_encoder)} | scale


def hint(pieces: Iterable[Part], reshape: str) -> dict[str, str]:
    """Return the reshape hint for Core ML that verdict and receipt record; empty if all shapes are fixed."""
    fixed = all(piece.spec.encodes or piece.spec.calls.shapes == FIXED for piece in pieces)
    return {} if fixed else {"reshape_frequency": reshape}


def parity_verdict(
    name: str,
    engine: Mapping[str, str],
    measured: Iterable[Measurement | NotRun | Margin | Stretch],
    judged: Mapping[str, Any],
    worst: Callable[[], str],
) -> dict[str, Any]:
    """Return what parity/P.json holds.

    Args:
        name: the part's name.
        engine: the engine that ran the part.
        measured: the measurements.
        judged: names the limits, see gates/by_bits.py; empty for the INT8 limits.
        worst: names the matrix to look at if precision missed a limit.
    """
    from shardmill.gates import measurement, parity, rounding

    answers = list(measured)
    numbers = [a for a in answers if isinstance(a, measurement.Measurement)]
    gate = rounding.name_worst_matrix(measurement.compare(numbers, by_bits.thresholds_of(judged)), worst)
    margin = [("margin", a.value) for a in answers if isinstance(a, measurement.Margin)]
    along = [asdict(a) for a in answers if isinstance(a, measurement.Stretch)]
    skipped = {a.name: a.reason for a in answers if isinstance(a, measurement.NotRun)}
    about = {"part": name, "engine": engine, **judged, **dict(margin), **({"along": along} if along else {})}
    return {**about, "gate": gate, "not_run": parity.not_run() | skipped}
