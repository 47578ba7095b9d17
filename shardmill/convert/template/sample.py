"""Sample programs: a kind of part converted by coremltools at widths so small that its weights cost nothing.

Only the hidden and FFN widths (a head's rows) shrink: what shapes attention stays as it is, so the graph is that of the
part. Samples depend on the graph's numbers, never on a weight, and may be kept in a cache folder shared by all models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardmill.convert.template.cache import shared
from shardmill.convert.template.pattern import FIRST
from shardmill.convert.template.program import Sample, Template, fit_template
from shardmill.models import family
from shardmill.models.architecture import Graph
from shardmill.plan import Part

# Primes, so that no number is a multiple of two of them. Not under 10: smaller arrays are not kept in the weight file.
WIDTHS = ({"hidden": 37, "ffn": 53, "rows": 67}, {"hidden": 41, "ffn": 59, "rows": 71})


def template(part: Part, quantization: str, cache: Path | None) -> Template:
    """The template of the part's kind: from this process, or the cache folder, or coremltools."""
    kind = replace(part, name="sample", start=0, end=min(part.end - part.start, 2), tensors=())
    if part.kind == "head":
        kind = replace(kind, end=1)
    return known_template(replace(kind, graph=shrunk(part.graph, {"hidden": 0, "ffn": 0})), quantization, cache)


def widths(part: Part) -> dict[str, int]:
    """The part's own widths."""
    return {"hidden": part.graph.hidden, "ffn": part.graph.ffn, "rows": part.end - part.start}


def shrunk(graph: Graph, small: Mapping[str, int]) -> Graph:
    """The graph at other widths."""
    return replace(graph, hidden=small["hidden"], ffn=small["ffn"])


@lru_cache(maxsize=8)
def known_template(kind: Part, quantization: str, cache: Path | None) -> Template:
    """The template of a kind: a part without widths and tensors, of one layer or of two, which stand for any more."""
    layers = (3, 4) if kind.end > 1 else (1, 1)

    def make() -> list[bytes]:
        return [convert(kind, n, w, quantization) for n, w in zip(layers, WIDTHS, strict=True)]

    specs = shared(cache, asdict(kind) | {"quantization": quantization}, make) if cache else make()
    a, b = (Sample(parse(s), n, w) for s, n, w in zip(specs, layers, WIDTHS, strict=True))
    return fit_template(a, b)


def convert(kind: Part, layers: int, small: Mapping[str, int], quantization: str) -> bytes:
    """A sample's protobuf, by the plain conversion of `layers` layers or of a head."""
    import torch

    from shardmill.convert import package, trace

    graph = shrunk(kind.graph, small)
    start, end = (0, small["rows"]) if kind.kind == "head" else (FIRST, FIRST + layers)
    part = replace(kind, start=start, end=end, graph=graph)
    random = torch.Generator().manual_seed(0)  # like weights would be merged by coremltools
    weights = {name: torch.rand(shape, generator=random) + 0.5 for name, shape in tensor_shapes(part).items()}
    spec = trace.convert(part, weights, quantization).get_spec()
    spec.description.metadata.userDefined.pop(package.VARYING, None)
    return bytes(spec.SerializeToString(deterministic=True))


def tensor_shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a part is made from."""
    if part.kind == "head":
        return {"norm": (part.graph.hidden,), "head": (part.end - part.start, part.graph.hidden)}
    models = family(part.graph.model_type)
    return {n: s for i in range(part.start, part.end) for n, s in models.layer_tensor_shapes(part.graph, i).items()}


def parse(content: bytes) -> Any:
    """The protobuf of a sample."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(content)
    return spec
