"""A config as a whole, and what follows from it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, StrictInt, Tag
from pydantic.dataclasses import dataclass

from shardmill.config.convert import Convert
from shardmill.config.sections import STRICT, Auto, Benchmark, Head, Index, Parity, Program, Source, Tokens, alternative
from shardmill.errors import ConfigError
from shardmill.forms.form import INT4, INT8
from shardmill.forms.recipe import SEARCH
from shardmill.models import DECODER, ENCODER
from shardmill.models.calls import Calls, calls
from shardmill.pydantic_errors import GIVEN, NAMED

Layers = Annotated[tuple[Index, Index], Field(description="Half-open range of layers: [first, last + 1].")]
BUCKETS = (128, 512)  # of an encoder whose config leaves them open
POINTS = ("chosen", INT4, INT8)  # sets of forms that are measured whatever the front is
VERIFY = 8  # tokens of a decode pass where a config does not say, see docs/benchmarks.md#how-wide-a-pass-verifies


def _method(value: object) -> str:
    return NAMED if isinstance(value, str) else GIVEN


def _measured(value: object) -> str:
    return NAMED if isinstance(value, bool) else GIVEN


# One that is left open is settled by what the model's config.json says, see shardmill.pipeline.settle.
Topology = Annotated[
    Annotated[tuple[Layers, ...], Field(min_length=1), Tag(GIVEN)] | Annotated[Auto, Tag("auto")],
    Discriminator(alternative),
]
Experts = Annotated[
    Annotated[StrictInt, Field(ge=1), Tag(GIVEN)] | Annotated[Literal["dense", "routed"], Tag(NAMED)],
    Discriminator(_method),
]
Measured = Annotated[
    Annotated[Benchmark, Tag(GIVEN)]
    | Annotated[Literal[False], Tag(NAMED), Field(description="Without the benchmark: the report says not run.")],
    Discriminator(_measured),
]
Sizes = Annotated[
    Annotated[tuple[Annotated[StrictInt, Field(ge=1, le=8192)], ...], Field(min_length=1), Tag(GIVEN)]
    | Annotated[Auto, Tag("auto")],
    Discriminator(alternative),
]


@dataclass(frozen=True, config=STRICT)
class Config:
    """One model to build."""

    model: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$", description="Name of the folder under build/.")]
    source: Source
    context: Annotated[
        Annotated[StrictInt, Field(ge=8)] | None, Field(description="Key/value slots S of a decoder.")
    ] = None
    buckets: Annotated[
        Sizes | None, Field(description="Tokens of each of an encoder's programs; auto: 128 and 512.")
    ] = None
    pooling: Annotated[
        Literal["mean", "cls"], Field(description="What an embedding is made of: all tokens' rows, or the first.")
    ] = "mean"
    topology: Annotated[
        Topology, Field(description="Layers of each part, in order; auto: as few parts as fit, of even size.")
    ] = "auto"
    experts: Annotated[
        Experts,
        Field(
            description="dense: all of a layer's experts run in its program; routed: groups of them are programs of "
            "their own, which the host calls for tokens that take them; a number: routed, in so many groups a layer."
        ),
    ] = "dense"
    tokens: Tokens = Tokens()
    program: Program = Program()
    head: Head = Head()
    convert: Convert = Convert()
    parity: Parity = Parity()
    witness: Annotated[
        bool, Field(description="Whether Apple's Core AI runtime computes every part too; needs the extra `coreai`.")
    ] = False
    benchmark: Measured = Benchmark()

    @property
    def kind(self) -> str:
        """What the model is built as."""
        return DECODER if self.buckets is None else ENCODER

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each of an encoder's programs, ascending; none for a decoder."""
        return BUCKETS if self.buckets == "auto" else tuple(sorted(self.buckets or ()))

    @property
    def length(self) -> int:
        """How many positions of the model programs deal with: a decoder's slots, or an encoder's longest text."""
        return self.context or max(self.sizes)

    @property
    def is_settled(self) -> bool:
        """Whether neither topology, groups of experts nor head slices are left open; an encoder has none of them."""
        open_ones = "auto" in (self.topology, self.head.slices) or self.experts == "routed"
        return self.kind == ENCODER or not open_ones

    @property
    def groups(self) -> int:
        """How many programs hold the experts of a layer, once that is settled; 0 where they run in the layer's own."""
        if self.experts == "routed":
            raise ConfigError("experts: routed is not settled yet")
        return 0 if self.experts == "dense" else self.experts

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The topology, once it is settled."""
        if self.topology == "auto":
            raise ConfigError("topology: auto is not settled yet")
        return self.topology

    @property
    def slices(self) -> int:
        """The number of head slices, once it is settled."""
        if self.head.slices == "auto":
            raise ConfigError("head.slices: auto is not settled yet")
        return self.head.slices

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of all parts, in the order in which a pass runs them; an encoder's pass runs one of them."""
        if self.kind == ENCODER:
            return tuple(f"encoder_{size}" for size in self.sizes)
        found: list[str] = []
        for start, end in self.ranges:
            found.append(f"layers_{start:02d}_{end:02d}")
            found += [f"experts_{end - 1:02d}_{j}" for j in range(self.groups)]
        return (*found, *(f"head_{j}" for j in range(self.slices)))

    @property
    def points(self) -> tuple[str, ...]:
        """Names of the sets of forms that are measured beside each other for the report."""
        if self.convert.precision != SEARCH or not self.convert.search.measured:
            return ()
        return (*POINTS, *(f"front_{i + 1}" for i in range(self.convert.search.measured)))

    @property
    def verify(self) -> int:
        """The most tokens of a decode pass."""
        return self.tokens.verify or min(VERIFY, self.tokens.max)

    @property
    def widths(self) -> tuple[int, ...]:
        """Token counts that a runtime uses, ascending: each costs a specialisation per process."""
        return tuple(sorted({1, self.verify, self.tokens.max}))

    @property
    def calls(self) -> Calls:
        """How a decoder's programs take passes."""
        return calls(self.program.shapes, self.program.state, self.widths, self.program.contexts)
