"""Towers as data: what turns an image's patches, or a sound's frames, into rows of the decoder's width.

A tower is a part of kind "tower". Its layers are those of any model (models/blocks.py), and its tokens are patches,
which see one another. What is peculiar stands before and after the layers, in `TowerIO`. One program of a bucket of T
patches serves every image of up to T patches: a patch's numbers, its position and its rotary rows are inputs, and a
mask hides what fills the bucket up. The order of patches does not matter to the layers. So the host lays the patches
that become one row side by side, and a connector is then a few projections of neighbours.

The inputs, for a bucket of T patches:

    x                   [1, column, T, 1]          the numbers of each patch
    positions           [1, places, T, 1]          for each patch, the weights of the rows of the table of positions
    rope_cos, rope_sin  [T, head_dim / 2]
    key_mask            [1, 1, 1, T]               0, and -1e4 for what fills the bucket up
    hidden              [1, width, T / merged, 1]  the output: rows in the place of embedding rows

A tower for sounds has chunks of frames in the place of patches, and three convolutions make r tokens of a chunk. A
bucket of n chunks has T = n r tokens. Other inputs than above are:

    x                   [n, 1, bins, frames]       log-mel numbers
    positions           [1, layers' width, 1, r]   what is added to the tokens of each chunk
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardmill.models.architecture import Graph, LayerSpec, Sources
from shardmill.models.caches import Shape
from shardmill.models.layer_constants import layer_constants, norm_constants
from shardmill.models.mixers import projection_constants

if TYPE_CHECKING:
    from shardmill.models.contract import GraphSpec

COLOURS = 3
KEY_MASK = "key_mask"
TABLE = "position_table"
CONVOLUTIONS = ("conv1", "conv2", "conv3")


@dataclass(frozen=True)
class Step:
    """A projection of the merged rows, with the activation after it; or, without rows, a norm before the next."""

    name: str
    rows: int = 0
    bias: bool = True
    activation: str = ""
    eps: float = 0.0  # of a norm; 0: as in the layers


@dataclass(frozen=True)
class Convolutions:
    """Three convolutions of 3 x 3 with steps of two, each with an activation: the numbers of a chunk of a sound."""

    bins: int  # of a frame
    frames: int  # of a chunk
    channels: int  # of each convolution

    @property
    def height(self) -> int:
        """Return what is left of the bins."""
        return thrice_halved(self.bins)

    @property
    def tokens(self) -> int:
        """Return the tokens of a chunk."""
        return thrice_halved(self.frames)


def thrice_halved(count: int) -> int:
    """Return what three steps of two leave of a count."""
    for _ in range(3):
        count = (count + 1) // 2
    return count


@dataclass(frozen=True)
class TowerIO:
    """What stands before and after a tower's layers, in the order of a pass."""

    column: int  # numbers of a patch, or of a token after the convolutions
    places: int = 0  # rows of the table of positions; 0 without a table
    patch_bias: bool = True
    merged: int = 1  # neighbouring patches that become one row, their channels side by side
    connector: tuple[Step, ...] = ()
    convolutions: Convolutions | None = None  # before the layers of a tower for sounds

    def tokens(self, size: int) -> int:
        """Return the tokens of a bucket, given its patches or frames."""
        sound = self.convolutions
        return size // sound.frames * sound.tokens if sound else size

    @property
    def width(self) -> int:
        """Return the channels of a row."""
        return next(step.rows for step in reversed(self.connector) if step.rows)


@dataclass(frozen=True)
class TowerArchitecture:
    """A whole tower.

    Attributes:
        graph: the options of the layers.
        layers: how many there are, all of one kind.
        io: what stands around them.
        turned: whether heads are turned by a patch's row and column.
        host: what the host needs to make the inputs, as model.json has it under `tower`.
    """

    graph: Graph
    layers: int
    io: TowerIO
    turned: bool = False
    host: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[tuple[int, LayerSpec], ...]:
        """Return the layers by their index."""
        kind = LayerSpec(mask=KEY_MASK) if self.turned else LayerSpec(mask=KEY_MASK, rope=None)
        return tuple((i, kind) for i in range(self.layers))


@dataclass(frozen=True)
class TowerDescription:
    """A tower and its checkpoint: `sources` maps the path of every constant in the program to the checkpoint's tensors.

    The names of tensors are the whole model's, also where the decoder's have a prefix.
    """

    architecture: TowerArchitecture
    sources: Mapping[str, Sources]
    others: Mapping[str, Sources] = field(default_factory=dict)  # take the place of `sources` that a checkpoint lacks


def inputs_of_tower(spec: GraphSpec) -> dict[str, Shape]:
    """Return the inputs of a tower's program by name, in order."""
    io, patches = spec.tower, spec.tokens
    assert io is not None
    turned = any(kind.rope for _, kind in spec.layers)
    if sound := io.convolutions:
        return {
            "x": (patches // sound.tokens, 1, sound.bins, sound.frames),
            "positions": (1, spec.graph.hidden, 1, sound.tokens),
            KEY_MASK: (1, 1, 1, patches),
        }
    return {
        "x": (1, io.column, patches, 1),
        **({"positions": (1, io.places, patches, 1)} if io.places else {}),
        **(dict.fromkeys(("rope_cos", "rope_sin"), (patches, spec.graph.rope_dim // 2)) if turned else {}),
        KEY_MASK: (1, 1, 1, patches),
    }


def constants_of_tower(spec: GraphSpec) -> dict[str, Shape]:
    """Return the weights of a tower's program by path, in order; the table of positions stays in fp16."""
    io, g = spec.tower, spec.graph
    assert io is not None
    shapes: dict[str, Shape] = {}
    if sound := io.convolutions:
        for name, columns in zip(CONVOLUTIONS, (1, sound.channels, sound.channels), strict=True):
            shapes |= projection_constants(name, sound.channels, columns * 9, True)
    shapes |= projection_constants("patch", g.hidden, io.column, io.patch_bias)
    shapes |= {TABLE: (1, g.hidden, io.places)} if io.places else {}
    for i, kind in spec.layers:
        shapes |= {f"layers.{i}.{role}": shape for role, shape in layer_constants(g, kind).items()}
    shapes |= norm_constants("norm", g)
    width = g.hidden * io.merged
    for step in io.connector:
        if step.rows:
            shapes |= projection_constants(step.name, step.rows, width, step.bias)
            width = step.rows
        else:
            shapes |= {f"{step.name}.{name}": (width,) for name in ("weight", *(["bias"] if step.bias else []))}
    return shapes
