"""Sample programs: a form converted by coremltools at widths so small that its weights cost nothing.

Only the widths of the residual stream, of MLPs and of experts (a head's rows) shrink: what shapes attention stays as it
is, so the graph is that of the part. Samples depend on the graph's numbers, never on a weight, and may be kept in a
cache folder shared by all models.
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
from shardmill.models.architecture import Graph
from shardmill.models.contract import constants
from shardmill.plan import Part

# Primes, so that no number is a multiple of two of them. Not under 10: smaller arrays are not kept in the weight file.
WIDTHS = (
    {"hidden": 37, "ffn": 53, "rows": 67, "expert": 61},
    {"hidden": 41, "ffn": 59, "rows": 71, "expert": 73},
)


def template(part: Part, quantization: str, cache: Path | None) -> Template:
    """The template of the part's form: from this process, or the cache folder, or coremltools."""
    alike = stretches(part) > 1
    graph, kinds = _shrunk(part.graph, {"hidden": 0, "ffn": 0, "expert": 0}), part.kinds[:1] if alike else part.kinds
    bare = replace(part, name="sample", start=0, end=0, graph=graph, kinds=kinds, tensors=())
    return known_template(bare, alike, quantization, cache)


def stretches(part: Part) -> int:
    """Of how many stretches the part's program consists: of one for each layer if all are alike, else of a single one.

    A head has one, too, and so has an encoder, which has something before its layers and after them.
    """
    return len(part.kinds) if len(set(part.kinds)) == 1 and part.kind != "encoder" else 1


def _is_alike(part: Part) -> bool:
    """Whether a part consists of several stretches."""
    return stretches(part) > 1


def widths(part: Part) -> dict[str, int]:
    """The part's own widths."""
    g = part.graph
    return {
        "hidden": g.hidden,
        "ffn": g.ffn,
        "rows": part.end - part.start,
        "expert": g.experts.ffn if g.experts else 0,
    }


def _shrunk(graph: Graph, small: Mapping[str, int]) -> Graph:
    """The graph at other widths."""
    experts = replace(graph.experts, ffn=small["expert"]) if graph.experts else None
    return replace(graph, hidden=small["hidden"], ffn=small["ffn"], experts=experts)


@lru_cache(maxsize=8)
def known_template(bare: Part, alike: bool, quantization: str, cache: Path | None) -> Template:
    """The template of a form.

    Args:
        bare: a part without widths and tensors.
        alike: whether its kinds, of which there is one, stand for any number of layers from two on.
        quantization: "int8" or "fp16".
        cache: where samples are kept, or None.
    """
    counts = (3, 4) if alike else (1, 1)

    def make() -> list[bytes]:
        return [convert(bare, n, small, quantization) for n, small in zip(counts, WIDTHS, strict=True)]

    wanted = asdict(bare) | {"alike": alike, "quantization": quantization}
    specs = shared(cache, wanted, make) if cache else make()
    carry = bare.graph.carry
    a, b = (Sample(parse(spec), n, small, carry) for spec, n, small in zip(specs, counts, WIDTHS, strict=True))
    return fit_template(a, b)


def convert(bare: Part, times: int, small: Mapping[str, int], quantization: str) -> bytes:
    """A sample's protobuf, by coremltools' conversion of a form's layers, so many times in a row, or of a head."""
    import torch

    from shardmill.convert import package, trace

    kinds = bare.kinds * times
    start, end = (0, small["rows"]) if bare.kind == "head" else (FIRST, FIRST + len(kinds))
    part = replace(bare, start=start, end=end, kinds=kinds, graph=_shrunk(bare.graph, small))
    random = torch.Generator().manual_seed(0)  # like weights would be merged by coremltools
    weights = {path: torch.rand(shape, generator=random) + 0.5 for path, shape in constants(part.form).items()}
    spec = trace.convert_quickly(part, weights, quantization)
    spec.description.metadata.userDefined.pop(package.VARYING, None)
    return bytes(spec.SerializeToString(deterministic=True))


def parse(content: bytes) -> Any:
    """The protobuf of a sample."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(content)
    return spec
