"""Every family by the way that ships: split, stamped in INT8, compiled, and run by the engine with drafts."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coremltools as ct
import pytest
import templates
import tiny
from drafted_decoding import Session, run
from drafted_decoding.policies import AlwaysDraft
from portable_coreml.files.bundle import load_model
from portable_coreml.run.ops import KERNELS
from safetensors.torch import load_file

from shardmill import config
from shardmill.checkpoint.cache import HashCache
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.table import write_table
from shardmill.gates import measurement, residency, stack
from shardmill.gates.reference import Reference, carried_channels
from shardmill.gates.stack import TurningDrafter, decode_one_by_one
from shardmill.machine import load_programs_as
from shardmill.models import supported
from shardmill.models.recurrences import RECURRENCES
from shardmill.pipeline.steps.split import split
from shardmill.plan import Part
from shardmill.runtime.engine import Engine
from shardmill.runtime.manifest import in_place

from . import tiny_families
from .tiny_configs import BESIDE

CONTEXT, NEW = 112, 100
PROMPT = [5, 77, 130, 9, 200]


@dataclass(frozen=True)
class Shipped:
    """A family's tiny model, built."""

    source: Path
    plan: Mapping[str, Any]
    parts: Mapping[str, Part]
    packages: Mapping[str, Path]
    bundles: Mapping[str, Path]
    table: Path

    def engine(self) -> Engine:
        """The engine that ships, with every width."""
        manifest = in_place(self.plan, self.bundles, self.table) | {"widths": [1, 2, 3, 4]}
        with load_programs_as("fp32"):
            return Engine(manifest, Path("/"))

    def operations(self) -> set[str]:
        """Return the kinds of operations in the packages."""
        programs = [load_model(path).program for path in self.packages.values()]
        return {op.kind for program in programs for one in program.functions.values() for op in one.block.walk()}

    def stored(self) -> stack.StoredModel:
        """transformers' model with the packages' weights."""
        pairs = {name: (self.parts[name], path) for name, path in self.packages.items()}
        reference = Reference(self.source, CONTEXT, carried_channels(self.plan))
        return stack.stored_model(reference, pairs, self.parts["embedding"], self.source, self.plan["prefix"])


def ship(
    checkpoint: Path, folder: Path, tokens: Mapping[str, int] = {"max": 4}, context: int = CONTEXT, **program: Any
) -> Shipped:
    """Build a checkpoint as the pipeline's steps do, as a config's sections `tokens` and `program` say."""
    source = tiny.fetched(checkpoint, folder / "source")
    files = json.loads((source / "source.json").read_text())["files"]
    settings = config.parse(
        tiny.settings(str(source), context=context, tokens=tokens, topology="auto", head={"slices": 1}, program=program)
    )
    found, plan = split(source, settings, HashCache(folder / "hashes"), files)
    parts = {part.name: part for part in found}
    table = folder / "embedding.safetensors"
    write_table(parts["embedding"], source, table, 1)
    programs = {name: part for name, part in parts.items() if name != "embedding"}
    packages = {name: folder / f"{name}.mlpackage" for name in programs}
    bundles = {name: folder / f"{name}.mlmodelc" for name in programs}
    for name, part in programs.items():
        convert_stamped(part, source, "int8", packages[name], templates.FOLDER)
        with load_programs_as("fp16"):
            ct.models.utils.compile_model(str(packages[name]), str(bundles[name]))
    return Shipped(source, plan, parts, packages, bundles, table)


# One of each kind of layer in README's lane, and of each way to spell one in .ci/run's; all others are slow.
SAMPLE: dict[str, list[pytest.MarkDecorator]] = {"gemma3_text": [], "lfm2": [], "phi3": [], "qwen3_moe": []}
SAMPLE |= {"phi3-tanh": [pytest.mark.thorough], "zaya": [pytest.mark.thorough]}
# SiLU in an MLP, in a gate of experts, beside convolutions, in experts, beside a recurrence.
TANH = ("phi3", "gpt_oss", "lfm2", "olmoe", "qwen3_5_text")


