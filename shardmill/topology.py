"""Topology: which layers, and which rows of the LM head, make up each program, within what one program may hold.

What is chosen here suits every system that the config is for. What a config chooses itself may suit only some systems,
unless it names the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import isqrt, prod
from typing import TYPE_CHECKING

from portable_coreml.judge.limits import MIN_WEIGHT_BYTES, strictest
from portable_coreml.judge.rules.shapes import MAX_EXTENT, STATE_WIDTH_MULTIPLE

from shardmill.config import Config
from shardmill.convert.blob import ALIGNMENT
from shardmill.errors import ConfigError
from shardmill.forms import recipe as recipes
from shardmill.forms.form import FP16
from shardmill.forms.recipe import Recipe, unreachable
from shardmill.models.adapters import unadaptable
from shardmill.models.architecture import (
    SLIDING_MASK,
    Architecture,
    Experts,
    LayerSpec,
    ModelDescription,
    cache_source,
    joints,
    with_experts,
    with_tanh,
)
from shardmill.models.caches import RING, Shape
from shardmill.models.contract import BLOCK, GraphSpec, most_tokens, window_slots
from shardmill.models.encoder import with_answers
from shardmill.models.interface import FIXED, HOST, TANH
from shardmill.models.part_kinds import constants, tower_constants, tower_spec, whole_spec
from shardmill.models.tower import TowerArchitecture
from shardmill.plan import empty_parts
from shardmill.weight_files import (
    fewer_bytes,
    file_bytes,
    layer_bytes,
    refusal,
    refused_over,
    slice_bytes,
    weight_limit,
)

if TYPE_CHECKING:
    from shardmill.models.eagle3 import DrafterDescription

MOST_SLICES = 64  # more slices would cost a pass more than extents over MAX_EXTENT might
Range = tuple[int, int]


def as_configured(config: Config, model: ModelDescription) -> ModelDescription:
    """Return the model with its answers, its experts and its SiLU as the config wants them.

    Raises CheckpointError if the model has no experts, or no SiLU, or ranks nothing.
    """
    if config.answers:
        model = with_answers(model, config.answers)
    a = model.architecture
    if config.experts != "dense":
        a = with_experts(a, routed=True)
    if config.program.silu == TANH:
        a = with_tanh(a)
    return replace(model, architecture=a)


def with_fitting_experts(config: Config, a: Architecture) -> Config:
    """Return the config with routed experts if `topology: auto` has no room for a layer with all of its experts.

    A layer's experts are in as few groups as the limit allows.
    """
    experts, limit = a.graph.experts, weight_limit(config).most
    if experts is None or a.ends is not None or config.topology != "auto" or config.experts != "dense":
        return config
    routed, built = replace(config, experts="routed"), with_experts(a, routed=True)
    if ALIGNMENT + max(layer_bytes(config, a)) <= limit or misfits(routed, built):
        return config
    fitting = [n for n in _divisors(_units(experts)) if max(_group_bytes(routed, built, n)) <= limit]
    return replace(config, experts=fitting[0]) if fitting else config


def resolve_topology(config: Config, a: Architecture) -> Config:
    """Return the config with its topology, groups of experts and head slices as numbers.

    Raises:
        ConfigError: if the model can't be built so.
    """
    for problem in (*misfits(config, a), *overweight(config, a)):
        raise ConfigError(problem)
    chosen = proposed(config, a)
    for problem in misfits(chosen, a):  # a slice of the head has fewer rows than the head
        raise ConfigError(problem)
    return chosen


def proposed(config: Config, a: Architecture) -> Config:
    """Return the config with proposals for the settings that it leaves open, without a check that they can be built."""
    ranges = config.topology
    if ranges == "auto" and config.experts != "dense":
        ranges = _between_experts(a)
    elif ranges == "auto":
        ranges = _even_ranges(config, a)
    if a.ends is not None:
        return replace(config, topology=ranges, buckets=config.sizes)
    count = _head_slices(config, a) if config.head.slices == "auto" else config.head.slices
    groups = _expert_groups(config, a) if config.experts == "routed" else config.experts
    return replace(config, topology=ranges, experts=groups, head=replace(config.head, slices=count))


def _even_ranges(config: Config, a: Architecture) -> tuple[Range, ...]:
    """Return as few and as even ranges of layers as fit, with each layer in the range of the cache that it reads.

    If the host keeps the caches, layers without a cache are in separate ranges, since a prompt may leave them out.
    """
    sizes, ranges = layer_bytes(config, a), list[Range]()
    apart = _first_apart(config, a)
    for ends in (joints(a.kinds[:apart]), [*range(apart, a.layers + 1)]):
        units = [sum(sizes[start:end]) for start, end in pairwise(ends)]
        ranges += [
            (ends[first], ends[last]) for first, last in share_layers(units, weight_limit(config).most - ALIGNMENT)
        ]
    return tuple(ranges)


def _first_apart(config: Config, a: Architecture) -> int:
    """Return the first layer whose part may read caches of other parts; the number of layers if no part may.

    The host must keep the caches, and every layer from there on shares.
    """
    ends = [i for i, kind in enumerate(a.kinds, start=1) if not kind.shares]
    return max(ends, default=0) if config.program.state == HOST else a.layers


def _parted(config: Config, a: Architecture) -> str:
    """Return which layer is to read a cache that lies in another part, or ''.

    If the host keeps the caches, a part of layers without a cache may read caches of other parts.
    """
    layers = tuple(enumerate(a.kinds))
    apart = _first_apart(config, a)
    for start, end in config.ranges:
        if start >= apart:
            continue
        for i in (i for i in range(start, end) if a.kinds[i].shares):
            source = cache_source(layers, i)
            if source is not None and source < start:
                fitting = [list(part) for part in _even_ranges(config, a)]
                why = f"layer {i} reads the cache of layer {source}, which would be in another part"
                return f"topology: {why}; {fitting} keeps such layers together"
    return ""


def _between_experts(a: Architecture) -> tuple[Range, ...]:
    """Return ranges of layers that each end with a layer with experts: there the host adds the experts' output."""
    ends = [i for i, kind in enumerate(a.kinds, start=1) if kind.ffn == "experts"]
    return tuple(pairwise([0, *ends]))


