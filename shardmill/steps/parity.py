"""parity: a part, and the whole stack, against transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
    made: Path,
    verdict: Path,
    receipt: Path,
    store: str,
) -> None:
    """Args: summary plan.json; part parts/P.json; record source.receipt.json; states what the reference

    step wrote and expected its receipt; package the .mlpackage and made its receipt; verdict parity/P.json.
    """
    piece = plans.load_part(part)
    rope = json.loads(summary.read_text())["architecture"]["rope"]
    inputs = {"package": output(made, "package"), "reference": output(expected, "states")}
    action = measured("parity", inputs, rope=rope, tokens=piece.tokens)

    def work(out: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.convert.weights import read_all
        from shardmill.engine import rope_tables
        from shardmill.gates import parity
        from shardmill.gates.reference import Reference

        known = load_file(states)
        context = json.loads(summary.read_text())["context"]
        reference, original = Reference(source_folder(record), context), read_all(piece, source_folder(record))
        if piece.kind == "layers":
            runner = parity.Runner(package, piece, rope_tables(rope, context))
            found = parity.layers_parity(runner, reference, known["hidden"], original)
        else:
            hidden = known["hidden"][-1]
            found = parity.head_parity(package, piece, reference, hidden, known["logits"][: len(hidden)], original)
        canonical.write_json(out["verdict"], report(piece.name, found))

    Store(Path(store)).perform(action, {"verdict": verdict}, receipt, work, engine=host.engine())


def run_stack(
    summary: Path,
    parts: list[Path],
    record: Path,
    states: Path,
    expected: Path,
    packages: list[Path],
    made: list[Path],
    table: Path,
    verdict: Path,
    receipt: Path,
    store: str,
) -> None:
    """The same for all parts chained; table is embedding.safetensors."""
    pieces = [plans.load_part(part) for part in parts]
    inputs = {piece.name: output(r, "package") for piece, r in zip(pieces, made, strict=True)}
    inputs |= {"reference": output(expected, "states"), "embedding": output(table.with_suffix(".receipt.json"), "table")}
    plan = json.loads(summary.read_text())
    action = measured("parity", inputs, rope=plan["architecture"]["rope"], widths=plan["widths"])

    def work(out: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.engine import Engine
        from shardmill.gates import stack
        from shardmill.gates.reference import Reference
        from shardmill.manifest import in_place

        paths = {piece.name: path for piece, path in zip(pieces, packages, strict=True)}
        manifest = in_place(plan, paths, table)
        # Every width of question 2 is fed, not only those that a runtime uses.
        manifest["widths"] = list(range(1, plan["tokens_max"] + 1))
        weights, head = stack.stored_weights({piece.name: (piece, paths[piece.name]) for piece in pieces})
        reference = Reference(source_folder(record), plan["context"])
        found = stack.stack_parity(
            lambda: Engine(manifest, Path("/")), reference, weights, load_file(states), head
        )
        canonical.write_json(out["verdict"], report("stack", found))

    Store(Path(store)).perform(action, {"verdict": verdict}, receipt, work, engine=host.engine())


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
