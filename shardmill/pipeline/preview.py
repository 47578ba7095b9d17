"""A preview of the build that a config describes, and of its problems, from config.json without any work.

For a local checkpoint the headers of the weight files are read too, so that missing or misshapen tensors show.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from portable_coreml.judge.limits import Limit, expected_on, heeded, listed
from portable_coreml.judge.rules.shapes import MAX_SPATIAL_BEFORE_M4

from shardmill.checkpoint.headers import check_tensors, read_tensors
from shardmill.config import Config
from shardmill.errors import CheckpointError, ConfigError
from shardmill.evidence.limits import described
from shardmill.forms.form import FP16, stored_bytes
from shardmill.media.image_rules import read_image_rules
from shardmill.media.layout import most_views
from shardmill.models.adapters import adapter_inputs
from shardmill.models.architecture import LABEL, SLIDING_MASK, Architecture, LayerSpec, ModelDescription
from shardmill.models.caches import Shape
from shardmill.models.contract import BY_TOKEN, CACHE_ITEM_BYTES, PER_LAYER, cache_bytes, lent_caches
from shardmill.models.interface import FIXED, is_apart
from shardmill.models.mixers import MIXERS
from shardmill.models.part_kinds import table_constants
from shardmill.pipeline.costs import Costs, costs
from shardmill.pipeline.resolve import check_labels, describe_drafter, described_to_fit, fitted, plan_sizes
from shardmill.pipeline.snakefile import file_problems
from shardmill.pipeline.steps.split import answer_tokens, ignored, media_rules, read_out
from shardmill.pipeline.traffic import PassTraffic, TrafficLength, pass_traffic, stored_weights, traffic_lengths
from shardmill.plan import Part, empty_parts, tensor_shapes
from shardmill.runtime.windows import is_exact
from shardmill.topology import misfits, overweight, overweight_drafter, proposed
from shardmill.weight_files import file_bytes, warnings, weight_limit


@dataclass(frozen=True)
class PlannedProgram:
    """One program: layers, or a layer's experts, or rows of the vocabulary, [start, end).

    Attributes:
        name: of the part.
        kind: "layers", "experts", "head", "encoder" or "tower".
        start: the first layer, expert or row.
        end: the index after the last layer, expert or row.
        layers: the number of layers of each kind.
        matrices: the form of each matrix.
        parameters: numbers of all constants.
        weight_bytes: of its weight file.
        state_bytes: of its states.
        runs_on: the systems on which it is expected on the Neural Engine, in words.
        lent_bytes: of other programs' caches that the program reads.
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
    runs_on: str = ""
    lent_bytes: int = 0


@dataclass(frozen=True)
class Preview:
    """A planned build.

    Attributes:
        model: the name of its folder.
        source: the checkpoint's folder, or repository and commit.
        model_type: as config.json has it.
        context: key/value slots.
        long_factors: whether every position turns by LongRoPE's long factors, in short texts too.
        tokens_max: most tokens of a pass.
        verify: most tokens of a decode pass.
        shapes: "range", "fixed" for a function for each of `widths`, or "enumerated".
        adapters: the largest rank of adapters that the programs take; 0 if they take none.
        adapter_bytes: of an adapter's matrices, which a pass reads besides.
        adapter_operations: multiplications and additions with these matrices for one token.
        adapter_verdict: what the placement rules say of products with inputs of these shapes.
        reshape_frequency: how often shapes change, as a hint for Core ML; "" if all shapes are fixed.
        widths: the tokens that a decoder's passes carry.
        weights: the recipe, by its name or its file.
        bits_per_weight: of the programs' weight files.
        bytes_by_form: bytes of the weights that a pass through every program reads, without padding.
        topology: layers of each part, proposed if the config leaves it open.
        expert_groups: how many programs hold a layer's experts; 0 if the experts are in the layer's program.
        head_slices: how many programs hold the LM head; 0 for an encoder.
        buckets: tokens of each of an encoder's programs; empty for a decoder.
        images: empty for a build without images. The most images of a request; of what the tower sees at once, an image
            or a tile of one, the most rows and pixels; and how often it sees an image at most, 0 if that is unknown,
            because the checkpoint is not on this machine.
        audio: the most sounds of a request, then the rows and the frames of a window; empty for a build without sounds.
        task: what the model is for, as the hub calls it.
        windows: how an encoder that labels tokens reads texts longer than its buckets: "exact" or "approximate", see
            runtime/windows.py; "" for other models.
        weight_file_limit: bytes that the weight file of a program may have on every system that the build is for.
        systems: that the build is for, in words.
        programs: in the order of a pass, which runs each program once.
        table_bytes: of the host's embedding table.
        rows_bytes: of the host's table of rows for each token and layer; 0 if the model has none.
        row_bytes: of such rows for one token, which is all that a pass reads of that table.
        weight_bytes: of all programs.
        state_bytes: of all programs.
        bytes_per_token: bytes that a pass of one token reads: all weights and states, without the groups of experts
            that a pass is not expected to use. For an encoder, the weights of its largest program.
        passes: for a model with experts, what passes take in both forms, see traffic.py.
        lengths: for a model with several contexts, what a pass of one token takes in each context.
        tensors: "match", "differ", or "unknown" if the checkpoint is not on this machine.
        warnings: what may surprise: experts that don't fit, programs that only some systems run on the Neural Engine.
        refused: why it can't be built; empty if it can.
        costs: what it takes, and what this machine has; None if it can't be built.
    """

    model: str
    source: str
    model_type: str
    context: int
    long_factors: bool
    tokens_max: int
    verify: int
    shapes: str
    adapters: int
    adapter_bytes: int
    adapter_operations: int
    adapter_verdict: str
    reshape_frequency: str
    widths: tuple[int, ...]
    weights: str
    bits_per_weight: float
    bytes_by_form: Mapping[str, int]
    topology: tuple[tuple[int, int], ...]
    expert_groups: int
    head_slices: int
    buckets: tuple[int, ...]
    images: tuple[int, ...]
    audio: tuple[int, ...]
    task: str
    windows: str
    weight_file_limit: int
    systems: str
    programs: tuple[PlannedProgram, ...]
    table_bytes: int
    rows_bytes: int
    row_bytes: int
    weight_bytes: int
    state_bytes: int
    bytes_per_token: int
    passes: tuple[PassTraffic, ...]
    lengths: tuple[TrafficLength, ...]
    tensors: str
    warnings: tuple[str, ...]
    refused: tuple[str, ...]
    costs: Costs | None