def _expert_groups(config: Config, a: Architecture) -> int:
    """Return the most groups that each still have enough weights to be worth a dispatch (rule W5).

    The result is 1 if no number of groups satisfies the rule.

    The fewer experts a group has, the more groups a token leaves out.
    """
    experts = a.graph.experts
    assert experts is not None
    fitting = [n for n in _divisors(_units(experts)) if min(_group_bytes(config, a, n)) >= MIN_WEIGHT_BYTES]
    return max(fitting, default=1)


def _units(experts: Experts) -> int:
    """Return the number of a layer's experts, where experts that share projections count as one."""
    return experts.count // experts.group


def _group_bytes(config: Config, a: Architecture, count: int) -> list[int]:
    """Return bytes of the weight file of each of `count` groups of every layer's experts."""
    parts = empty_parts(replace(proposed(replace(config, experts=1), a), experts=count), a)
    chosen = config.convert.recipe
    return [file_bytes(part.named_shapes, chosen) for part in parts if part.kind == "experts"]


def share_layers(sizes: Sequence[int], limit: int) -> tuple[Range, ...]:
    """Return consecutive ranges of layers: as few as the limit allows, and as even as possible.

    Args:
        sizes: bytes of each layer.
        limit: bytes that one range may have; a layer over the limit makes a separate range.

    Returns:
        Half-open ranges, in order.
    """
    sums = [0, *accumulate(sizes)]
    best = [(0, 0, 0)]  # for the first i layers: how many ranges, their sum of squares, minus the start of the last
    for end in range(1, len(sums)):
        candidates: list[tuple[int, int, int]] = []
        for start in range(end - 1, -1, -1):
            size = sums[end] - sums[start]
            if candidates and size > limit:
                break
            candidates.append((best[start][0] + 1, best[start][1] + size**2, -start))
        best.append(min(candidates))
    ranges: list[Range] = []
    end = len(sizes)
    while end:
        ranges.append((-best[end][2], end))
        end = ranges[-1][0]
    return tuple(reversed(ranges))


