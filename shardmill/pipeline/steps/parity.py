"""parity: a part against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill import machine
from shardmill import plan as plans
from shardmill.files import digest
from shardmill.pipeline.steps.reference import seen
from shardmill.pipeline.steptable import ingredients, source_folder
from shardmill.pipeline.store import Action, Store, read_receipt
from shardmill.pipeline.verdict import failed, settle

if TYPE_CHECKING:
    from shardmill.gates.thresholds import Measurement, NotRun


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
    """Writes parity/P.json (`verdict`).

    Args: summary plan.json; part parts/P.json; record source.receipt.json; states what the reference step wrote;
    package the .mlpackage, of which the weights are read, and bundle the .mlmodelc, which runs, with made and compiled
    their receipts. The reference's receipt, `expected`, is an input only so that Snakemake waits for it.
    """
    piece = plans.load_part(part)
    plan = json.loads(summary.read_text())
    todo = part_action(plan, piece, output(made, "package"), output(compiled, "bundle"), seen(states, piece))

    def work(out: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.gates import parity
        from shardmill.gates.reference import Reference
        from shardmill.gates.weights import PackageWeights

        known = load_file(states)
        source = source_folder(record)
        reference = Reference(source, plan["context"])
        stored = PackageWeights(package, piece, plan["prefix"])
        if piece.kind == "layers":
            runner = parity.Runner(bundle, piece, plan)
            found = parity.layers_parity(runner, reference, known["hidden"], source, stored)
        else:
            hidden = known["hidden"][-1]
            both = hidden, known["logits"][: len(hidden)]
            found = parity.head_parity(bundle, piece, reference, both, source, stored)
        settle(f"parity {piece.name}", report(piece.name, found), out["verdict"], verdict)

    failed(verdict).unlink(missing_ok=True)
    reads = {package: made, bundle: compiled}
    Store(Path(store)).perform(todo, {"verdict": verdict}, receipt, work, reads, engine=machine.engine())


def part_action(plan: Mapping[str, Any], part: plans.Part, package: str, bundle: str, reference: str) -> Action:
    """Args: plan plan.json's content; the hashes of package and bundle; reference what `seen` says of the part."""
    inputs = {"part": digest(part.content), "package": package, "bundle": bundle, "reference": reference}
    return measured("parity", inputs, **host_side(plan), tokens=part.tokens)


def host_side(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the host's arrays depend on, beside the part."""
    return {key: plan[key] for key in ("rope", "window")}


def measured(step: str, inputs: Mapping[str, str], **params: Any) -> Action:
    """An action whose result depends on the engine that runs it."""
    return Action(step, inputs, {**params, "engine": machine.engine()}, **ingredients(step))


def output(receipt: Path, name: str) -> str:
    """Content hash of an output that a receipt records."""
    sha: str = read_receipt(receipt)["outputs"][name]
    return sha


def report(name: str, found: Iterable[Measurement | NotRun]) -> dict[str, Any]:
    """What parity/P.json holds."""
    from shardmill.gates import parity, thresholds

    answers = list(found)
    gate = thresholds.compare(a for a in answers if isinstance(a, thresholds.Measurement))
    skipped = {a.name: a.reason for a in answers if isinstance(a, thresholds.NotRun)}
    return {"part": name, "engine": machine.engine(), "gate": gate, "not_run": parity.not_run() | skipped}