def preview(config: Config) -> Preview:
    """Return the preview of a build.

    Raises:
        CheckpointError: if config.json can't be read, or no program can be built for its model.
        ConfigError: if the config does not fit the model.
    """
    check_labels(config)
    asked = fitted(config)
    config, model = described_to_fit(asked)
    a = model.architecture
    for problem in misfits(config, a):
        raise ConfigError(problem)
    chosen = proposed(config, a)
    for problem in misfits(chosen, a):
        raise ConfigError(problem)
    drafter = describe_drafter(config, a)
    parts = empty_parts(chosen, a, drafter)
    programs = [_program(part, config) for part in parts[:-1]]  # the last one is the host's table
    by_form = stored_weights([part for part in parts if not part.is_apart], config.recipe)
    weights, states = sum(p.weight_bytes for p in programs), sum(p.state_bytes for p in programs)
    read = sum(p.weight_bytes + p.state_bytes for p in programs if not is_apart(p.name))
    each = pass_traffic(config, a)
    expected = next((p.bytes for p in each if p.groups and p.groups == chosen.groups), read)
    tables = {
        path: stored_bytes(config.convert.embedding if path in BY_TOKEN else FP16, shape)
        for path, shape in table_constants(a).items()
    }
    stacks = [
        shape
        for spec in (part.spec for part in parts if part.spec.calls.adapters)
        for shape in adapter_inputs(spec.graph, spec.layers, spec.calls.adapters).values()
    ]
    limit = weight_limit(config)
    stored = sum(p.weight_bytes for p in programs[: len(chosen.ranges)]) if a.ends else weights
    heavy = [*overweight(config, a), *(overweight_drafter(config, a, drafter) if drafter else ())]
    fault = _tensor_fault(config, model)
    refused = (*heavy, *file_problems(config), *filter(None, [fault, _file_fault(config, model)]))
    return Preview(
        model=config.model,
        source=config.source.path or f"{config.source.repo}@{config.source.revision}",
        model_type=a.model_type,
        context=config.length,
        long_factors=any(rope.factors == "long" for rope in a.ropes.values()),
        tokens_max=config.tokens.max,
        verify=config.verify,
        shapes=config.program.shapes,
        adapters=config.program.adapters or 0,
        adapter_bytes=sum(CACHE_ITEM_BYTES * prod(shape) for shape in stacks),
        adapter_operations=sum(2 * prod(shape) for shape in stacks),
        adapter_verdict=_placed(stacks),
        reshape_frequency="" if a.ends or config.program.shapes == FIXED else config.program.reshape_frequency,
        widths=() if a.ends else config.widths,
        weights=config.convert.precision,
        bits_per_weight=by_form.bits_per_weight,
        bytes_by_form=by_form.bytes_by_form,
        topology=chosen.ranges,
        expert_groups=chosen.groups,
        head_slices=0 if a.ends else chosen.slices,
        buckets=chosen.sizes,
        images=_images(config, model),
        audio=(config.audio.most, a.tower.io.tokens(config.audio.sizes[-1]), config.audio.sizes[-1])
        if config.audio and a.tower
        else (),
        task=a.task,
        windows=_windows(a, chosen.sizes),
        weight_file_limit=limit.most,
        systems=listed(config.systems),
        programs=tuple(programs),
        table_bytes=sum(size for path, size in tables.items() if path != PER_LAYER),
        rows_bytes=tables.get(PER_LAYER, 0),
        row_bytes=tables.get(PER_LAYER, 0) // a.vocab,
        weight_bytes=weights,
        state_bytes=states,
        bytes_per_token=stored if a.ends else expected,
        passes=each,
        lengths=traffic_lengths(config, a),
        tensors="unknown" if fault is None else "differ" if fault else "match",
        warnings=(
            *(described(limit) for limit in heeded() if {*limit.systems} & {*config.systems}),
            *(_routed_anyway(config, limit) if config.experts != asked.experts else ()),
            *(warnings(config, {p.name: p.weight_bytes for p in programs}) if not heavy else ()),
        ),
        refused=refused,
        costs=None if refused else costs(chosen, a, plan_sizes(chosen, a), stored, sum(tables.values())),
    )


