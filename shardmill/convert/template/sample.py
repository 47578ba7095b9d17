"""Sample programs: forms converted by coremltools at widths so small that their weights cost nothing.

Only the hidden and FFN widths (a head's rows) shrink: what shapes attention stays as it is, so the graph is that of the
part. Samples depend on the graph's numbers, never on a weight, and may be kept in a cache folder shared by all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.convert.template.cache import shared
from shardmill.convert.template.pattern import FIRST
from shardmill.convert.template.program import Role, Sample, Tables, Template, fit_template, places, roles
from shardmill.models.architecture import Graph, Kind
from shardmill.models.contract import constants
from shardmill.plan import Part

# Primes, so that no number is a multiple of two of them. Not under 10: smaller arrays are not kept in the weight file.
PRIMES = tuple(n for n in range(37, 300) if all(n % d for d in range(2, 18)))


def template(part: Part, quantization: str, cache: Path | None) -> Template:
    """The template of the part's form: from this process, or the cache folder, or coremltools."""
    graph = shrunk(part.graph, {"hidden": 0, "ffn": 0})
    bare = replace(part, name="sample", start=0, end=0, graph=graph, kinds=distinct(part), tensors=())
    return known_template(bare, part.kind == "head" or part.end - part.start == 1, quantization, cache)


def distinct(part: Part) -> tuple[Kind, ...]:
    """The kinds of a part's layers, each once, in an order of their own."""
    return tuple(sorted(set(part.kinds), key=lambda kind: repr(asdict(kind))))


def order(part: Part) -> list[int]:
    """The kind of each of a part's layers as an index into `distinct`; a head counts as one layer."""
    known = distinct(part)
    return [known.index(kind) for kind in part.kinds] or [0]


def widths(part: Part) -> dict[str, int]:
    """The part's own widths."""
    return {"hidden": part.graph.hidden, "ffn": part.graph.ffn, "rows": part.end - part.start}


def shrunk(graph: Graph, small: Mapping[str, int]) -> Graph:
    """The graph at other widths."""
    return replace(graph, hidden=small["hidden"], ffn=small["ffn"])


@lru_cache(maxsize=8)
def known_template(bare: Part, single: bool, quantization: str, cache: Path | None) -> Template:
    """The template of a form: a part without widths and tensors, whose `kinds` are each kind that it may hold.

    Args:
        bare: the form.
        single: whether programs have one layer, which is the first and the last; else they have two or more.
        quantization: "int8" or "fp16".
        cache: where samples are kept, or None.
    """
    tables: Tables = tuple(kind.rope for kind in bare.kinds) or (None,)
    chosen = [(0,), (0,)] if single else sample_orders(tables)
    small = [dict(zip(("hidden", "ffn", "rows"), PRIMES[3 * i : 3 * i + 3], strict=True)) for i in range(len(chosen))]

    def make() -> list[bytes]:
        return [convert(bare, order, w, quantization) for order, w in zip(chosen, small, strict=True)]

    wanted = asdict(bare) | {"quantization": quantization, "orders": chosen}
    specs = shared(cache, wanted, make) if cache else make()
    samples = [Sample(parse(s), order, tables, w) for s, order, w in zip(specs, chosen, small, strict=True)]
    return fit_template(samples)


@lru_cache(maxsize=8)
def sample_orders(tables: Tables) -> list[tuple[int, ...]]:
    """Sequences of all the kinds, few and short, that tell apart everything that a layer's numbers depend on.

    Args:
        tables: the rotary table of each kind.
    """
    kinds = len(tables)
    longest = max(4, kinds + 1 + len({table for table in tables if table}))
    candidates = [o for n in range(2, longest + 1) for o in product(range(kinds), repeat=n) if len(set(o)) == kinds]
    chosen: list[tuple[int, ...]] = []
    while (rank := known(chosen, tables)) < known(candidates, tables):
        chosen.append(max(candidates, key=lambda found: ((known([*chosen, found], tables) - rank) / len(found), found)))
    return chosen


def known(orders: list[tuple[int, ...]], tables: Tables) -> int:
    """How many independent things sequences of kinds tell of the layers of every role."""
    rows: dict[Role, list[tuple[int, ...]]] = {}
    for found in orders:
        for role, place in zip(roles(found, tables), places(found, tables, 0, {}), strict=True):
            rows.setdefault(role, []).append(place.counts)
    return sum(int(np.linalg.matrix_rank(np.asarray(counts))) for counts in rows.values())


def convert(bare: Part, order: tuple[int, ...], small: Mapping[str, int], quantization: str) -> bytes:
    """A sample's protobuf, by the plain conversion of layers of the given kinds, or of a head."""
    import torch

    from shardmill.convert import package, trace

    start, end = (0, small["rows"]) if bare.kind == "head" else (FIRST, FIRST + len(order))
    kinds = tuple(bare.kinds[kind] for kind in order) if bare.kinds else ()
    part = replace(bare, start=start, end=end, kinds=kinds, graph=shrunk(bare.graph, small))
    random = torch.Generator().manual_seed(0)  # like weights would be merged by coremltools
    weights = {path: torch.rand(shape, generator=random) + 0.5 for path, shape in constants(part.form).items()}
    spec = trace.convert(part, weights, quantization).get_spec()
    spec.description.metadata.userDefined.pop(package.VARYING, None)
    return bytes(spec.SerializeToString(deterministic=True))


def parse(content: bytes) -> Any:
    """The protobuf of a sample."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(content)
    return spec
