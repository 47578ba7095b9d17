"""predicted: what the Neural Engine's arithmetic would cost the model, as others report that arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardmill.files import read_json, write_json
from shardmill.pipeline.steps.parity import host_side
from shardmill.pipeline.task import Action, Artifact, Task, Tools
from shardmill.runtime.manifest import own_chain


def task(
    summary: Path, states: Artifact, bundles: list[Artifact], table: Artifact, precisions: list[str], tools: Tools
) -> Task:
    """Describe {"tokens": N, "costs": [...]}: the programs' cost in fp16 and in each of the precisions."""
    plan = own_chain(read_json(summary))
    chain = [row["name"] for row in plan["parts"]]
    bundles = [bundle for bundle in bundles if bundle.path.stem in chain]

    def work(made: Mapping[str, Path]) -> None:
        from safetensors.torch import load_file

        from shardmill.gates.predicted import predicted_costs
        from shardmill.runtime.engine import Engine
        from shardmill.runtime.manifest import in_place

        manifest = in_place(plan, {bundle.path.stem: bundle.path for bundle in bundles}, table.path)
        known = load_file(states.path)
        tokens: list[int] = known["tokens"].tolist()
        costs = [*predicted_costs(lambda: Engine(manifest, Path("/")), tokens, known["logits"], precisions)]
        write_json(made["costs"], {"tokens": len(tokens), "costs": costs})

    inputs = {f"bundle {i}": bundle.sha256 for i, bundle in enumerate(bundles)}
    inputs |= {"reference": states.sha256, "embedding": table.sha256}
    passes = {"widths": plan["widths"], "verify": plan["verify"], "contexts": plan.get("contexts", [])}
    params = {**host_side(plan), **passes, "precisions": precisions}
    return Task(work, Action("predicted", inputs, params, **tools))
