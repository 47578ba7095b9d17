"""Sample programs: layers converted by coremltools at widths so small that their weights cost nothing.

Only the widths of the residual stream, of MLPs and of experts (and a head's rows) shrink. The sizes of attention do
not shrink, so the sample has the part's graph. Samples depend on the graph's numbers, never on a weight, and may be
kept in a cache folder shared by all models.
"""

from __future__ import annotations

import fcntl
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardmill.convert.normal import has_normal_form
from shardmill.convert.template.kinds import LayerTemplate, compose, fit_layer
from shardmill.convert.template.pattern import FIRST, Sample, Template, fit_template
from shardmill.files import digest, load_json, write_json
from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import constants, inputs
from shardmill.models.interface import FIXED, EntryPoints
from shardmill.plan import Part


def shared(cache: Path, kind: Any, make: Callable[[], list[bytes]]) -> list[bytes]:
    """Return the samples of a kind, from the cache or from `make`.

    Args:
        cache: a folder for samples that the present tools make.
        kind: the kind, as plain data.
        make: makes the samples if the cache lacks them.
    """
    file = cache / f"{digest(kind)}.json"
    specs = read_sample(file)
    if specs is None:
        with locked(file.with_suffix(".lock")):
            specs = read_sample(file)
            if specs is None:
                specs = make()
                _write_sample(file, specs)
    return specs


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that ends with its process, and wait for it as long as it takes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _write_sample(file: Path, specs: list[bytes]) -> None:
    """Write samples to the cache, with a sha256 that shows whether they are whole."""
    content = {"sha256": _checksum(specs), "samples": [b64encode(spec).decode() for spec in specs]}
    write_json(file, content)


def read_sample(file: Path) -> list[bytes] | None:
    """Return the samples in a file; None if the file is missing or damaged."""
    try:
        content = load_json(file)
        specs = [b64decode(sample) for sample in content["samples"]]
        return specs if content["sha256"] == _checksum(specs) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(specs: list[bytes]) -> str:
    """Return sha256 of samples."""
    return hashlib.sha256(b"".join(hashlib.sha256(spec).digest() for spec in specs)).hexdigest()


# Primes, so that no number is a multiple of two widths. Not under 10: smaller arrays are not in the weight file.
WIDTHS = (
    {"hidden": 37, "ffn": 53, "rows": 67, "expert": 61},
    {"hidden": 41, "ffn": 59, "rows": 71, "expert": 73},
)


def program(part: Part, quantization: str, cache: Path | None) -> Any:
    """Return the Model_pb2.Model of a part, composed from templates; its weights have no place yet.

    Args:
        part: layers, experts, a head or an encoder.
        quantization: "int8" or "fp16".
        cache: a folder in which samples are kept between processes, or None.

    Raises:
        StampError: for a graph that can't be stamped.
    """
    if not has_normal_form(part):
        start = part.start if part.kind in ("layers", "encoder") else 0
        return template(part, quantization, cache).compose(start, stretches(part), sample_widths(part))
    of_kind = {kind: layer_template(_bare(part, (kind,)), quantization, cache) for kind in set(part.kinds)}
    return compose(
        [of_kind[kind] for kind in part.kinds], part.start, list(inputs(part.blueprint)), sample_widths(part)
    )


def template(part: Part, quantization: str, cache: Path | None) -> Template:
    """Return the template of parts like this one: from this process, or the cache folder, or coremltools."""
    kinds = part.kinds[:1] if part.kind == "layers" else part.kinds
    return known_template(_bare(part, kinds), stretches(part) > 1, quantization, cache)


def stretches(part: Part) -> int:
    """Return the number of stretches in a program that is not in normal form: one for each layer.

    A head, experts and an encoder are one stretch each: an encoder has operations before and after its layers.
    """
    return len(part.kinds) if part.kind == "layers" else 1


