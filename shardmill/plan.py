"""The plan: which tensors and which numbers each part of a model is made from. No weight is copied.

A part's content (`Part.content`) is all that decides its package, and nothing else: neither where the bytes lie nor
what the other parts are, so a part survives a new commit that keeps its weights, and a new topology that keeps its
layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.checkpoint.headers import TensorInfo
from shardmill.files import write_json
from shardmill.models.architecture import Architecture, Ends, Graph, Kind, Model, Source
from shardmill.models.contract import (
    Form,
    T,
    constants,
    inputs,
    model_constants,
    output,
    states,
    table_constants,
    window_slots,
)

if TYPE_CHECKING:  # a job that finds its work done reads a part, and no config
    from shardmill.config import Config

LARGE = 1 << 22  # elements; the portable engine expands smaller constants to fp32 (portable_coreml/run/stored.py)


@dataclass(frozen=True)
class Tensor:
    """A constant of a program, and the bytes [start, end) of a checkpoint's file that it is made from."""

    path: str  # of the constant, after models/contract.py
    source: Source
    rows: tuple[int, int] | None  # of the source's tensor, [first, last); None for all
    file: str
    start: int
    end: int
    dtype: str
    stored: tuple[int, ...]  # shape of those bytes
    sha256: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The constant's shape."""
        return self.stored if self.source.column is None else self.stored[:1]

    @property
    def label(self) -> str:
        """What a person calls the bytes."""
        return self.source.tensor if self.rows is None else f"{self.source.tensor}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def info(self) -> TensorInfo:
        """The place alone."""
        return TensorInfo(self.label, self.file, self.start, self.end, self.dtype, self.stored)

    @property
    def content(self) -> tuple[Any, ...]:
        """What decides the constant, wherever it lies and whatever the checkpoint calls it."""
        source = self.source
        return (self.path, self.dtype, self.stored, self.sha256, source.add, source.times, source.column)


@dataclass(frozen=True)
class Part:
    """One program: layers [start, end), or LM-head rows [start, end), or the embedding table (rows [start, end)).

    An encoder's programs hold all layers each.
    """

    name: str
    kind: str  # "layers", "head", "encoder" or "embedding"
    start: int
    end: int
    slots: int  # S
    window_slots: int  # W, see models/contract.py
    tokens: int  # upper bound of T; of an encoder, T
    graph: Graph
    kinds: tuple[Kind, ...]  # of its layers
    tensors: tuple[Tensor, ...]
    ends: Ends | None = None  # of an encoder

    @property
    def form(self) -> Form:
        """What the graph contract says of it."""
        if self.kind in ("layers", "encoder"):
            layers = tuple(zip(range(self.start, self.end), self.kinds, strict=True))
            return Form(self.kind, self.graph, layers, self.slots, self.window_slots, ends=self.ends)
        return Form(self.kind, self.graph, rows=self.end - self.start)

    @property
    def content(self) -> dict[str, Any]:
        """What decides the package: everything but where the bytes lie, and the part's own name."""
        fields = asdict(self) | {"tensors": [tensor.content for tensor in self.tensors]}
        del fields["name"]
        return fields

    @property
    def parameters(self) -> list[int]:
        """How many numbers each constant holds."""
        return [prod(tensor.shape) for tensor in self.tensors]

    def weight_bytes(self, quantization: str) -> int:
        """Bytes of the part's weights once converted, scales and alignment left out. The host's table is fp16."""
        matrix = 1 if quantization == "int8" and self.kind != "embedding" else 2
        return sum(prod(t.shape) * (matrix if len(t.shape) == 2 else 2) for t in self.tensors)


def load_part(path: Path) -> Part:
    """A part from its parts/P.json."""
    import json

    fields = json.loads(path.read_text())
    kinds = tuple(Kind(**kind) for kind in fields["kinds"])
    tensors = tuple(map(_loaded, fields["tensors"]))
    ends = Ends(**fields["ends"]) if fields["ends"] else None
    return Part(**fields | {"graph": Graph(**fields["graph"]), "kinds": kinds, "tensors": tensors, "ends": ends})


def _loaded(fields: dict[str, Any]) -> Tensor:
    source = fields["source"]
    shape = tuple(source["shape"]) if source["shape"] else None
    rows = tuple(fields["rows"]) if fields["rows"] else None
    return Tensor(
        **fields | {"source": Source(**source | {"shape": shape}), "rows": rows, "stored": tuple(fields["stored"])}
    )


def write_part(path: Path, part: Part) -> None:
    """Writes parts/P.json."""
    write_json(path, asdict(part))


