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
from shardmill.models.architecture import Architecture, Graph, Names

if TYPE_CHECKING:  # a job that finds its work done reads a part, and no config
    from shardmill.config import Config

# One file of weights may not exceed this on the Neural Engine (rule W1, coremltools PR 2593).
WEIGHT_FILE_LIMIT = 2**31


@dataclass(frozen=True)
class Tensor:
    """A tensor, or rows [first, last) of one, as bytes [start, end) of a checkpoint file."""

    name: str
    file: str
    start: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def info(self) -> TensorInfo:
        """The place alone."""
        return TensorInfo(self.name, self.file, self.start, self.end, self.dtype, self.shape)


@dataclass(frozen=True)
class Part:
    """One program: layers [start, end), or LM-head rows [start, end), or the embedding table (rows [start, end))."""

    name: str
    kind: str  # "layers", "head" or "embedding"
    start: int
    end: int
    slots: int  # S
    tokens: int  # upper bound of T
    graph: Graph
    tensors: tuple[Tensor, ...]

    @property
    def content(self) -> dict[str, Any]:
        """What decides the package: everything but where the bytes lie, and the part's own name."""
        fields = asdict(self) | {"tensors": [(t.name, t.dtype, t.shape, t.sha256) for t in self.tensors]}
        del fields["name"]
        return fields

    @property
    def parameters(self) -> list[int]:
        """How many numbers each tensor holds."""
        return [prod(tensor.shape) for tensor in self.tensors]

    def weight_bytes(self, quantization: str) -> int:
        """Bytes of the part's weights once converted, scales and alignment left out. The host's table is fp16."""
        matrix = 1 if quantization == "int8" and self.kind != "embedding" else 2
        return sum(prod(t.shape) * (matrix if len(t.shape) == 2 else 2) for t in self.tensors)


def load_part(path: Path) -> Part:
    """A part from its parts/P.json."""
    import json

    fields = json.loads(path.read_text())
    tensors = tuple(Tensor(**t | {"shape": tuple(t["shape"])}) for t in fields["tensors"])
    return Part(**fields | {"graph": Graph(**fields["graph"]), "tensors": tensors})


def write_part(path: Path, part: Part) -> None:
    """Writes parts/P.json."""
    write_json(path, asdict(part))


def draft_parts(config: Config, a: Architecture, tensors: Mapping[str, TensorInfo], names: Names) -> tuple[Part, ...]:
    """All parts in the order of the pass, the embedding last; the tensors' sha256 are still empty."""

    def part(name: str, kind: str, start: int, end: int, slots: int, chosen: Sequence[Tensor]) -> Part:
        return Part(name, kind, start, end, slots, config.tokens.max, a.graph, tuple(chosen))

    parts = [
        part(name, "layers", start, end, config.context, [whole(tensors[n]) for n in names.layers(start, end)])
        for name, (start, end) in zip(config.parts, config.topology, strict=False)
    ]
    rows = a.vocab // config.head.slices
    for j in range(config.head.slices):
        first, last = j * rows, (j + 1) * rows
        chosen = [whole(tensors[names.final_norm]), slice_rows(tensors[names.head], first, last)]
        parts.append(part(f"head_{j}", "head", first, last, 0, chosen))
    parts.append(part("embedding", "embedding", 0, a.vocab, 0, [whole(tensors[names.embedding])]))
    return tuple(parts)


def whole(info: TensorInfo) -> Tensor:
    """All of a tensor."""
    return Tensor(info.name, info.file, info.start, info.end, info.dtype, info.shape, "")


def slice_rows(info: TensorInfo, first: int, last: int) -> Tensor:
    """Rows [first, last) of a tensor of [rows, columns]: a contiguous range of bytes."""
    row = (info.end - info.start) // info.shape[0]
    name = f"{info.name}[{first}:{last}]"
    shape = (last - first, *info.shape[1:])
    return Tensor(name, info.file, info.start + first * row, info.start + last * row, info.dtype, shape, "")


def with_hashes(parts: Sequence[Part], hashes: Mapping[str, str]) -> tuple[Part, ...]:
    """The parts with every tensor's sha256 filled in, from a mapping by tensor name."""
    return tuple(replace(p, tensors=tuple(replace(t, sha256=hashes[t.name]) for t in p.tensors)) for p in parts)


def plan_json(config: Config, a: Architecture, parts: Sequence[Part]) -> dict[str, Any]:
    """plan.json: the chosen topology with its byte budget, and what the host needs to know of the model."""
    rows = [
        {
            "name": p.name,
            "kind": p.kind,
            "start": p.start,
            "end": p.end,
            "weight_bytes": p.weight_bytes(config.convert.weights),
            "parameters": sum(p.parameters),
            "largest_tensor": max(p.parameters),
        }
        for p in parts
    ]
    return {
        "model": config.model,
        "context": config.context,
        "tokens_max": config.tokens.max,
        "widths": list(config.widths),
        "architecture": asdict(a),
        "parts": rows,
        "weight_file_limit": WEIGHT_FILE_LIMIT,
    }
