"""What a config would build, and whether it can be built, found out from config.json without any work.

Of a local checkpoint the headers of the weight files are read too, so that tensors that are missing or misshapen show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from shardmill.checkpoint.headers import check_tensors, read_tensors
from shardmill.config import Config
from shardmill.errors import CheckpointError, ConfigError
from shardmill.forms.form import stored_bytes
from shardmill.models.architecture import LABEL, SLIDING_MASK, Architecture, LayerSpec, ModelDescription
from shardmill.models.contract import cache_bytes, table_constants
from shardmill.models.interface import FIXED
from shardmill.pipeline.resolve import describe
from shardmill.pipeline.snakefile import file_problems
from shardmill.pipeline.steps.split import ignored, prefix_of
from shardmill.plan import Part, empty_parts, tensor_shapes
from shardmill.runtime.label import is_exact
from shardmill.topology import (
    MAX_WEIGHT_BYTES,
    PassTraffic,
    TrafficLength,
    file_bytes,
    misfits,
    overweight,
    pass_traffic,
    proposed,
    stored_weights,
    traffic_lengths,
)


@dataclass(frozen=True)
class PlannedProgram:
    """One program: layers, or a layer's experts, or rows of the vocabulary, [start, end).

    Attributes:
        name: of the part.
        kind: "layers", "experts", "head" or "encoder".
        start: the first layer, expert or row.
        end: the one after the last.
        layers: how many there are of each kind of layer.
        matrices: the form of each matrix.
        parameters: numbers of all constants.
        weight_bytes: of its weight file.
        state_bytes: of its states.
    """

    name: str
    kind: str
    start: int
    end: int
    layers: Mapping[str, int]
    matrices: Mapping[str, str]
    parameters: int
    weight_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Preview:
    """A build before it is one.

    Attributes:
        model: the name of its folder.
        source: the checkpoint's folder, or repository and commit.
        model_type: of its config.json.
        context: key/value slots.
        tokens_max: most tokens of a pass.
        verify: most tokens of a decode pass.
        shapes: "range", "fixed" for a function for each of `widths`, or "enumerated".
        reshape_frequency: how often Core ML is told that shapes change; "" where all of them are fixed.
        widths: the tokens that a decoder's passes carry.
        weights: the recipe, by its name or its file.
        bits_per_weight: of the programs' weight files.
        bytes_by_form: of weights that a pass reads if it takes every program, padding left out.
        topology: layers of each part, the proposal where the config leaves it open; an encoder has none.
        expert_groups: how many programs hold a layer's experts; 0 where they run in the layer's own.
        head_slices: how many programs hold the LM head, likewise.
        buckets: tokens of each of an encoder's programs; none for a decoder.
        task: what the model is for, as the hub calls it.
        windows: of an encoder that labels tokens, how texts longer than its buckets are read: "exact" or "approximate",
            see runtime/windows.py; "" for other models.
        weight_file_limit: bytes that the weight file of a program may have.
        programs: in the order of a pass, which runs each of them once.
        table_bytes: of the host's embedding table.
        weight_bytes: of all programs.
        state_bytes: of all programs.
        bytes_per_token: that a pass of one token reads: all weights and all states, but for groups of experts that are
            not to be expected in a pass; of an encoder, what any pass reads.
        passes: of a model with experts, what passes take in both forms, see traffic.py.
        lengths: of a model with several contexts, what a pass of one token takes in each.
        tensors: "match", "differ", or "unknown" for a checkpoint that is not here.
        refused: why it can't be built; empty if it can.
    """

    model: str
    source: str
    model_type: str
    context: int
    tokens_max: int
    verify: int
    shapes: str
    reshape_frequency: str
    widths: tuple[int, ...]
    weights: str
    bits_per_weight: float
    bytes_by_form: Mapping[str, int]
    topology: tuple[tuple[int, int], ...]
    expert_groups: int
    head_slices: int
    buckets: tuple[int, ...]
    task: str
    windows: str
    weight_file_limit: int
    programs: tuple[PlannedProgram, ...]
    table_bytes: int
    weight_bytes: int
    state_bytes: int
    bytes_per_token: int
    passes: tuple[PassTraffic, ...]
    lengths: tuple[TrafficLength, ...]
    tensors: str
    refused: tuple[str, ...]


def preview(config: Config) -> Preview:
    """Return what would be built.

    Raises:
        CheckpointError: if config.json can't be had or describes what no program can be.
        ConfigError: if the config is that of another model.
    """
    model = describe(config)
    a = model.architecture
    for problem in misfits(config, a):
        raise ConfigError(problem)
    chosen = proposed(config, a)
    for problem in misfits(chosen, a):
        raise ConfigError(problem)
    parts = empty_parts(chosen, a)
    programs = [_program(part, config) for part in parts if part.kind != "embedding"]
    found = stored_weights(parts, config.convert.recipe)
    weights, kept = sum(p.weight_bytes for p in programs), sum(p.state_bytes for p in programs)
    each = pass_traffic(config, a)
    expected = next((p.bytes for p in each if p.groups and p.groups == chosen.groups), weights + kept)
    fault = _tensor_fault(config, model)
    return Preview(
        model=config.model,
        source=config.source.path or f"{config.source.repo}@{config.source.revision}",
        model_type=a.model_type,
        context=config.length,
        tokens_max=config.tokens.max,
        verify=config.verify,
        shapes=config.program.shapes,
        reshape_frequency="" if a.ends or config.program.shapes == FIXED else config.program.reshape_frequency,
        widths=() if a.ends else config.widths,
        weights=config.convert.precision,
        bits_per_weight=found.bits_per_weight,
        bytes_by_form=found.bytes_by_form,
        topology=() if a.ends else chosen.ranges,
        expert_groups=chosen.groups,
        head_slices=0 if a.ends else chosen.slices,
        buckets=chosen.sizes,
        task=a.task,
        windows=_windows(a, chosen.sizes),
        weight_file_limit=MAX_WEIGHT_BYTES,
        programs=tuple(programs),
        table_bytes=sum(
            stored_bytes(config.convert.embedding if path == "embedding" else "fp16", shape)
            for path, shape in table_constants(a).items()
        ),
        weight_bytes=weights,
        state_bytes=kept,
        bytes_per_token=max(p.weight_bytes for p in programs) if a.ends else expected,
        passes=each,
        lengths=traffic_lengths(config, a),
        tensors="unknown" if fault is None else "differ" if fault else "match",
        refused=(*overweight(config, a), *file_problems(config), *filter(None, [fault])),
    )


def _windows(a: Architecture, buckets: Sequence[int]) -> str:
    if a.task != LABEL:
        return ""
    return "exact" if is_exact(max(buckets), a.reach) else "approximate"


def _program(part: Part, config: Config) -> PlannedProgram:
    chosen, shapes = config.convert.recipe, part.named_shapes
    return PlannedProgram(
        name=part.name,
        kind=part.kind,
        start=part.start,
        end=part.end,
        layers=dict(Counter(map(_kind_name, part.kinds))),
        matrices=chosen.forms(shapes),
        parameters=sum(map(prod, shapes.values())),
        weight_bytes=file_bytes(shapes, chosen),
        state_bytes=cache_bytes(part.blueprint),
    )


def _kind_name(kind: LayerSpec) -> str:
    """Return what a person calls a kind of layer."""
    if kind.mixer == "conv":
        return "convolution"
    name = "sliding attention" if kind.mask == SLIDING_MASK else "attention"
    return name if kind.rope else f"{name} without rotation"


def _tensor_fault(config: Config, model: ModelDescription) -> str | None:
    """Return how a local checkpoint's tensors are not those of the model, '' if they are; None for one on the hub."""
    if config.source.path is None:
        return None
    try:
        found = read_tensors(Path(config.source.path))
        model = model.under(prefix_of(found, model.prefix))
        check_tensors(found, tensor_shapes(model), optional=ignored(model, found))
    except CheckpointError as error:
        return str(error)
    return ""
