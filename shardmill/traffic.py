"""The bytes of a build's weights, and what passes read: with experts dense or routed, and in each context.

For a model with experts, what passes call and read is worked out both ways: with all experts in the layers' programs,
and with groups of them as programs of their own. It follows from the plan's numbers and one assumption: that each token
takes any set of experts as likely as any other, whatever the other tokens of the pass take. A trained router comes
close to that on the whole, since it was trained to; on a single text it may not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import comb, prod

from shardmill.config import Config
from shardmill.forms.form import matrices
from shardmill.forms.recipe import Recipe
from shardmill.models.architecture import Architecture, Experts, with_experts
from shardmill.models.contract import cache_bytes
from shardmill.plan import Part, empty_parts
from shardmill.topology import file_bytes, misfits, proposed


@dataclass(frozen=True)
class Pass:
    """A pass of so many tokens, as is to be expected of one."""

    experts: str  # "dense" or "routed"
    groups: int  # of a layer's experts, each a program; 0 where they are dense
    tokens: int
    dispatches: float  # programs that are called
    bytes: int  # of weights and states that are read


@dataclass(frozen=True)
class StoredWeights:
    """What weights take as they are planned to be stored.

    Attributes:
        bits_per_weight: what a number of the weight files takes on average, with scales, tables and padding.
        bytes_by_form: of the numbers in each form with their scales or tables; padding left out.
    """

    bits_per_weight: float
    bytes_by_form: Mapping[str, int]


@dataclass(frozen=True)
class Length:
    """A pass of one token in a context of so many slots, whichever of them are filled.

    Attributes:
        slots: of keys and values.
        kept: bytes of all that is kept from pass to pass.
        bytes: of that and of the weights, which a pass reads; of experts as many as are to be expected.
        operations: multiplications and additions with matrices, and of attention with keys and values.
    """

    slots: int
    kept: int
    bytes: int
    operations: int


def stored_weights(parts: Sequence[Part], chosen: Recipe) -> StoredWeights:
    """The weights that a pass reads where it takes every program, as it does unless experts are routed.

    Args:
        parts: all of a plan; of an encoder, a pass takes one program, and all of them hold the same.
        chosen: the form of each matrix.
    """
    programs = [part for part in parts if part.kind != "embedding"]
    read = programs[:1] if programs[0].kind == "encoder" else programs
    sizes: Counter[str] = Counter()
    for part in read:
        sizes.update(chosen.bytes_by_form(part.named_shapes))
    files, numbers = sum(file_bytes(part.named_shapes, chosen) for part in read), sum(sum(p.parameters) for p in read)
    return StoredWeights(round(8 * files / numbers, 3), dict(sorted(sizes.items())))


def passes(config: Config, a: Architecture) -> tuple[Pass, ...]:
    """A pass of every width in both forms, that of the config and the other as the plan would choose it.

    Nothing for a model without experts, for an encoder, and in a form that the model can't have.
    """
    return tuple(_passes(config, a)) if a.graph.experts is not None and a.ends is None else ()


def _passes(config: Config, a: Architecture) -> Iterator[Pass]:
    own = "dense" if config.experts == "dense" else "routed"
    for form in ("dense", "routed"):
        wanted = config if form == own else replace(config, experts=form, topology="auto")
        built = with_experts(a, routed=form == "routed")
        if misfits(wanted, built):
            continue
        chosen = proposed(wanted, built)
        parts = [part for part in empty_parts(chosen, built) if part.kind != "embedding"]
        for tokens in config.widths:
            called = [1.0 if part.kind != "experts" else _share(part, tokens) for part in parts]
            read = sum(share * _bytes(part, config) for share, part in zip(called, parts, strict=True))
            yield Pass(form, chosen.groups, tokens, sum(called), round(read))


def lengths(config: Config, a: Architecture) -> tuple[Length, ...]:
    """The whole context after all shorter ones; nothing for a model without shorter ones."""
    if not config.program.contexts:
        return ()
    parts = [part for part in empty_parts(proposed(config, a), a) if part.kind != "embedding"]
    return tuple(_length(slots, parts, config) for slots in (*config.program.contexts, config.length))


def _length(slots: int, parts: Sequence[Part], config: Config) -> Length:
    placed = [replace(part, slots=slots) for part in parts]
    share = {part.name: _share(part, 1) if part.kind == "experts" else 1.0 for part in placed}
    kept = sum(cache_bytes(part.blueprint) for part in placed)
    read = sum(share[part.name] * _bytes(part, config) for part in placed)
    operations = sum(share[part.name] * _operations(part) for part in placed)
    return Length(slots, kept, round(read), round(operations))


def _operations(part: Part) -> int:
    """Two for each number of a matrix, and for each of a key and of a value in every slot and head."""
    program, numbers = part.blueprint, sum(map(prod, matrices(part.shapes).values()))
    seen = sum(program.kept(kind.mask) for _, kind in program.layers if kind.mixer != "conv")
    return 2 * (numbers + 2 * seen * part.graph.heads * part.graph.head_dim)


def _share(part: Part, tokens: int) -> float:
    """Of how many passes some token takes one of a part's experts."""
    assert part.graph.experts is not None
    return 1 - missed(part.graph.experts, part.end - part.start) ** tokens


def missed(e: Experts, count: int) -> float:
    """The probability that a token takes none of `count` experts."""
    return comb(e.classes - count, e.chosen) / comb(e.classes, e.chosen)


def _bytes(part: Part, config: Config) -> int:
    """Of a part's weights and states."""
    return file_bytes(part.named_shapes, config.convert.recipe) + cache_bytes(part.blueprint)
