"""parity_stack: all parts chained against transformers, and the decoding loop on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import machine
from shardmill import plan as plans
from shardmill.files import digest, read_json
from shardmill.forms import recipe as recipes
from shardmill.forms.recipe import costliest
from shardmill.gates import by_bits
from shardmill.models.interface import LABELS, TOWER
from shardmill.pipeline.steps.parity import drafter_files, hint, host_side, parity_verdict
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder
from shardmill.pipeline.verdict import write_verdict
from shardmill.runtime.manifest import of_the_stack

if TYPE_CHECKING:
    from torch import Tensor

    from shardmill.gates.drafts import Expected
    from shardmill.gates.measurement import Margin, Measurement, NotRun, Stretch
    from shardmill.gates.stack import StoredModel
    from shardmill.gates.weights import PackageWeights


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

    The programs of a drafter draft for the model's. A program for labels is left out: a pass runs it in the LM head's
    place. So are a tower's programs, whose rows stand in the place of the embedding's.
    """
    plan = of_the_stack(read_json(summary))
    search = read_json(chosen[0].path) if chosen else None
    *programs, embedding = [plans.load_part(part) for part in parts]
    run = [piece.kind not in (LABELS, TOWER) for piece in programs]
    chain = list(compress(programs, run))
    packages, bundles = (list(compress(each, run)) for each in (packages, bundles))
    pieces = [piece for piece in chain if not piece.drafter]
    told = hint(pieces, reshape)
    judged = by_bits.stack_limits(pieces, recipes.read_recipe(read_json(recipe.path), recipe.path.name), search)

    def work(made: Mapping[str, Path]) -> None:
        from shardmill.gates.rounding import table_parity
        from shardmill.runtime.manifest import in_place

        paths = {piece.name: package.path for piece, package in zip(chain, packages, strict=True)}
        compiled = {name: bundle.path for name, bundle in zip(paths, bundles, strict=True)}
        manifest = in_place(plan, compiled, table.path, reshape)
        source = source_folder(record)
        measured = _measured(manifest, chain, paths, embedding, plan, source, states.path)
        whole = table_parity(embedding, source, table.path)
        worst = partial(_worst, [(p, paths[p.name]) for p in pieces], plan["prefix"], source, search)
        content = parity_verdict("stack", engine, [*whole, *measured], judged, worst) | told
        write_verdict("parity stack", content, made["verdict"])

    inputs = {f"package {i}": package.sha256 for i, package in enumerate(packages)}
    inputs |= {f"bundle {i}": bundle.sha256 for i, bundle in enumerate(bundles)}
    inputs |= {"reference": states.sha256, "embedding": table.sha256, "part embedding": digest(embedding.content)}
    passes = {"widths": plan["widths"], "verify": plan["verify"], "contexts": plan.get("contexts", [])}
    if "drafter" in plan:
        inputs |= {"drafter": drafter_files(record)}
        passes |= {"drafter": plan["drafter"]}
    params = {**host_side(plan), **passes, "engine": engine, **judged, **told}
    return Task(work, Action("parity_stack", inputs, params, **tools), {"engine": engine, **told})


def _measured(
    manifest: dict[str, Any],
    chain: list[plans.Part],
    packages: Mapping[str, Path],
    embedding: plans.Part,
    plan: Mapping[str, Any],
    source: Path,
    states: Path,
) -> Iterable[Measurement | NotRun | Margin | Stretch]:
    """Return the measurements of all programs together, of an encoder or of a decoder."""
    if plan["buckets"]:
        first = chain[: len(chain) // len(plan["buckets"])]
        return _encoder(manifest, first, [packages[part.name] for part in first], plan, source, states)
    named = {piece.name: (piece, packages[piece.name]) for piece in chain}
    return _decoder(manifest, named, embedding, plan, source, states)


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
    manifest: dict[str, Any],
    parts: Sequence[plans.Part],
    packages: Sequence[Path],
    plan: Mapping[str, Any],
    source: Path,
    states: Path,
) -> Iterable[Measurement | NotRun]:
    """Return the measurements of an encoder.

    The parts are one bucket's. Other buckets' packages hold the same weights, as each part's parity has seen.
    """
    from safetensors.torch import load_file

    from shardmill.gates import encoder
    from shardmill.gates.encoder_reference import EncoderReference
    from shardmill.gates.weights import PackageWeights
    from shardmill.runtime.encoder import Encoder

    stored = [PackageWeights(package, part, plan["prefix"]) for part, package in zip(parts, packages, strict=True)]
    classes = EncoderReference(source, plan["task"])
    return encoder.encoder_stack_parity(lambda: Encoder(manifest, Path("/")), classes, stored, plan, load_file(states))


def _decoder(
    manifest: dict[str, Any],
    packed: Mapping[str, tuple[plans.Part, Path]],
    embedding: plans.Part,
    plan: Mapping[str, Any],
    source: Path,
    states: Path,
) -> Iterable[Measurement | NotRun | Margin | Stretch]:
    """Return the measurements of a decoder, and of its drafter if it has one.

    The portable engine runs every tested width. Core ML runs the widths that a runtime uses: the first pass of each
    takes minutes there.
    """
    from safetensors.torch import load_file

    from shardmill.gates import stack
    from shardmill.gates.passes import compared_widths
    from shardmill.gates.reference import Reference, carried_channels
    from shardmill.gates.weights import PackageWeights
    from shardmill.runtime.engine import Engine

    if machine.is_portable():
        manifest["widths"] = [1, *compared_widths(plan["verify"], plan["tokens_max"])]
    reference = Reference(source, plan["context"], carried_channels(plan))
    chain = {name: pair for name, pair in packed.items() if not pair[0].drafter}
    stored = stack.stored_model(reference, chain, embedding, source, plan["prefix"])
    drafter = [PackageWeights(path, part, plan["prefix"]) for part, path in packed.values() if part.drafter]
    drafts = partial(reference_drafts, stored, drafter, plan, source, Path(manifest["embedding"]["path"]))
    load = partial(Engine, manifest, Path("/"))
    return stack.stack_parity(load, stored, load_file(states), drafts if drafter else None)


def reference_drafts(
    stored: StoredModel,
    all_stored: list[PackageWeights],
    plan: Mapping[str, Any],
    source: Path,
    table: Path,
    tokens: Sequence[int],
) -> Expected | str:
    """Return what the reference of the build's drafter drafts along a text, or why it drafts nothing.

    Args:
        stored: transformers' model with the packages' weights.
        all_stored: the weights of the drafter's packages.
        plan: plan.json's content.
        source: the checkpoint's folder.
        table: the file of the host's tables.
        tokens: the text.
    """
    import torch

    from shardmill.gates import drafters, drafts
    from shardmill.models.contract import PER_LAYER
    from shardmill.runtime.engine import EMBEDDING, read_tables

    if plan["verify"] < 2 or not [*drafts.rounds(len(tokens), plan["verify"])]:
        return f"a text of {len(tokens)} tokens, in passes of {plan['verify']}, has no room for a draft"
    tables, scale = read_tables(table), plan["architecture"]["graph"]["stream_scale"]

    def embed(ids: Sequence[int]) -> Tensor:
        rows: Tensor = torch.from_numpy(tables[EMBEDDING][list(ids)]) / scale
        return rows

    def hidden() -> Tensor:
        return stored.run(tokens, tables[EMBEDDING], tables.get(PER_LAYER))["hidden"]

    drafter = drafters.reference_drafter(plan, source, all_stored, embed, stored.weights)
    return drafts.expected_drafts(drafter, hidden, stored.reference.model, tokens, plan["verify"], scale)
