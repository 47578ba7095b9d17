"""The plan: the tensors and numbers behind each part of a model. No weight is copied.

A part's content (`Part.content`) is everything that decides its package, and nothing else. It depends neither on where
the bytes lie nor on the other parts. So a part survives a new commit that keeps its weights, and a new topology that
keeps its layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import cache, cached_property
from itertools import chain, cycle, islice, product, repeat
from math import prod
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, cast, get_args, get_origin, get_type_hints

from shardmill.checkpoint.headers import TensorInfo
from shardmill.errors import UnreadableError
from shardmill.files import read_json, write_json
from shardmill.models.architecture import (
    OF_TOWER,
    Architecture,
    Graph,
    LayerSpec,
    ModelDescription,
    Sources,
    TensorSource,
    blocks,
    cache_source,
)
from shardmill.models.caches import Shape
from shardmill.models.contract import BLOCK, LABEL_STEP, MODEL_NORM, GraphSpec, caches, window_slots
from shardmill.models.interface import DRAFT_PARTS, LABELS, TOWER, is_apart
from shardmill.models.layer_constants import role_in_layer
from shardmill.models.part_kinds import constants, encoder_spec, model_constants, table_constants, tower_spec
from shardmill.models.recurrences import written

if TYPE_CHECKING:  # a job that finds its work done reads a part, and no config
    from shardmill.config import Config
    from shardmill.forms.recipe import Recipe
    from shardmill.models.eagle3 import DrafterDescription

HOST_TABLE = "embedding"  # the name and the kind of the host's table
DRAFTER = "drafter."  # begins the path of a constant of the drafter
SLICED = ("lm_head.", "down_bias")  # a part has only its own rows of these constants
LARGE = 1 << 22  # elements; the portable engine expands smaller constants to fp32 (portable_coreml/run/stored.py)


@dataclass(frozen=True)
class Constant:
    """A constant of a program, or a block of a constant, and the bytes [start, end) of the file that holds it."""

    path: str  # of the constant, after models/contract.py
    source: TensorSource
    rows: tuple[int, int] | None  # of the source's tensor, [first, last); None for all
    file: str
    start: int
    end: int
    dtype: str
    stored: tuple[int, ...]  # shape of the stored tensor or rows
    sha256: str = ""
    at: tuple[int, int] = (0, 0)  # row and column of the constant where the block begins
    beside: tuple[Constant, ...] = ()  # the source's vectors

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the block's shape."""
        return self.source.block_shape(self.stored)

    @property
    def label(self) -> str:
        """Return a readable name of the bytes."""
        index = "" if self.source.index is None else f"[{self.source.index}]"
        rows = "" if self.rows is None else f"[{self.rows[0]}:{self.rows[1]}]"
        return f"{self.source.tensor}{index}{rows}"

    @property
    def info(self) -> TensorInfo:
        """Return only the place in the checkpoint."""
        return TensorInfo(self.label, self.file, self.start, self.end, self.dtype, self.stored)

    @property
    def content(self) -> tuple[Any, ...]:
        """Return what decides the constant, wherever it lies and whatever the checkpoint calls it."""
        how = asdict(replace(self.source, tensor="", index=None, plus="", by="", shape=None))
        return (self.path, self.at, self.dtype, self.stored, self.sha256, how, [one.content for one in self.beside])


