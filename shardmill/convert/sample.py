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

from shardmill.convert.package import neutralize, parse_spec
from shardmill.convert.placing import clear_inline
from shardmill.convert.stacks import stack_inputs
from shardmill.convert.template import INDEX, Sample, Template, compose, fit
from shardmill.files import digest, load_json, write_json
from shardmill.models.architecture import Graph, LayerSpec
from shardmill.models.contract import traced_inputs
from shardmill.models.interface import FIXED, LABELS, EntryPoints
from shardmill.models.part_constants import constants
from shardmill.plan import Part

# Primes, so that no number is a multiple of two widths. Not under 10: smaller arrays are not in the weight file.
WIDTHS = (
    {"hidden": 37, "ffn": 53, "rows": 67, "expert": 61},
    {"hidden": 41, "ffn": 59, "rows": 71, "expert": 73},
)
COUNTED = ("experts", "fuse", "join")  # kinds of parts whose graph depends on how many experts or taps they have, say


def program(part: Part, quantization: str, cache: Path | None) -> Any:
    """Return the Model_pb2.Model of a part, composed from templates; its weights have no place yet.

    Args:
        part: layers, experts, a head, an encoder or a drafter's projection.
        quantization: "int8" or "fp16".
        cache: a folder in which samples are kept between processes, or None.

    Raises:
        StampError: for a graph that can't be stamped.
    """
    # coremltools optimises across the layers of an encoder, which is therefore converted whole.
    sources = {i: part.blueprint.source(i) for i, kind in part.blueprint.layers if kind.shares}
    units = [part.kinds]
    if part.kind == "layers":  # a layer that reads the cache of another is sampled after such a layer
        kinds = dict((*part.blueprint.lent, *part.blueprint.layers))
        read = {i: kinds[source] for i, source in sources.items()}
        units = [(read[i], kind) if i in read else (kind,) for i, kind in part.blueprint.layers]
    of_kind = {unit: template(bare(part, unit), quantization, cache) for unit in {*units}}
    if part.kind == "layers" and not part.lent:
        of_kind |= {unit: of_kind[unit].second() for unit in of_kind if len(unit) > 1}
    names, chosen = list(traced_inputs(part.blueprint)), [of_kind[unit] for unit in units]
    spec = compose(chosen, part.start, names, _widths(part), sources, part.taps)
    stack_inputs(spec, part.blueprint)
    return spec


def bare(part: Part, kinds: tuple[LayerSpec, ...]) -> Part:
    """Return the part without its place, widths and tensors: a sample of layers of `kinds` depends on nothing else.

    If the part reads lent caches, the first of the `kinds` lends.
    """
    lent = ((INDEX, kinds[0]),) if part.lent else ()
    graph = _shrunk(part.graph, {"hidden": 0, "ffn": 0, "expert": 0})
    count = part.end - part.start if part.kind in COUNTED else 0
    calls = (
        part.calls if part.calls.shapes == FIXED else EntryPoints(state=part.calls.state, adapters=part.calls.adapters)
    )
    kind = "head" if part.kind == LABELS else part.kind  # a program for labels is sampled like any head
    nowhere = replace(part, name="sample", kind=kind, start=0, end=count, layer=0, taps=(), drafter=False)
    return replace(nowhere, graph=graph, kinds=kinds[len(lent) :], tensors=(), calls=calls, lent=lent)


def _widths(part: Part) -> dict[str, int]:
    """Return the widths of the part."""
    g = part.graph
    found = {"hidden": g.hidden, "ffn": g.ffn, "expert": g.experts.ffn if g.experts else 0}
    return found | ({"rows": part.end - part.start} if part.kind in ("head", LABELS) else {})


def _shrunk(graph: Graph, small: Mapping[str, int]) -> Graph:
    """Return the graph at other widths."""
    experts = replace(graph.experts, ffn=small["expert"]) if graph.experts else None
    return replace(graph, hidden=small["hidden"], ffn=small["ffn"], experts=experts)


@lru_cache(maxsize=8)
def template(sampled: Part, quantization: str, cache: Path | None) -> Template:
    """Return the template of a kind of layer: from this process, or the cache folder, or coremltools.

    Args:
        sampled: a part without widths and tensors.
        quantization: "int8" or "fp16".
        cache: where samples are kept, or None.
    """

    def make() -> list[bytes]:
        return [convert_sample(sampled, small, quantization) for small in WIDTHS]

    specs = shared(cache, asdict(sampled) | {"quantization": quantization}, make) if cache else make()
    routed = sampled.graph.experts.count if sampled.graph.experts and sampled.graph.experts.routed else 0
    # After the channels of the residual stream lie a router's state, the weights of experts, or both.
    joined = 2 * sampled.end if sampled.kind == "join" else 0  # or, before them, an embedding and a hidden state
    beside = (sampled.graph.carry, routed, sampled.graph.carry + routed, joined)
    names = _widths(sampled)
    a, b = (
        Sample(parse_spec(spec), {name: small[name] for name in names}, beside)
        for spec, small in zip(specs, WIDTHS, strict=True)
    )
    return fit(a, b)


def convert_sample(sampled: Part, small: Mapping[str, int], quantization: str) -> bytes:
    """Convert a sample by coremltools: a layer, a head, a group of experts or an encoder; return the protobuf."""
    import torch

    from shardmill.convert import trace

    ends = {"head": (0, small["rows"]), **dict.fromkeys(COUNTED, (0, sampled.end))}
    first = INDEX + len(sampled.lent)
    start, end = ends.get(sampled.kind, (first, first + len(sampled.kinds)))
    part = replace(sampled, start=start, end=end, graph=_shrunk(sampled.graph, small))
    random = torch.Generator().manual_seed(0)  # coremltools would merge equal weights
    weights = {path: torch.rand(shape, generator=random) + 0.5 for path, shape in constants(part.blueprint).items()}
    spec = trace.convert(part, weights, quantization)
    clear_inline(spec, part)
    neutralize(spec)
    return bytes(spec.SerializeToString(deterministic=True))


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
        with _locked(file.with_suffix(".lock")):
            specs = read_sample(file)
            if specs is None:
                specs = make()
                content = {"sha256": _checksum(specs), "samples": [b64encode(spec).decode() for spec in specs]}
                write_json(file, content)
    return specs


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock that ends with its process, and wait for it as long as it takes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def read_sample(file: Path) -> list[bytes] | None:
    """Return the samples in a file; None if the file is missing or damaged."""
    try:
        content = load_json(file)
        specs = [b64decode(sample) for sample in content["samples"]]
        return specs if content["sha256"] == _checksum(specs) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checksum(specs: list[bytes]) -> str:
    """Return sha256 of samples, to show whether they are whole."""
    return hashlib.sha256(b"".join(hashlib.sha256(spec).digest() for spec in specs)).hexdigest()