def misfits(config: Config, a: Architecture) -> list[str]:
    """Return how the config contradicts the model, or the model the Neural Engine."""
    rows = _matrix_rows(a, config.head.slices)
    problems = list(recipes.recipe_misfits(config.convert.recipe, rows))
    if config.convert.precision == recipes.SEARCH:
        problems += recipes.unfit(config.convert.search.forms, rows)
        whole = _matrix_rows(a, slices=1)
        problems += unreachable(vars(config.convert.budget), config.convert.search.forms, whole)
    ranges, count = config.topology, config.head.slices
    if ranges != "auto" and ranges[-1][1] != a.layers and not problems:
        return [f"topology: ends at layer {ranges[-1][1]}, the model has {a.layers}"]
    if a.ends is not None or problems:
        return problems
    if config.convert.calibration and a.graph.per_layer + sum(kind.shares for kind in a.kinds):
        return [f"convert.calibration: {a.model_type} has layers that can't be run one by one; leave it out"]
    if config.program.adapters and (why := unadaptable(a)):
        return [f"program.adapters: {why}; leave it out"]
    if ranges != "auto" and (problem := _parted(config, a)):
        return [problem]
    if problem := _unfit_states(config, a) or _too_many_scores(config, a) or _unfit_tower(config, a.tower):
        return [problem]
    if a.graph.conv_taps and config.tokens.max > (most := most_tokens(a.graph.conv_taps)):
        ring = f"a pass over convolutions of {a.graph.conv_taps} taps, whose ring has {RING} slots"
        return [f"tokens.max: {config.tokens.max} is too many for {ring}; {most} or fewer fit"]
    if short := [n for n in config.program.contexts if _ring_of(config, a, n) != _ring_of(config, a, config.length)]:
        least = f"the window of {a.window}, for which sliding layers keep {_ring_of(config, a, config.length)} slots"
        return [f"program.contexts: {short[0]} is too short for {least}; name longer ones"]
    if config.experts != "dense" and (problem := _unroutable(config, a)):
        return [problem]
    if count != "auto" and a.vocab % count:
        divisors = _divisors(a.vocab)
        near = [n for n in divisors if n < count][-1:] + [n for n in divisors if n > count][:1]
        return [
            f"head.slices: {count} does not divide the vocabulary of {a.vocab}; {' or '.join(map(str, near))} would"
        ]
    return []


def _unfit_tower(config: Config, tower: TowerArchitecture | None) -> str:
    """Return why the tower's programs can't be built as the config wants them, or ''."""
    if config.tower is None or tower is None:
        return ""
    sizes, key = config.tower.sizes, "images" if config.images else "audio"
    if sound := tower.io.convolutions:
        if uneven := [size for size in sizes if size % sound.frames]:
            return f"audio.frames: {uneven[0]} is no multiple of the {sound.frames} frames of a chunk"
        if sizes[-1] != (window := tower.host["window"]):
            return f"audio.frames: layers see {window} frames at once, so the largest program has {window}"
    elif problem := _unfit_patches(sizes, tower):
        return problem
    whole = tower_spec(tower, sizes[-1])
    size = file_bytes(constants(whole), Recipe(config.tower.form))
    if size > refused_over(config).most:
        remedy = "`form: int8` halves it" if config.tower.form == FP16 else "this tower can't be built"
        return refusal(config, key, "the tower", size, remedy)
    return ""