@dataclass(frozen=True)
class Part:
    """One program or the host's embedding table.

    Its rows are experts of a layer, or rows of the LM head, or a token each for a label and the first ones again at
    the end. A part of layers counts layers in place of rows.
    """

    name: str
    spec: GraphSpec
    tensors: tuple[Constant, ...] = ()
    first: int = 0  # of its rows
    layer: int | None = None  # whose experts it has
    drafter: bool = False  # whether it belongs to the drafter, and not to the model's own chain

    @property
    def kind(self) -> str:
        """Return the kind of its graph."""
        return self.spec.kind

    @property
    def start(self) -> int:
        """Return its first layer, or its first row."""
        return self.spec.layers[0][0] if self.spec.layers else self.first

    @property
    def end(self) -> int:
        """Return the layer after its last one, or the row after its last one."""
        return self.start + (len(self.spec.layers) or self.spec.rows)

    @property
    def is_apart(self) -> bool:
        """Return whether a pass of the model leaves the part out."""
        return is_apart(self.name)

    @property
    def row_tokens(self) -> list[int]:
        """Return the token of each row of a part of kind "labels"."""
        return [tensor.rows[0] for tensor in self.tensors if tensor.path == "lm_head.weight" and tensor.rows]

    @property
    def content(self) -> dict[str, Any]:
        """Return what decides the package: everything but where the bytes lie, and the part's own name."""
        fields = asdict(self, dict_factory=written) | {"tensors": [tensor.content for tensor in self.tensors]}
        return {name: value for name, value in fields.items() if name not in ("name", "layer")}

    @cached_property
    def shapes(self) -> dict[str, Shape]:
        """Return the shapes of its constants by path; for the embedding, the shapes of the host's tables."""
        if self.kind == HOST_TABLE:
            return {tensor.path: tensor.shape for tensor in self.tensors}
        return constants(self.spec)

    def changed(self, **fields: Any) -> Part:
        """Return the part with other fields of its spec."""
        return replace(self, spec=replace(self.spec, **fields))

    def edges(self, layers: int) -> tuple[int, int]:
        """Return the layers of a model of `layers` layers before which the part reads the stream and writes it."""
        if self.layer is not None:
            return self.layer, self.layer + 1
        return (self.start, self.end) if self.spec.layers else (layers, layers)

    def edge(self, layer: int) -> str:
        """Return the reference step's name of a layer's inputs in the passes of an encoder's bucket."""
        return f"hidden_{self.spec.tokens}_{layer}"

    def in_model(self, path: str) -> str:
        """Return the constant's path in the model, as recipes use it: a group of experts counts its experts from 0.

        The paths of a drafter's constants begin with `drafter.`, of a tower's with `tower.`.
        """
        if self.kind == TOWER:
            return f"{OF_TOWER}{path}"
        if self.drafter:
            return f"{DRAFTER}{path}"
        if self.layer is None:
            return path
        group = self.spec.graph.experts.group if self.spec.graph.experts else 1
        return f"layers.{self.layer}.{role_in_layer(path, self.first // group)}"

    @property
    def named_shapes(self) -> dict[str, Shape]:
        """Return the shapes by the constants' paths in the model."""
        return {self.in_model(path): shape for path, shape in self.shapes.items()}

    def forms(self, recipe: Recipe) -> dict[str, str]:
        """Return the form of each matrix of the part, by the matrix' path in the program."""
        chosen = recipe.forms(self.named_shapes)
        return {path: chosen[name] for path in self.shapes if (name := self.in_model(path)) in chosen}

    @property
    def parameters(self) -> list[int]:
        """Return how many numbers each constant holds."""
        return list(map(prod, self.shapes.values()))


def load_part(path: Path) -> Part:
    """Return a part from its parts/P.json. Keys that the version which wrote it did not know have their defaults.

    Raises:
        UnreadableError: it can't be read, or holds what this version does not know.
    """
    fields = read_json(path)
    try:
        return cast(Part, _loaded(Part, fields if "spec" in fields else _with_spec(fields)))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise UnreadableError(
            f"{path}: another version of shardmill made it, or it was changed; build again to read it"
        ) from error


