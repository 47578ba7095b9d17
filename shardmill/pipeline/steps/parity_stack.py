"""parity_stack: all parts chained against transformers, and the decoding loop on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import machine
from shardmill import plan as plans
from shardmill.files import digest, read_json
from shardmill.forms import recipe as recipes
from shardmill.forms.recipe import costliest
from shardmill.gates import thresholds
from shardmill.pipeline.steps.parity import hint, host_side, parity_verdict
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder
from shardmill.pipeline.verdict import write_verdict
from shardmill.runtime.manifest import own_chain

if TYPE_CHECKING:
    from shardmill.gates.measurement import Margin, Measurement, NotRun, Stretch


def task(
    summary: Path,
    parts: list[Path],
    recipe: Artifact,
    record: Path,
    states: Artifact,
    packages: list[Artifact],
    bundles: list[Artifact],
    table: Artifact,
    chosen: list[Artifact],
    reshape: str,
    engine: Mapping[str, str],
    tools: Tools,
) -> Task:
    """Describe a verdict, which depends on all programs, on the reference, and on the engine.

    The last of the parts is the embedding. The recipe's forms of most weights decide the stack's limits; if there was a
    search, its estimate does. The packages' weights are read; the bundles run.
    """
    plan = own_chain(read_json(summary))
    search = read_json(chosen[0].path) if chosen else None
    *pieces, embedding = [plans.load_part(part) for part in parts]
    pieces = [piece for piece in pieces if not piece.is_apart]
    packages, bundles = packages[: len(pieces)], bundles[: len(pieces)]  # parts that a pass leaves out come last
    told = hint(pieces, reshape)
    judged = _judged(pieces, recipes.read_recipe(read_json(recipe.path), recipe.path.name), search)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.gates.rounding import table_parity
        from shardmill.runtime.manifest import in_place

        paths = {piece.name: package.path for piece, package in zip(pieces, packages, strict=True)}
        programs = {name: bundle.path for name, bundle in zip(paths, bundles, strict=True)}
        manifest = in_place(plan, programs, table.path, reshape)
        source = source_folder(record)
        found = _measured(manifest, pieces, paths, embedding, plan, source, states.path)
        whole = table_parity(embedding, source, table.path)
        worst = partial(_worst, [(p, paths[p.name]) for p in pieces], plan["prefix"], source, search)
        content = parity_verdict("stack", engine, chain(whole, found), judged, worst) | told
        write_verdict("parity stack", content, made["verdict"])

    inputs = {f"package {i}": package.sha256 for i, package in enumerate(packages)}
    inputs |= {f"bundle {i}": bundle.sha256 for i, bundle in enumerate(bundles)}
    inputs |= {"reference": states.sha256, "embedding": table.sha256, "part embedding": digest(embedding.content)}
    passes = {"widths": plan["widths"], "verify": plan["verify"], "contexts": plan.get("contexts", [])}
    params = {**host_side(plan), **passes, "engine": engine, **judged, **told}
    return Task(work, Action("parity_stack", inputs, params, **tools), {"engine": engine, **told})


def _measured(
    manifest: dict[str, Any],
    pieces: list[plans.Part],
    packages: Mapping[str, Path],
    embedding: plans.Part,
    plan: Mapping[str, Any],
    source: Path,
    states: Path,
) -> Iterable[Measurement | NotRun | Margin | Stretch]:
    """Return the measurements of all programs together, of an encoder or of a decoder."""
    if plan["buckets"]:
        return _encoder(manifest, pieces[0], packages[pieces[0].name], plan, source, states)
    named = {piece.name: (piece, packages[piece.name]) for piece in pieces}
    return _decoder(manifest, named, embedding, plan, source, states)


def _judged(pieces: Iterable[plans.Part], followed: recipes.Recipe, search: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the limits: by the forms of most weights, or by the search's estimate if there was a search."""
    numbers = Counter[str]()
    for piece in pieces:
        numbers.update(followed.numbers(piece.named_shapes))
    key = thresholds.bits(numbers, share=0 if search else thresholds.FEW)
    budget = {"budget": thresholds.budget(search["estimate"]["perplexity"])} if search else {}
    return ({"limits": key} if key else {}) | budget


def _worst(
    packed: Iterable[tuple[plans.Part, Path]], prefix: str, source: Path, search: Mapping[str, Any] | None
) -> str:
    """Name the matrix that was foreseen to cost most; without a search, the one that lost most of its numbers."""
    from shardmill.gates.rounding import furthest
    from shardmill.gates.weights import PackageWeights

    if search:
        first = costliest(search)[0]
        return f"{first.path}, in {first.form}, was foreseen to cost most, {first.nats:.2g} nat"
    return furthest((PackageWeights(package, piece, prefix) for piece, package in packed), source)


def _encoder(
    manifest: dict[str, Any], part: plans.Part, package: Path, plan: Mapping[str, Any], source: Path, states: Path
) -> Iterable[Measurement | NotRun]:
    """Return the measurements of an encoder. All packages hold the weights of one, as each part's parity has seen."""
    from safetensors.torch import load_file

    from shardmill.gates import encoder
    from shardmill.gates.encoder_reference import EncoderReference
    from shardmill.gates.weights import PackageWeights
    from shardmill.runtime.encoder import Encoder

    held = PackageWeights(package, part, plan["prefix"])
    classes = EncoderReference(source, plan["task"])
    return encoder.encoder_stack_parity(lambda: Encoder(manifest, Path("/")), classes, held, plan, load_file(states))


def _decoder(
    manifest: dict[str, Any],
    packed: Mapping[str, tuple[plans.Part, Path]],
    embedding: plans.Part,
    plan: Mapping[str, Any],
    source: Path,
    states: Path,
) -> Iterable[Measurement | NotRun | Margin | Stretch]:
    """Return the measurements of a decoder.

    The portable engine runs every tested width. Core ML runs the widths that a runtime uses: the first pass of each
    takes minutes there.
    """
    from safetensors.torch import load_file

    from shardmill.gates import stack
    from shardmill.gates.passes import compared_widths
    from shardmill.gates.reference import Reference, carried_channels
    from shardmill.runtime.engine import Engine

    if machine.is_portable():
        manifest["widths"] = [1, *compared_widths(plan["verify"], plan["tokens_max"])]
    reference = Reference(source, plan["context"], carried_channels(plan))
    stored = stack.stored_model(reference, packed, embedding, source, plan["prefix"])
    return stack.stack_parity(lambda: Engine(manifest, Path("/")), stored, load_file(states))
