"""Traffic: the bytes and operations of a pass, worked out from a topology."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, prod

from shardmill.config import Config
from shardmill.forms.form import matrices
from shardmill.forms.recipe import Recipe
from shardmill.models.architecture import Architecture, Experts, with_experts
from shardmill.models.caches import CacheKind, cache_kind
from shardmill.models.contract import cache_bytes, caches
from shardmill.plan import HOST_TABLE, Part, empty_parts
from shardmill.topology import misfits, proposed
from shardmill.weight_files import file_bytes


@dataclass(frozen=True)
class PassTraffic:
    """The expected traffic of a pass of `tokens` tokens."""

    experts: str  # "dense" or "routed"
    groups: int  # of a layer's experts, each a program; 0 where they are dense
    tokens: int
    dispatches: float  # programs that are called
    bytes: int  # of weights and states that are read


@dataclass(frozen=True)
class WeightSizes:
    """The size of the weights in the planned forms.

    Attributes:
        bits_per_weight: the average bits of a number in the weight files, with scales, tables and padding.
        bytes_by_form: bytes of the numbers in each form with their scales or tables, without padding.
    """

    bits_per_weight: float
    bytes_by_form: Mapping[str, int]


@dataclass(frozen=True)
class TrafficLength:
    """The traffic of a pass of one token in a context of `slots` slots, however many slots are filled.

    Attributes:
        slots: the number of slots of keys and values.
        kept: bytes of the caches that are kept from pass to pass.
        bytes: bytes of caches and weights that a pass reads; experts count by the probability that they are called.
        operations: multiplications and additions with matrices, and in attention with keys and values.
    """

    slots: int
    kept: int
    bytes: int
    operations: int


def stored_weights(parts: Sequence[Part], chosen: Recipe) -> WeightSizes:
    """Return the weights that a pass reads if it calls every program, as it does unless experts are routed.

    Args:
        parts: all parts of a plan. A pass of an encoder calls the programs of one bucket; all buckets' hold the same.
        chosen: the form of each matrix.
    """
    programs = [part for part in parts if part.kind != HOST_TABLE]
    read = [part for part in programs if part.spec.tokens == programs[0].spec.tokens or not part.spec.encodes]
    sizes: Counter[str] = Counter()
    for part in read:
        sizes.update(chosen.bytes_by_form(part.named_shapes))
    files, numbers = sum(file_bytes(part.named_shapes, chosen) for part in read), sum(sum(p.parameters) for p in read)
    return WeightSizes(round(8 * files / numbers, 3), dict(sorted(sizes.items())))


def pass_traffic(config: Config, a: Architecture) -> tuple[PassTraffic, ...]:
    """Return a pass of every width with dense and with routed experts; the form not in the config has topology `auto`.

    Empty for a model without experts and for an encoder. A form that the model can't have is left out.
    """
    return tuple(_passes(config, a)) if a.graph.experts is not None and a.ends is None else ()


def _passes(config: Config, a: Architecture) -> Iterator[PassTraffic]:
    configured = "dense" if config.experts == "dense" else "routed"
    for kind in ("dense", "routed"):
        wanted = config if kind == configured else replace(config, experts=kind, topology="auto")
        built = with_experts(a, routed=kind == "routed")
        if misfits(wanted, built):
            continue
        chosen = proposed(wanted, built)
        parts = [part for part in empty_parts(chosen, built)[:-1] if not part.is_apart]  # the last one is a table
        for tokens in config.widths:
            called = [_share(part, tokens) for part in parts]
            read = sum(share * _bytes(part, config) for share, part in zip(called, parts, strict=True))
            yield PassTraffic(kind, chosen.groups, tokens, sum(called), round(read))


def traffic_lengths(config: Config, a: Architecture) -> tuple[TrafficLength, ...]:
    """Return the traffic of each shorter context, then of the whole context; empty without shorter contexts."""
    if not config.program.contexts:
        return ()
    parts = [part for part in empty_parts(proposed(config, a), a)[:-1] if not part.is_apart]  # the last one is a table
    return tuple(_length(slots, parts, config) for slots in (*config.program.contexts, config.length))


def _length(slots: int, parts: Sequence[Part], config: Config) -> TrafficLength:
    placed = [part.changed(slots=slots) for part in parts]
    share = {part.name: _share(part, 1) for part in placed}
    cached = sum(cache_bytes(part.spec) for part in placed)
    read = sum(share[part.name] * _bytes(part, config) for part in placed)
    operations = sum(share[part.name] * _operations(part) for part in placed)
    return TrafficLength(slots, cached, round(read), round(operations))


def _operations(part: Part) -> int:
    """Return two operations for each element of a matrix, and of a key and a value in every slot and head.

    A recurrence multiplies its state four times: for the block that is folded and for the tokens, by keys and queries.
    """
    program, numbers = part.spec, sum(map(prod, matrices(part.shapes).values()))
    attending = [kind for _, kind in program.layers if kind.attends]
    recurring = sum(prod(shape) for name, shape in caches(program).items() if cache_kind(name) is CacheKind.STATE)
    seen = sum(program.slots_of(kind.mask) * part.spec.graph.of(kind).head_dim for kind in attending)
    return 2 * (numbers + 2 * seen * part.spec.graph.heads + 4 * recurring)


def _share(part: Part, tokens: int) -> float:
    """Return the probability that a pass calls a part: that some token takes one of its experts, or 1."""
    if part.layer is None or part.spec.graph.experts is None:
        return 1.0
    return 1 - missed(part.spec.graph.experts, part.end - part.start) ** tokens


def missed(e: Experts, count: int) -> float:
    """Return the probability that a token takes none of `count` experts."""
    return comb(e.classes - count, e.chosen) / comb(e.classes, e.chosen)


def _bytes(part: Part, config: Config) -> int:
    """Return the bytes of a part's weights and states."""
    return file_bytes(part.named_shapes, config.convert.recipe) + cache_bytes(part.spec)
