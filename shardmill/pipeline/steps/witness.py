"""witness: a part on Apple's Core AI runtime, against transformers and against the portable engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill import plan as plans
from shardmill.files import digest, read_json
from shardmill.pipeline.steps.parity import host_side
from shardmill.pipeline.steps.reference import seen
from shardmill.pipeline.task import Action, Artifact, Task, Tools, source_folder
from shardmill.pipeline.verdict import write_verdict
from shardmill.witness import installed


def task(
    summary: Path,
    part: Path,
    record: Path,
    states: Artifact,
    package: Artifact,
    bundle: Artifact,
    engine: Mapping[str, str],
    runtime: Mapping[str, str],
    tools: Tools,
) -> Task:
    """Describe a verdict: it depends on the part, its programs, what they are compared with, and both engines.

    The package's weights are read; the bundle runs on the engine of this machine.
    """
    piece, plan = plans.load_part(part), read_json(summary)

    def work(made: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.gates.weights import PackageWeights
        from shardmill.witness.part import witness_measurements, witness_verdict

        installed.check_runtime(runtime)
        stored = PackageWeights(package.path, piece, plan["prefix"])
        measured = witness_measurements(piece, bundle.path, plan, load_file(states.path), source_folder(record), stored)
        content = witness_verdict(piece.name, engine, runtime, measured)
        write_verdict(f"witness {piece.name}", content, made["verdict"])

    inputs = {
        "part": digest(piece.content),
        "package": package.sha256,
        "bundle": bundle.sha256,
        "reference": seen(states.path, piece),
    }
    params = {
        **host_side(plan),
        "tokens": piece.spec.tokens,
        "verify": plan["verify"],
        "engine": engine,
        "runtime": runtime,
    }
    return Task(work, Action("witness", inputs, params, **tools), {"engine": engine, "witness": runtime})