def _unfit_patches(sizes: Sequence[int], tower: TowerArchitecture) -> str:
    """Return why a tower for images has no programs of these patches, or ''."""
    merged, sides = tower.io.merged, tower.host["merge"]
    if "grid" in tower.host and tuple(sizes) != (prod(tower.host["grid"]),):
        only = prod(tower.host["grid"])
        return f"images.patches: {[*sizes]}, but the tower's images have {only} patches; write [{only}]"
    if uneven := [size for size in sizes if size % merged]:
        near = max(uneven[0] // merged, 1) * merged
        return f"images.patches: {uneven[0]} is no multiple of the {sides} x {sides} patches of a row; {near} is"
    return ""


def _too_many_scores(config: Config, a: Architecture) -> str:
    """Return why passes of `tokens.max` tokens have more scores than the engine computes rightly, or ''.

    Programs of fixed widths take the queries in pieces.
    """
    limit = strictest(config.systems).scores
    slots = [_slots_of(config, a, kind) for kind in a.kinds if kind.attends]
    scores = config.tokens.max * max(slots, default=0)
    if config.program.shapes == FIXED or scores <= limit.most:
        return ""
    fewer = limit.most // max(slots)
    why = f"{config.tokens.max} tokens x {max(slots)} slots are {scores} scores for a head, of which the Neural Engine"
    remedy = f"{fewer} or fewer fit, or add `program.shapes: fixed`" if fewer else "add `program.shapes: fixed`"
    return f"tokens.max: {why} computes {limit.most} rightly (rule {limit.rule}); {remedy}, whose programs divide them"


def _slots_of(config: Config, a: Architecture, kind: LayerSpec) -> int:
    """Return the slots whose keys a layer reads."""
    return (kind.mask == SLIDING_MASK and _ring_of(config, a, config.length)) or config.length


def _unfit_states(config: Config, a: Architecture) -> str:
    """Return which state of the model the Neural Engine or a pass of `tokens.max` tokens does not take, or ''."""
    widths = [("head_dim", a.graph.of(kind).head_dim) for kind in a.kinds if kind.attends]
    widths += a.graph.recurrence.widths.items() if a.graph.recurrence else []
    for name, width in ((name, width) for name, width in widths if width % STATE_WIDTH_MULTIPLE):
        kind = "key/value state" if name == "head_dim" else "recurrent state"
        return (
            f"{name} {width}: a {kind} whose width is no multiple of {STATE_WIDTH_MULTIPLE} fails on the Neural Engine "
            "(rule S8); this model can't be built"
        )
    if a.graph.recurrence and config.verify > BLOCK:
        return f"tokens.verify: {config.verify} is too many for a recurrence: {BLOCK} of its tokens may be rejected"
    if a.graph.recurrence and (most := config.tokens.max) > BLOCK:
        if config.program.shapes != FIXED:
            why = f"one function for every width takes {BLOCK} tokens of a recurrence"
            return f"tokens.max: {most} is too many: {why}; lower it, or add `program.shapes: fixed`"
        if most % BLOCK:
            return f"tokens.max: a recurrence takes prompts in blocks of {BLOCK}; {most // BLOCK * BLOCK} would fit"
    return ""


def _ring_of(config: Config, a: Architecture, slots: int) -> int:
    """Return slots of the sliding layers' rings in a context of `slots` slots.

    0 if they keep as many slots as the other layers.
    """
    return window_slots(a.window, config.tokens.max, slots)


def _matrix_rows(a: Architecture, slices: int | str) -> dict[str, Shape]:
    """Return the constants of all programs; for the LM head, of one slice if the number of slices is known."""
    rows = a.vocab // (slices if isinstance(slices, int) else 1)
    whole = with_experts(a, routed=False) if a.graph.experts else a
    head = {} if a.ends else constants(GraphSpec("head", a.graph, rows=rows))
    return constants(whole_spec(whole)) | head | tower_constants(a)


def _unroutable(config: Config, a: Architecture) -> str:
    """Return why the host can't route to the model's experts as the config wants it, or ''."""
    experts, ranges, ends = a.graph.experts, config.topology, _between_experts(a)
    assert experts is not None
    if ends[-1][1] != a.layers or a.graph.post_norms or a.graph.outer_norms or a.graph.parallel:
        return f"experts: {a.model_type} has layers that the host can't end with its experts' sum; take `dense`"
    if ranges != "auto" and ranges != ends:
        return f"topology: with experts routed a part ends at each layer that has them: {[list(r) for r in ends]}"
    if isinstance(config.experts, int) and _units(experts) % config.experts:
        together = f", of which {experts.group} at a time share projections" if experts.group > 1 else ""
        fitting = " or ".join(map(str, _divisors(_units(experts))))
        return f"experts: {config.experts} does not divide a layer's {experts.count} experts{together}; {fitting} would"
    return ""


def overweight(config: Config, a: Architecture) -> list[str]:
    """Return the layers and the slice that hold more than one program may, with a topology that fits."""
    sizes = layer_bytes(config, a)
    apart = _first_apart(config, a)
    whole = [*pairwise(joints(a.kinds[:apart])), *pairwise(range(apart, a.layers + 1))]
    units = {unit: sum(sizes[slice(*unit)]) for unit in whole}
    heaviest = max(units, key=units.__getitem__)
    limit = refused_over(config, chosen_here=config.topology == "auto")
    if ALIGNMENT + units[heaviest] > limit.most:
        first, last = heaviest[0], heaviest[1] - 1
        block = f"the block of layers {first} to {last}, which share caches,"
        what = f"layer {first} alone" if first == last else block
        remedy = "`program.state: host` cuts it" if first < last else fewer_bytes(config)
        return [refusal(config, "topology", what, ALIGNMENT + units[heaviest], remedy)]
    chosen, fitting = proposed(config, a), proposed(replace(config, topology="auto"), a)
    names = (name for name in chosen.parts if not name.startswith("experts"))
    parts = {name: ALIGNMENT + sum(sizes[start:end]) for name, (start, end) in zip(names, chosen.ranges, strict=False)}
    remedy = f"{[list(part) for part in fitting.ranges]} fits"
    heavy = [refusal(config, "topology", name, size, remedy) for name, size in parts.items() if size > limit.most][:1]
    if a.ends is not None:
        return heavy
    if (size := slice_bytes(config, a, chosen.slices)) > refused_over(config).most:
        heavy.append(refusal(config, "head.slices", "head_0", size, f"{_head_slices(config, a)} slices fit"))
    if chosen.groups and (group_bytes := max(_group_bytes(config, a, chosen.groups))) > refused_over(config).most:
        remedy = "`routed` leaves the number of groups to the plan"
        heavy.append(refusal(config, "experts", "a group", group_bytes, remedy))
    return heavy


def overweight_drafter(config: Config, a: Architecture, drafter: DrafterDescription) -> list[str]:
    """Return the programs of a drafter that hold more than one program may, and how they contradict the config."""
    parts = [part for part in empty_parts(proposed(config, a), a, drafter) if part.drafter]
    sizes = {part.name: file_bytes(part.named_shapes, config.convert.recipe) for part in parts}
    shapes = {path: shape for part in parts for path, shape in part.named_shapes.items()}
    problems = list(recipes.recipe_misfits(config.convert.recipe, shapes))
    large = [name for name, size in sizes.items() if size > refused_over(config).most]
    return problems + [refusal(config, "drafter", name, sizes[name], fewer_bytes(config)) for name in large]


def _head_slices(config: Config, a: Architecture) -> int:
    """Return the fewest equal slices that a program may hold and whose rows are no more than an extent's limit.

    The extent's limit is given up if the vocabulary has no divisor that suits: convolutions with more output channels
    are reported to run (rule S3). The program's limit always holds, because one row fits any program.
    """
    fitting = [n for n in _divisors(a.vocab) if slice_bytes(config, a, n) <= weight_limit(config).most]
    return next((n for n in fitting if n <= MOST_SLICES and a.vocab // n <= MAX_EXTENT), fitting[0])


def _divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