def _with_spec(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a part as they were written when its spec had no place of its own."""
    kind, start, end = fields["kind"], fields["start"], fields["end"]
    layers = [[start + i, layer] for i, layer in enumerate(fields["kinds"])]
    of_spec = {name: fields[name] for name in ("kind", "graph", "slots", "window_slots", "tokens")}
    of_spec |= {name: fields[name] for name in ("ends", "calls", "taps", "lent") if name in fields}
    of_part = {name: fields[name] for name in ("name", "tensors", "drafter") if name in fields}
    of_part["layer"] = fields["layer"] if kind == "experts" else None
    return of_part | {
        "spec": of_spec | {"layers": layers, "rows": 0 if layers else end - start},
        "first": 0 if layers else start,
    }


def _loaded(of: Any, value: Any) -> Any:
    """Return a value of JSON as the type that wrote it: JSON has lists for tuples, and objects for dataclasses."""
    if isinstance(of, UnionType):  # with None
        return None if value is None else _loaded(get_args(of)[0], value)
    if isinstance(of, type) and is_dataclass(of):
        types = _field_types(of)
        return of(**{name: _loaded(types[name], each) for name, each in value.items()})
    if get_origin(of) is tuple:
        inner = get_args(of)
        return tuple(map(_loaded, repeat(inner[0]) if inner[-1] is Ellipsis else inner, value))
    return value


@cache
def _field_types(of: Any) -> dict[str, Any]:
    return get_type_hints(of)


def write_part(path: Path, part: Part) -> None:
    """Write parts/P.json."""
    write_json(path, asdict(part, dict_factory=written))


def empty_parts(config: Config, a: Architecture, drafter: DrafterDescription | None = None) -> tuple[Part, ...]:
    """Return all parts without their tensors, in the order of the pass; then those apart, and the embedding.

    The host's table, the embedding, comes last.
    """

    def spec(kind: str, rows: int = 0, of: Architecture = a) -> GraphSpec:
        alone = replace(config.calls, adapters=0, contexts=())  # without caches or adapters
        return GraphSpec(kind, of.graph, rows=rows, tokens=config.tokens.max, calls=alone)

    def layers(start: int, end: int, of: Architecture = a, first: int = 0) -> GraphSpec:
        numbered = tuple(zip(range(first + start, first + end), of.kinds[start:end], strict=True))
        ring = window_slots(of.window, config.tokens.max, config.length)
        made = replace(spec("layers", of=of), layers=numbered, slots=config.length, window_slots=ring)
        adapters = config.calls.adapters if of is a else 0  # not a drafter's layers
        contexts = config.calls.contexts if any(made.slots_of(mask) == made.slots for mask in made.masks) else ()
        return replace(made, calls=replace(made.calls, adapters=adapters, contexts=contexts))

    table = Part(HOST_TABLE, GraphSpec(HOST_TABLE, a.graph, rows=a.vocab, tokens=config.tokens.max))
    if a.ends is not None:
        passes = zip(config.parts, product(config.sizes, config.ranges), strict=True)
        chains = (Part(name, replace(encoder_spec(a, *ends), tokens=size)) for name, (size, ends) in passes)
        return (*chains, table)
    parts: list[Part] = []
    for start, end in config.ranges:
        taps = tuple(sorted({tap for tap in drafter.taps if start < tap < end})) if drafter else ()
        made = replace(layers(start, end), taps=taps, lent=_lent(a.kinds, start, end))
        parts.append(Part(f"layers_{start:02d}_{end:02d}", made))
        size = a.graph.experts.count // config.groups if a.graph.experts and config.groups else 0
        for j in range(config.groups):
            parts.append(Part(f"experts_{end - 1:02d}_{j}", spec("experts", size), first=j * size, layer=end - 1))
    rows = a.vocab // config.slices
    parts += [Part(f"head_{j}", spec("head", rows), first=j * rows) for j in range(config.slices)]
    if count := len(config.program.labels):
        parts.append(Part(LABELS, spec(LABELS, -(-count // LABEL_STEP) * LABEL_STEP)))
    if drafter:
        of = drafter.model.architecture
        chain = layers(0, of.layers, of, a.layers if drafter.lent else 0)
        specs = (spec(*drafter.first, of), replace(chain, lent=drafter.lent), spec("head", of.vocab, of))
        parts += [Part(name, each, drafter=True) for name, each in zip(DRAFT_PARTS, specs, strict=True)]
    if config.tower and a.tower:
        parts += [Part(f"{TOWER}_{size}", tower_spec(a.tower, size)) for size in config.tower.sizes]
    return (*parts, table)


def _lent(kinds: Sequence[LayerSpec], start: int, end: int) -> tuple[tuple[int, LayerSpec], ...]:
    """Return the layers before `start` whose caches some of the layers [start, end) read, in order."""
    sources = {cache_source(tuple(enumerate(kinds)), i) for i in range(start, end)}
    return tuple((i, kinds[i]) for i in sorted(source for source in sources if source is not None and source < start))


def recurrent(graph: Graph, tokens: int, verify: int) -> dict[str, dict[str, int]]:
    """Return what the host needs of a model's recurrence, as model.json has it; nothing for a model without one.

    Args:
        graph: the model's.
        tokens: the most tokens of any pass.
        verify: the most tokens of a decode pass.
    """
    if not graph.recurrence:
        return {}
    settings = {"block": BLOCK, "taps": graph.recurrence.taps}
    return {"recurrent": settings | ({"narrow": verify} if tokens > BLOCK else {})}


def draft_parts(
    config: Config,
    model: ModelDescription,
    tensors: Mapping[str, TensorInfo],
    drafter: DrafterDescription | None = None,
    labels: Sequence[int] = (),
) -> tuple[Part, ...]:
    """Return all parts in the order of `empty_parts`; the tensors' sha256 are still empty.

    `labels` are the tokens of the config's `program.labels`.
    """
    sources = dict(model.sources)
    if drafter:
        sources |= {f"{DRAFTER}{path}": source for path, source in drafter.model.sources.items()}
        sources[f"{DRAFTER}{MODEL_NORM}.weight"] = model.sources["norm.weight"]

    def filled(part: Part) -> Part:
        shapes = table_constants(model.architecture) if part.kind == HOST_TABLE else part.shapes
        rows = [(part.start, part.end)]
        if part.kind == LABELS:
            rows = [(token, token + 1) for token in islice(cycle(labels), part.end)]
        constants = [_drafted(part, path, shape, sources, tensors, rows) for path, shape in shapes.items()]
        return replace(part, tensors=tuple(chain(*constants)))

    return tuple(map(filled, empty_parts(config, model.architecture, drafter)))


def _drafted(
    part: Part,
    path: str,
    shape: Shape,
    sources: Mapping[str, Sources],
    tensors: Mapping[str, TensorInfo],
    part_rows: Sequence[tuple[int, int]],
) -> Iterator[Constant]:
    """Yield a constant's blocks; of a SLICED constant, the part's rows, [first, last) each."""
    down, across = 0, 0
    spans = part_rows if path.startswith(SLICED) else (None,)
    for source, rows in product(blocks(sources[part.in_model(path)]), spans):
        beside = tuple(
            _placed(path, TensorSource(name), tensors[name], None) for name in (source.plus, source.by) if name
        )
        info = tensors[source.tensor]
        if part.kind == HOST_TABLE:  # whose rows may be pieces of the tensor's rows
            info = replace(info, shape=shape)
        if part.kind == TOWER and len(info.shape) > len(shape):  # a convolution's kernel is a patch's column
            info = replace(info, shape=shape)
        block = replace(_placed(path, source, info, rows), at=(down, across), beside=beside)
        yield block
        if len(block.shape) == 1 or block.shape[1] == shape[-1]:
            down += block.shape[0]
        else:
            across += block.shape[1]


def _placed(path: str, source: TensorSource, info: TensorInfo, rows: tuple[int, int] | None) -> Constant:
    """Return a block whose bytes are some rows of a tensor, one matrix of a stack, or the whole tensor."""
    if rows is None and source.index is None:
        return Constant(path, source, None, info.file, info.start, info.end, info.dtype, info.shape)
    first, last = rows or (source.index or 0, (source.index or 0) + 1)
    size = (info.end - info.start) // info.shape[0]  # bytes of a row, or of a matrix
    start, end = info.start + first * size, info.start + last * size
    stored = (last - first, *info.shape[1:]) if rows else source.read_shape(info.shape)
    return Constant(path, source, rows, info.file, start, end, info.dtype, stored)


def tensor_shapes(model: ModelDescription) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the checkpoint must have."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, shape in model_constants(model.architecture).items():
        for source in blocks(model.sources[path]):
            shapes[source.tensor] = source.shape or shape
            shapes |= {name: shape[-1:] for name in (source.plus, source.by) if name}
    return shapes


def drafter_shapes(config: Config, a: Architecture, drafter: DrafterDescription) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the checkpoint of a drafter for a model must have."""
    shapes = {path: shape for p in empty_parts(config, a, drafter) if p.drafter for path, shape in p.shapes.items()}
    sources = drafter.model.sources
    return {one.tensor: one.shape or shape for path, shape in shapes.items() for one in blocks(sources.get(path, ()))}


def with_hashes(parts: Sequence[Part], hashes: Mapping[str, str]) -> tuple[Part, ...]:
    """Return the parts with every tensor's sha256 filled in, from a mapping by their labels."""
    return tuple(replace(part, tensors=_hashed(part.tensors, hashes)) for part in parts)


def _hashed(tensors: Sequence[Constant], hashes: Mapping[str, str]) -> tuple[Constant, ...]:
    return tuple(replace(t, sha256=hashes[t.label], beside=_hashed(t.beside, hashes)) for t in tensors)


def every_tensor(parts: Iterable[Part]) -> Iterator[Constant]:
    """Yield every tensor that the parts read from the checkpoint."""
    for tensor in (tensor for part in parts for tensor in part.tensors):
        yield from (tensor, *tensor.beside)


def part_sizes(part: Part, numbers: Sequence[int]) -> dict[str, int]:
    """Return the size of a part whose constants hold these numbers of elements.

    It counts the elements of all constants, of the largest constant, of the constants that the engine expands, and of
    the caches in all contexts. A program's functions share what is expanded. A context's functions share its caches.
    """
    expanded = sum(n for n in numbers if n < LARGE)
    forms = (replace(part.spec, slots=slots) for slots in (*part.spec.calls.contexts, part.spec.slots))
    cached = sum(prod(shape) for form in forms for shape in caches(form).values())
    return {"parameters": sum(numbers), "largest_tensor": max(numbers), "expanded": expanded, "cached": cached}