def empty_parts(config: Config, a: Architecture) -> tuple[Part, ...]:
    """All parts in the order of the pass, the embedding last, without their tensors."""

    def part(name: str, kind: str, start: int, end: int, slots: int = 0) -> Part:
        kinds = a.kinds[start:end] if kind == "layers" else ()
        ring = window_slots(a.window, config.tokens.max, slots) if slots else 0
        return Part(name, kind, start, end, slots, ring, config.tokens.max, a.graph, kinds, ())

    if a.ends is not None:
        programs = [
            Part(name, "encoder", 0, a.layers, 0, 0, size, a.graph, a.kinds, (), a.ends)
            for name, size in zip(config.parts, config.sizes, strict=True)
        ]
        return (*programs, part("embedding", "embedding", 0, a.vocab))
    parts = [
        part(name, "layers", start, end, config.length)
        for name, (start, end) in zip(config.parts, config.ranges, strict=False)
    ]
    rows = a.vocab // config.slices
    parts += [part(f"head_{j}", "head", j * rows, (j + 1) * rows) for j in range(config.slices)]
    return (*parts, part("embedding", "embedding", 0, a.vocab))


def draft_parts(config: Config, model: Model, tensors: Mapping[str, TensorInfo]) -> tuple[Part, ...]:
    """All parts in the order of the pass, the embedding last; the tensors' sha256 are still empty."""

    def filled(part: Part) -> Part:
        rows = (part.start, part.end) if part.kind == "head" else None
        paths = table_constants(model.architecture) if part.kind == "embedding" else constants(part.form)
        return replace(part, tensors=tuple(_drafted(path, model, tensors, rows) for path in paths))

    return tuple(map(filled, empty_parts(config, model.architecture)))


def _drafted(path: str, model: Model, tensors: Mapping[str, TensorInfo], rows: tuple[int, int] | None) -> Tensor:
    """A constant's tensor. Args: rows those of the LM head that the part holds; its other constants are whole."""
    source = model.sources[path]
    info = tensors[source.tensor]
    if rows is None or path != "lm_head.weight":
        return Tensor(path, source, None, info.file, info.start, info.end, info.dtype, info.shape)
    first, last = rows
    size = (info.end - info.start) // info.shape[0]  # bytes of a row
    start, end = info.start + first * size, info.start + last * size
    return Tensor(path, source, rows, info.file, start, end, info.dtype, (last - first, *info.shape[1:]))


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Names and shapes of every tensor that the checkpoint must have."""
    wanted = model_constants(model.architecture)
    return {model.sources[path].tensor: model.sources[path].shape or shape for path, shape in wanted.items()}


def with_hashes(parts: Sequence[Part], hashes: Mapping[str, str]) -> tuple[Part, ...]:
    """The parts with every tensor's sha256 filled in, from a mapping by their labels."""
    return tuple(replace(p, tensors=tuple(replace(t, sha256=hashes[t.label]) for t in p.tensors)) for p in parts)


def plan_json(config: Config, model: Model, parts: Sequence[Part]) -> dict[str, Any]:
    """plan.json: the chosen topology with its byte budget, and what the host needs to know of the model."""
    rows = [
        {
            "name": p.name,
            "kind": p.kind,
            "start": p.start,
            "end": p.end,
            **interface(p),
            "weight_bytes": p.weight_bytes(config.convert.weights),
            "parameters": sum(p.parameters),
            "largest_tensor": max(p.parameters),
            "expanded": sum(n for n in p.parameters if n < LARGE),
        }
        for p in parts
    ]
    return {
        "model": config.model,
        "kind": config.kind,
        "context": config.length,
        "tokens_max": config.tokens.max,
        "widths": list(config.widths),
        "buckets": list(config.sizes),
        "pooling": config.pooling,
        **{key: getattr(model.architecture, key) for key in ("task", "labels", "band", "reach")},
        "tables": {path: model.sources[path].tensor for path in table_constants(model.architecture)},
        "architecture": asdict(model.architecture) | {"layers": model.architecture.layers},
        "prefix": model.prefix,
        "conv_taps": model.architecture.graph.conv_taps,
        "rope": {name: asdict(rope) for name, rope in model.architecture.ropes.items()},
        "window": model.architecture.window,
        "window_slots": window_slots(model.architecture.window, config.tokens.max, config.length),
        "parts": rows,
    }


def interface(part: Part) -> dict[str, Any]:
    """What goes into a part's program, what it keeps and what comes out; "T" stands for the token axis."""
    if part.kind == "embedding":
        return {}
    form = part.form
    named = {name: ["T" if extent == T else extent for extent in shape] for name, shape in inputs(form).items()}
    return {"inputs": named, "states": {name: list(s) for name, s in states(form).items()}, "output": output(form)}
