"""parity_stack: all parts chained against transformers, and the decoding loop on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from shardmill import machine
from shardmill import plan as plans
from shardmill.files import digest
from shardmill.pipeline.steps.parity import host_side, measured, output, report
from shardmill.pipeline.steptable import source_folder
from shardmill.pipeline.store import Action, Store
from shardmill.pipeline.verdict import failed, settle


def run(
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
    """Args as parity.run_part's, for all parts in the order of a pass, the embedding last.

    `table` is embedding.safetensors.
    """
    *pieces, embedding = [plans.load_part(part) for part in parts]
    plan = json.loads(summary.read_text())
    todo = action(
        plan,
        [output(r, "package") for r in made],
        [output(r, "bundle") for r in compiled],
        output(expected, "states"),
        output(table.with_suffix(".receipt.json"), "table"),
        embedding,
    )

    def work(out: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.gates import stack
        from shardmill.gates.reference import Reference
        from shardmill.gates.table import table_parity
        from shardmill.runtime.engine import Engine
        from shardmill.runtime.manifest import in_place

        paths = {piece.name: path for piece, path in zip(pieces, packages, strict=True)}
        manifest = in_place(plan, dict(zip(paths, bundles, strict=True)), table)
        # Every width of question 2 is fed, not only those that a runtime uses.
        manifest["widths"] = list(range(1, plan["tokens_max"] + 1))
        weights, head = stack.stored_weights({p.name: (p, paths[p.name]) for p in pieces}, plan["prefix"])
        reference = Reference(source_folder(record), plan["context"])
        stored = stack.Stored(reference, weights, head, plan["architecture"]["embedding_scale"])
        whole = table_parity(embedding, source_folder(record), table)
        found = stack.stack_parity(lambda: Engine(manifest, Path("/")), stored, load_file(states))
        settle("parity stack", report("stack", chain([whole], found)), out["verdict"], verdict)

    failed(verdict).unlink(missing_ok=True)
    reads = dict(zip((*packages, *bundles), (*made, *compiled), strict=True))
    reads |= {table: table.with_suffix(".receipt.json"), states: expected}
    Store(Path(store)).perform(todo, {"verdict": verdict}, receipt, work, reads, engine=machine.engine())


def action(
    plan: Mapping[str, Any],
    packages: Sequence[str],
    bundles: Sequence[str],
    reference: str,
    table: str,
    embedding: plans.Part,
) -> Action:
    """The measurement of these programs on this reference.

    Args:
        plan: plan.json's content.
        packages: their hashes, in the order of the pass.
        bundles: theirs.
        reference: the hash of what the reference step wrote.
        table: the hash of embedding.safetensors.
        embedding: the part that the table was made from, whose rows it is compared with.
    """
    inputs = {f"package {i}": sha for i, sha in enumerate(packages)}
    inputs |= {f"bundle {i}": sha for i, sha in enumerate(bundles)}
    inputs |= {"reference": reference, "embedding": table, "part embedding": digest(embedding.content)}
    return measured("parity_stack", inputs, **host_side(plan), widths=plan["widths"])