def _bare(part: Part, kinds: tuple[LayerSpec, ...]) -> Part:
    """Return the part without its place, widths and tensors: a sample of layers of `kinds` depends on nothing else."""
    graph = _shrunk(part.graph, {"hidden": 0, "ffn": 0, "expert": 0})
    count = part.end - part.start if part.kind == "experts" else 0  # the number of experts decides the graph
    calls = part.calls if part.calls.shapes == FIXED else EntryPoints(state=part.calls.state)
    return replace(part, name="sample", start=0, end=count, layer=0, graph=graph, kinds=kinds, tensors=(), calls=calls)


def sample_widths(part: Part) -> dict[str, int]:
    """Return the widths of the part."""
    g = part.graph
    found = {"hidden": g.hidden, "ffn": g.ffn, "expert": g.experts.ffn if g.experts else 0}
    return found | ({"rows": part.end - part.start} if part.kind == "head" else {})


def _shrunk(graph: Graph, small: Mapping[str, int]) -> Graph:
    """Return the graph at other widths."""
    experts = replace(graph.experts, ffn=small["expert"]) if graph.experts else None
    return replace(graph, hidden=small["hidden"], ffn=small["ffn"], experts=experts)


@lru_cache(maxsize=8)
def known_template(bare: Part, alike: bool, quantization: str, cache: Path | None) -> Template:
    """Return the template of a kind of part.

    Args:
        bare: a part without widths and tensors.
        alike: whether the template is for any number of layers from two on, instead of one stretch.
        quantization: "int8" or "fp16".
        cache: where samples are kept, or None.
    """
    return fit_template(*_samples(bare, (3, 4) if alike else (1, 1), quantization, cache))


@lru_cache(maxsize=8)
def layer_template(bare: Part, quantization: str, cache: Path | None) -> LayerTemplate:
    """Return the template of a kind of layer, like `known_template`."""
    return fit_layer(*_samples(bare, (1, 1), quantization, cache))


def _samples(bare: Part, counts: tuple[int, int], quantization: str, cache: Path | None) -> tuple[Sample, Sample]:
    """Return two samples of `counts` layers and of different widths."""

    def make() -> list[bytes]:
        return [convert_sample(bare, n, small, quantization) for n, small in zip(counts, WIDTHS, strict=True)]

    wanted = asdict(bare) | {"counts": counts, "quantization": quantization}
    specs = shared(cache, wanted, make) if cache else make()
    a, b = (
        Sample(parse(spec), n, {name: small[name] for name in sample_widths(bare)}, _beside(bare.graph))
        for spec, n, small in zip(specs, counts, WIDTHS, strict=True)
    )
    return a, b


def _beside(graph: Graph) -> tuple[int, ...]:
    """Return how many channels may lie after the channels of the residual stream.

    They hold a router's state, the weights of experts, or both.
    """
    routed = graph.experts.count if graph.experts and graph.experts.routed else 0
    return graph.carry, routed, graph.carry + routed


def convert_sample(bare: Part, times: int, small: Mapping[str, int], quantization: str) -> bytes:
    """Convert a sample by coremltools: the part's layers, repeated in a row, or its head; return the protobuf."""
    import torch

    from shardmill.convert import package, trace
    from shardmill.convert.placing import clear_inline

    kinds = bare.kinds * times
    start, end = {"head": (0, small["rows"]), "experts": (0, bare.end)}.get(bare.kind, (FIRST, FIRST + len(kinds)))
    part = replace(bare, start=start, end=end, kinds=kinds, graph=_shrunk(bare.graph, small))
    random = torch.Generator().manual_seed(0)  # coremltools would merge equal weights
    weights = {path: torch.rand(shape, generator=random) + 0.5 for path, shape in constants(part.blueprint).items()}
    spec = trace.convert_quickly(part, weights, quantization)
    clear_inline(spec, part)
    spec.description.metadata.userDefined.pop(package.VARYING, None)
    return bytes(spec.SerializeToString(deterministic=True))


def parse(content: bytes) -> Any:
    """Return the protobuf of a sample."""
    from coremltools.proto import Model_pb2

    spec = Model_pb2.Model()
    spec.ParseFromString(content)
    return spec