OTHERWISE: dict[str, tuple[str, dict[str, Any]]] = {  # other graphs of a family than its tiny config's
    "granitemoehybrid-attention": (
        "granitemoehybrid",
        {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
    ),
    "granitemoehybrid-experts": ("granitemoehybrid", BESIDE),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
}


def _param(name: str, **program: str) -> Any:
    """Return a family and a config's section `program` as a parameter of `shipped`."""
    label = "-".join((name, *program.values()))
    return pytest.param((name, program, {}), marks=SAMPLE.get(label, [pytest.mark.slow]), id=label)


def _otherwise(label: str) -> Any:
    """Return a family and the changes of its tiny config as a parameter of `shipped`."""
    name, changes = OTHERWISE[label]
    return pytest.param((name, {}, changes), marks=pytest.mark.slow, id=label)


@pytest.fixture(
    scope="module",
    params=[*map(_param, supported()), *(_param(name, silu="tanh") for name in TANH), *map(_otherwise, OTHERWISE)],
)
def shipped(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Shipped:
    """Return the build of each family in turn."""
    name, program, changes = request.param
    folder = tmp_path_factory.mktemp(name)
    checkpoint = tiny_families.write_tiny(name, folder / "checkpoint", **changes)
    return ship(checkpoint, folder, **program)


@pytest.mark.thorough(but=["lfm2", "phi3"])
@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
def test_the_gates_of_the_stack_pass(shipped: Shipped) -> None:
    """Program error, widths and rejected drafts, within the limits by which builds are judged."""
    found = stack.program_and_widths(shipped.engine, shipped.stored(), tiny_families.tiny_text(24))
    rows = measurement.compare(one for one in found if isinstance(one, measurement.Measurement))
    measurement.demand("stack", rows)
    assert {"program_error", "width_error", "rejected_draft_error", "argmax_mismatches"} <= {r["name"] for r in rows}


def test_no_program_needs_the_engine_s_second_package(shipped: Shipped) -> None:
    """portable-coreml-extra, which shardmill's wheel lacks, has the operations that language models don't use."""
    kinds = shipped.operations()
    kernels = [KERNELS[kind] for kind in kinds if kind in KERNELS]
    assert len(kernels) > 10
    assert not [k.kind for k in kernels if k.call.__module__.startswith("portable_coreml_extra")]
    assert kinds - KERNELS.keys() <= {"const", "read_state", "write_state"}


def test_silu_is_made_of_tanh_only_if_the_config_says_so(shipped: Shipped) -> None:
    """No model with SiLU has a tanh for another purpose, but a recurrence, which never has the engine's own SiLU."""
    graph, kinds = shipped.plan["architecture"]["graph"], shipped.operations()
    activation, recurs = graph["activation"], any(graph.get(kind) for kind in RECURRENCES)
    if activation in ("silu", "silu_tanh"):
        assert ("tanh" in kinds) == (recurs or activation == "silu_tanh")
        assert activation == "silu" or "silu" not in kinds


def test_every_operation_is_known_to_run_on_the_neural_engine(shipped: Shipped) -> None:
    """By the placement rules. What a checkpoint's numbers need is computed once, when they become constants."""
    for name, package in shipped.packages.items():
        rows, findings = residency.predict(package, 4)
        measurement.demand(name, measurement.compare(residency.placement_measurements(rows, findings)))
    assert "softplus" not in shipped.operations()


@pytest.mark.skipif(sys.platform == "darwin", reason="asked of the portable engine in fp32 only")
def test_a_greedy_text_with_drafts_is_transformers_own(shipped: Shipped) -> None:
    """Each of 100 tokens is the one that transformers, given the packages' weights, finds most likely there."""
    engine = shipped.engine()
    truth = decode_one_by_one(engine, PROMPT, NEW)
    drafter = TurningDrafter(len(PROMPT), truth, engine.vocab)
    engine.reset()
    found = run(Session(engine), PROMPT, max_new_tokens=NEW, drafter=drafter, policy=AlwaysDraft())
    assert 0 < sum(found.accepted) < sum(found.drafted)
    text = [*PROMPT, *found.tokens]
    tables = {name: values.numpy() for name, values in load_file(shipped.table).items()}
    logits = shipped.stored().logits(text, tables["embedding"], tables.get("per_layer"))
    assert list(found.tokens) == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert (len(found.tokens), drafter.misjudged) == (NEW, 0)
