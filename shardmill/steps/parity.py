"""parity: a part, and the whole stack, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardmill import canonical, host
from shardmill import plan as plans
from shardmill.steps import ingredients, source_folder
from shardmill.store import Action, Store, read_receipt


def run_part(
    summary: Path,
    part: Path,
    record: Path,
    states: Path,
    expected: Path,
    package: Path,
    bundle: Path,
    made: Path,
    compiled: Path,
    verdict: Path,
    receipt: Path,
    store: str,
) -> None:
    """Args: summary plan.json; part parts/P.json; record source.receipt.json; states what the reference

    step wrote and expected its receipt; package the .mlpackage, of which the weights are
    read, and bundle the .mlmodelc, which runs, made and compiled their receipts; verdict parity/P.json.
    """
    piece = plans.load_part(part)
    plan = json.loads(summary.read_text())
    rope = plan["architecture"]["rope"]
    todo = part_action(plan, piece, output(made, "package"), output(compiled, "bundle"), output(expected, "states"))

    def work(out: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.convert.weights import PartWeights
        from shardmill.engine import rope_tables
        from shardmill.gates import parity
        from shardmill.gates.reference import Reference
        from shardmill.gates.weights import PackageWeights

        known = load_file(states)
        context = plan["context"]
        reference, original = Reference(source_folder(record), context), PartWeights(piece, source_folder(record))
        stored = PackageWeights(package, piece)
        if piece.kind == "layers":
            runner = parity.Runner(bundle, piece, rope_tables(rope, context))
            found = parity.layers_parity(runner, reference, known["hidden"], original, stored)
        else:
            hidden = known["hidden"][-1]
            both = hidden, known["logits"][: len(hidden)]
            found = parity.head_parity(bundle, piece, reference, both, original, stored)
        canonical.write_json(out["verdict"], report(piece.name, found))

    Store(Path(store)).perform(todo, {"verdict": verdict}, receipt, work, engine=host.engine())


def part_action(plan: Mapping[str, Any], part: plans.Part, package: str, bundle: str, reference: str) -> Action:
    """Args: plan plan.json's content; the hashes of package, bundle and reference."""
    inputs = {"package": package, "bundle": bundle, "reference": reference}
    return measured("parity", inputs, rope=plan["architecture"]["rope"], tokens=part.tokens)


def run_stack(
    summary: Path,
    parts: list[Path],
    record: Path,
    states: Path,
    expected: Path,
    packages: list[Path],
    bundles: list[Path],
    made: list[Path],
    compiled: list[Path],
    table: Path,
    verdict: Path,
    receipt: Path,
    store: str,
) -> None:
    """The same for all parts chained; table is embedding.safetensors."""
    pieces = [plans.load_part(part) for part in parts]
    plan = json.loads(summary.read_text())
    todo = stack_action(
        plan,
        [output(r, "package") for r in made],
        [output(r, "bundle") for r in compiled],
        output(expected, "states"),
        output(table.with_suffix(".receipt.json"), "table"),
    )

    def work(out: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.engine import Engine
        from shardmill.gates import stack
        from shardmill.gates.reference import Reference
        from shardmill.manifest import in_place

        paths = {piece.name: path for piece, path in zip(pieces, packages, strict=True)}
        manifest = in_place(plan, dict(zip(paths, bundles, strict=True)), table)
        # Every width of question 2 is fed, not only those that a runtime uses.
        manifest["widths"] = list(range(1, plan["tokens_max"] + 1))
        weights, head = stack.stored_weights({piece.name: (piece, paths[piece.name]) for piece in pieces})
        reference = Reference(source_folder(record), plan["context"])
        found = stack.stack_parity(lambda: Engine(manifest, Path("/")), reference, weights, load_file(states), head)
        canonical.write_json(out["verdict"], report("stack", found))

    Store(Path(store)).perform(todo, {"verdict": verdict}, receipt, work, engine=host.engine())


def stack_action(
    plan: Mapping[str, Any], packages: Sequence[str], bundles: Sequence[str], reference: str, table: str
) -> Action:
    """Args: plan plan.json's content; the hashes of packages and bundles in the order of the pass, and the others'."""
    inputs = {f"package {i}": sha for i, sha in enumerate(packages)}
    inputs |= {f"bundle {i}": sha for i, sha in enumerate(bundles)}
    inputs |= {"reference": reference, "embedding": table}
    return measured("parity", inputs, rope=plan["architecture"]["rope"], widths=plan["widths"])


def measured(step: str, inputs: Mapping[str, str], **params: Any) -> Action:
    """An action whose result depends on the engine that runs it."""
    return Action(step, inputs, {**params, "engine": host.engine()}, **ingredients(step))


def output(receipt: Path, name: str) -> str:
    """Content hash of an output that a receipt records."""
    sha: str = read_receipt(receipt)["outputs"][name]
    return sha


def report(name: str, found: Iterable[Any]) -> dict[str, Any]:
    """What parity/P.json holds; raises GateError if a threshold is missed."""
    from shardmill.gates import parity, thresholds

    gate = thresholds.judge(f"parity {name}", found)
    return {"part": name, "engine": host.engine(), "gate": gate, "not_run": parity.not_run()}
