"""The rules by which a picture becomes columns of numbers and a piece of the prompt. They are data of a build.

A model's family decides the numbers; nothing here knows a family. `media/processors.py` reads a checkpoint's rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Filter = Literal["bilinear", "bicubic", "lanczos"]
Colour = tuple[float, float, float]  # red, green, blue


@dataclass(frozen=True)
class Area:
    """Sides are rounded to whole rows of the model, and scaled if the pixels are not between two numbers."""

    least: int
    most: int


@dataclass(frozen=True)
class Tiles:
    """The longer side becomes `longest`; the picture is cut into squares of `tile` pixels, and shown whole as one more.

    No side gets longer than `bound`.
    """

    longest: int
    tile: int
    bound: int


@dataclass(frozen=True)
class Split:
    """Pictures are sized as by `Area`. One of more than `large` pixels is cut into squares first, and shown whole, too.

    There are `fewest` to `many` squares of `tile` pixels, in rows and columns whose shape is nearest to the picture's.
    """

    least: int
    most: int
    large: float
    tile: int
    fewest: int
    many: int


@dataclass(frozen=True)
class Fixed:
    """Every picture gets this size, whatever its shape."""

    width: int
    height: int


@dataclass(frozen=True)
class Within:
    """Sides longer than `longest` shrink together; then each is rounded up to whole rows of the model."""

    longest: int


@dataclass(frozen=True)
class Budget:
    """The picture is scaled to the largest size that takes at most `patches` patches."""

    patches: int


Size = Area | Tiles | Split | Fixed | Within | Budget
SIZES: dict[str, type[Size]] = {
    "area": Area,
    "tiles": Tiles,
    "split": Split,
    "fixed": Fixed,
    "within": Within,
    "budget": Budget,
}


@dataclass(frozen=True)
class Placeholder:
    """The text that takes the place of a picture in a prompt.

    Attributes:
        mark: what the chat template writes for a picture, and this text replaces.
        row: the text of the token that stands for each row that the tower gives.
        before, after: texts around the whole.
        tile: before the rows of each tile; {row} and {column} count from 1.
        tile_row_end: after the last tile of each row of tiles.
        tiles_end: after all tiles.
        whole: before the rows of the whole picture.
        beside: the same, only if there are tiles.
        line_break: between the lines of a view's rows; empty: they follow one another.
    """

    mark: str
    row: str
    before: str = ""
    after: str = ""
    tile: str = ""
    tile_row_end: str = ""
    tiles_end: str = ""
    whole: str = ""
    beside: str = ""
    line_break: str = ""


@dataclass(frozen=True)
class ImageRules:
    """How a picture becomes views, a view becomes columns, and both become text.

    Attributes:
        patch: pixels of a patch's side.
        merge: patches, in each direction, whose features become one row of the model.
        filter: the filter by which pictures are resized.
        scale, mean, std: a level v of a colour becomes (v * scale - mean) / std.
        size: the rule for the size.
        text: the text that takes a picture's place.
    """

    patch: int
    merge: int
    filter: Filter
    scale: float
    mean: Colour
    std: Colour
    size: Size
    text: Placeholder

    @property
    def side(self) -> int:
        """Return the pixels, in each direction, that become one row of the model."""
        return self.patch * self.merge

    def written(self) -> dict[str, Any]:
        """Return the rules as JSON; `read_image_rules` is the way back."""
        (name,) = (name for name, kind in SIZES.items() if isinstance(self.size, kind))
        text = {key: value for key, value in asdict(self.text).items() if value}
        more = {"mean": [*self.mean], "std": [*self.std], "size": {"rule": name, **asdict(self.size)}, "text": text}
        return asdict(self) | more


def read_image_rules(content: Mapping[str, Any]) -> ImageRules:
    """Return the rules that `ImageRules.written` gave.

    Raises:
        KeyError, TypeError: if it is something else.
    """
    size, mean, std = dict(content["size"]), content["mean"], content["std"]
    more = {
        "size": SIZES[size.pop("rule")](**size),
        "text": Placeholder(**content["text"]),
        "mean": (mean[0], mean[1], mean[2]),
        "std": (std[0], std[1], std[2]),
    }
    return ImageRules(**{**content, **more})
