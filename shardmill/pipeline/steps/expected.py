"""expected: what the programs must give for inputs that any machine can make, so that whoever gets them can check."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmill import plan as plans
from shardmill.files import digest, read_json
from shardmill.models.interface import TOWER
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder


def task(
    summary: Path,
    parts: list[Path],
    record: Path,
    states: Artifact,
    packages: list[Artifact],
    table: Artifact,
    tools: Tools,
) -> Task:
    """Describe expected.safetensors, which depends on all packages and on transformers, and on no engine.

    The last of the parts is the embedding. The checkpoint's text gives the prompt of the first answer, and the size of
    inputs.
    """
    plan = read_json(summary)
    *programs, embedding = [plans.load_part(part) for part in parts]
    paths = {piece.name: package.path for piece, package in zip(programs, packages, strict=True)}

    def work(made: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.gates.expected import Recording
        from shardmill.runtime.engine import read_tables

        recording, record_all = Recording(), encoder if plan["buckets"] else decoder
        record_all(recording, source_folder(record), load_file(states.path), read_tables(table.path))
        recording.thinned()
        recording.write(made["expected"])

    def decoder(recording: Any, source: Path, known: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        from shardmill.gates.expected import greedy, record_decoder, record_tower
        from shardmill.gates.reference import Reference, carried_channels
        from shardmill.gates.stack import stored_model
        from shardmill.gates.weights import PackageWeights
        from shardmill.models.contract import PER_LAYER
        from shardmill.runtime.engine import EMBEDDING

        reference = Reference(source, plan["context"], carried_channels(plan))
        for place, part in enumerate(programs):
            if part.kind == TOWER:
                record_tower(recording, part, place, plan[TOWER], source, PackageWeights(paths[part.name], part))
                continue
            stored = PackageWeights(paths[part.name], part, plan["prefix"])
            record_decoder(recording, part, place, plan, reference, known, source, stored)
        chain = {part.name: (part, paths[part.name]) for part in programs if not part.is_apart}
        whole = stored_model(reference, chain, embedding, source, plan["prefix"])
        recording.about["answer"] = greedy(whole, known["tokens"].tolist(), tables[EMBEDDING], tables.get(PER_LAYER))

    def encoder(recording: Any, source: Path, known: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
        from shardmill.gates.encoder_reference import EncoderReference
        from shardmill.gates.expected import record_encoder
        from shardmill.gates.reference import checkpoint_weights
        from shardmill.gates.weights import PackageWeights

        reference, original = EncoderReference(source, plan["task"]), checkpoint_weights(source, plan["prefix"])
        for place, part in enumerate(programs):
            stored = PackageWeights(paths[part.name], part, plan["prefix"])
            record_encoder(recording, part, place, plan, reference, known, tables, original, stored)

    inputs = {f"package {i}": package.sha256 for i, package in enumerate(packages)}
    inputs |= {f"part {i}": digest(part.content) for i, part in enumerate((*programs, embedding))}
    inputs |= {"reference": states.sha256, "embedding": table.sha256, "source": plan["source"]}
    params = {key: value for key, value in plan.items() if key not in ("model", "source")}
    return Task(work, Action("expected", inputs, {"plan": digest(params)}, **tools))
