"""How large a picture becomes, in which views the model sees it, and the text that stands for it: by its size alone.

The formulas are those of transformers' image processors, with the same roundings, so that `plan` can say what a picture
costs before there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardmill.errors import MediaError
from shardmill.media.image_rules import Area, Budget, Fixed, ImageRules, Split, Tiles, Within

LONGEST_ASPECT = 200  # a longer side is refused by Qwen's processor, and shows nothing to any
Sides = tuple[int, int]  # width, height


@dataclass(frozen=True)
class Layout:
    """What becomes of a picture.

    Attributes:
        resized: the sizes that it is brought to, one after the other: (width, height) in pixels.
        tiles: rows and columns of tiles that the last size is cut into; (0, 0) if it stays whole. After the tiles
            follows the whole picture.
        whole: the size of the whole picture beside tiles; (0, 0): the size of a tile, made from the tiles' picture.
        grids: rows and columns of patches in each view: of the tiles, row by row, and of the whole picture.
    """

    resized: tuple[Sides, ...]
    tiles: tuple[int, int]
    grids: tuple[tuple[int, int], ...]
    whole: Sides = (0, 0)

    def rows(self, merge: int) -> int:
        """Return how many rows of the model the picture takes."""
        return sum(height * width for height, width in self.grids) // merge**2


def lay_out(rules: ImageRules, width: int, height: int) -> Layout:
    """Return what becomes of a picture of `width` x `height` pixels.

    Raises:
        MediaError: if the rules take no picture of this shape.
    """
    if max(width, height) > LONGEST_ASPECT * min(width, height):
        raise MediaError(
            f"a picture of {width} x {height} pixels is too narrow: one side may be {LONGEST_ASPECT} times the other"
        )
    if not isinstance(rules.size, Tiles):
        size = _whole(rules, width, height)
        most = rules.size.most if isinstance(rules.size, Area | Split) else size[0] * size[1]
        if size[0] * size[1] > most:  # no side gets shorter than a row, so a narrow picture may stay too large
            raise MediaError(f"a picture of {width} x {height} pixels is too narrow for {most} pixels: crop it")
        grid = size[1] // rules.patch, size[0] // rules.patch
        if isinstance(rules.size, Split) and _is_large(rules.size, rules.patch, rules.side, width, height):
            tile, (rows, columns) = rules.size.tile, _nearest_shape(rules.size, width, height)
            tiles = ((tile // rules.patch,) * 2,) * (rows * columns)
            return Layout(((columns * tile, rows * tile),), (rows, columns), (*tiles, grid), size)
        return Layout((size,), (0, 0), (grid,))
    tile = rules.size.tile
    first = _longest(rules.size, width, height)
    second = _whole_tiles(tile, *first)
    rows, columns = second[1] // tile, second[0] // tile
    if rows * columns == 1:
        rows = columns = 0
    side = tile // rules.patch
    return Layout((first, second), (rows, columns), ((side, side),) * (rows * columns + 1))


def most_views(rules: ImageRules) -> int:
    """Return how many views a picture has at most."""
    match rules.size:
        case Tiles():
            across = math.ceil(rules.size.longest / rules.size.tile)
            return across**2 + 1 if across > 1 else 1
        case Split():
            return rules.size.many + 1 if rules.size.many > 1 else 1
    return 1


def placeholder_text(rules: ImageRules, layout: Layout) -> str:
    """Return the text of a picture, with the text of one token for each of its rows."""
    text = rules.text
    pieces = [text.before]
    views = iter(layout.grids)
    for row, column in product(range(layout.tiles[0]), range(layout.tiles[1])):
        pieces += [text.tile.format(row=row + 1, column=column + 1), *_lines(rules, next(views))]
        pieces += [text.tile_row_end] if column == layout.tiles[1] - 1 else []
    pieces += [text.tiles_end, text.beside] if layout.tiles != (0, 0) else []
    return "".join([*pieces, text.whole, *_lines(rules, next(views)), text.after])


def _lines(rules: ImageRules, grid: tuple[int, int]) -> Iterator[str]:
    """Yield the lines of a view's rows, and what stands between them."""
    height, width = (count // rules.merge for count in grid)
    for line in range(height):
        yield rules.text.line_break if line else ""
        yield rules.text.row * width


def _whole(rules: ImageRules, width: int, height: int) -> Sides:
    """Return the size of a picture that is not cut."""
    side, size = rules.side, rules.size
    match size:
        case Area():
            return _area(size, side, width, height)
        case Split():
            return _area(size, side, width, height, side)
        case Budget():
            return _budget(size, rules.patch, rules.merge, width, height)
        case Within():
            ratio = max(height / size.longest, width / size.longest)
            if ratio > 1:
                height, width = math.floor(height / ratio), math.floor(width / ratio)
            return ((width - 1) // side + 1) * side, ((height - 1) // side + 1) * side
        case Fixed():
            return size.width, size.height
        case Tiles():
            raise AssertionError("tiles are not whole")


def _area(size: Area | Split, side: int, width: int, height: int, shortest: int = 0) -> Sides:
    """Return whole multiples of `side` whose product lies between the rule's numbers; ties round to even.

    A side that rounds to less than `shortest` counts as that.
    """
    high, wide = (max(round(length / side) * side, shortest) for length in (height, width))
    if high * wide > size.most:
        beta = math.sqrt((height * width) / size.most)
        return max(side, math.floor(width / beta / side) * side), max(side, math.floor(height / beta / side) * side)
    if high * wide < size.least:
        beta = math.sqrt(size.least / (height * width))
        return math.ceil(width * beta / side) * side, math.ceil(height * beta / side) * side
    return wide, high


def _is_large(size: Split, patch: int, side: int, width: int, height: int) -> bool:
    """Return whether a picture is cut into tiles."""
    high, wide = (max(round(length / side) * side, patch) for length in (height, width))
    return high * wide > size.large and size.many > 1


def _nearest_shape(size: Split, width: int, height: int) -> tuple[int, int]:
    """Return the rows and columns of tiles whose shape is nearest to a picture's.

    Of equally near ones a later one, with more tiles, counts if the picture has more than half of its pixels.
    """
    numbers = range(1, size.many + 1)
    shapes = [
        (rows, columns) for columns, rows in product(numbers, numbers) if size.fewest <= rows * columns <= size.many
    ]
    chosen, least = (1, 1), math.inf
    for rows, columns in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        distance = abs(width / height - columns / rows)
        roomy = width * height > 0.5 * size.tile**2 * rows * columns
        if distance < least or (distance == least and roomy):
            chosen, least = (rows, columns), distance
    return chosen


def _budget(size: Budget, patch: int, merge: int, width: int, height: int) -> Sides:
    """Return the largest size of a picture's shape that takes no more patches than the rule allows.

    Raises:
        MediaError: if there is none.
    """
    side, most = patch * merge, size.patches * patch**2
    factor = math.sqrt(most / (height * width))
    high, wide = (math.floor(factor * length / side) * side for length in (height, width))
    longest = size.patches // merge**2 * side
    if high == 0 and wide > 0:
        high, wide = side, min(math.floor(width / height) * side, longest)
    elif wide == 0 and high > 0:
        wide, high = side, min(math.floor(height / width) * side, longest)
    if not 0 < high * wide <= most:
        raise MediaError(f"a picture of {width} x {height} pixels does not fit {size.patches} patches: crop it")
    return wide, high


def _longest(size: Tiles, width: int, height: int) -> Sides:
    """Return the size whose longer side is the rule's; the shorter one is rounded down to a pixel, then up to even."""
    aspect = width / height
    if width >= height:
        width, height = size.longest, int(size.longest / aspect)
        height += height % 2
    else:
        width, height = int(size.longest * aspect), size.longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    aspect = width / height
    if width >= height and width > size.bound:
        return size.bound, max(int(size.bound / aspect), 1)
    if height > width and height > size.bound:
        return max(int(size.bound * aspect), 1), size.bound
    return width, height


def _whole_tiles(tile: int, width: int, height: int) -> Sides:
    """Return a size of whole tiles; the shorter side keeps its share of the longer one before it is rounded up."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / tile) * tile
        return width, math.ceil(int(width / aspect) / tile) * tile
    height = math.ceil(height / tile) * tile
    return math.ceil(int(height * aspect) / tile) * tile, height