def _routed_anyway(config: Config, limit: Limit) -> tuple[str]:
    """Return why experts are routed that the config did not want routed."""
    why = f"a layer with all of its experts is over the limit of {limit.most} bytes of weights (rule {limit.rule})"
    return (f"experts: routed, in {config.groups} groups a layer, since {why}; what a pass costs stands below",)


def _placed(stacks: Sequence[Shape]) -> str:
    """Return what the placement rules say of products with these inputs; "" if there are none.

    The rules have nothing against a factor that is an fp16 input, and a limit for the longest axis.
    """
    longest = max(map(max, stacks), default=0)
    if longest > MAX_SPATIAL_BEFORE_M4:
        return f"an axis of {longest} is too long for chips before M4 (rule S4)"
    return "no placement rule is against products with such inputs" if stacks else ""


def _windows(a: Architecture, buckets: Sequence[int]) -> str:
    if a.task != LABEL:
        return ""
    return "exact" if is_exact(max(buckets), a.reach) else "approximate"


def _program(part: Part, config: Config) -> PlannedProgram:
    chosen, shapes = config.recipe, part.named_shapes
    size = file_bytes(shapes, chosen)
    return PlannedProgram(
        name=part.name,
        kind=part.kind,
        start=part.start,
        end=part.end,
        layers=dict(Counter(_kind_name(kind) for _, kind in part.spec.layers)),
        matrices=chosen.forms(shapes),
        parameters=sum(map(prod, shapes.values())),
        weight_bytes=size,
        state_bytes=cache_bytes(part.spec),
        runs_on=expected_on(size, config.systems),
        lent_bytes=sum(CACHE_ITEM_BYTES * prod(shape) for shape in lent_caches(part.spec).values()),
    )


def _kind_name(kind: LayerSpec) -> str:
    """Return a readable name of a kind of layer."""
    if not kind.mixer:
        return "feed-forward block"
    if not kind.attends:
        return MIXERS[kind.mixer].title
    name = "sliding attention" if kind.mask == SLIDING_MASK else "attention"
    return name if kind.rope else f"{name} without rotation"


def _tensor_fault(config: Config, model: ModelDescription) -> str | None:
    """Return how a local checkpoint's tensors differ from the model's, '' if they match; None if it is on the hub."""
    if config.source.path is None:
        return None
    try:
        tensors = read_tensors(Path(config.source.path))
        model = model.stored_as(tensors)
        check_tensors(tensors, tensor_shapes(model), optional=ignored(model, tensors))
    except CheckpointError as error:
        return str(error)
    return ""


def _images(config: Config, model: ModelDescription) -> tuple[int, ...]:
    """Return what images take, see `Preview`."""
    tower, images = model.architecture.tower, config.images
    if tower is None or images is None:
        return ()
    views, source = 0, Path(config.source.path or "")
    if config.source.path and source.is_dir():
        with suppress(CheckpointError):  # which `_file_fault` reports
            known = media_rules(config, model, source)["images"]
            views = most_views(read_image_rules({key: value for key, value in known.items() if key != "most"}))
    patches = images.sizes[-1]
    return images.most, patches // tower.io.merged, patches * tower.host["patch"] ** 2, views


def _file_fault(config: Config, model: ModelDescription) -> str:
    """Return what a local checkpoint's files lack beside its weights, as far as the folder is there, or ''.

    An encoder's say what becomes of its rows, and an image processor's what becomes of images.
    """
    source = Path(config.source.path or "")
    if config.source.path is None or not source.is_dir():
        return ""
    try:
        read_out(config, model, source)
        media_rules(config, model, source)
        if config.answers and (source / "tokenizer.json").is_file():
            answer_tokens(source, config.answers)
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return ""
