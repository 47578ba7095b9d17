"""The bytes of a program's weight file, as conversion writes it, and how many the Neural Engine takes.

Sizes are right to the byte: the engine refuses a file that is too large. The limits are the placement rules' limits, by
which the residency gate judges the finished programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from portable_coreml.judge.limits import Limit, listed, loosest, strictest, taking

from shardmill.config import Config
from shardmill.convert.blob import ALIGNMENT, SMALLEST
from shardmill.forms.form import FP16, INT8, MATRIX, form
from shardmill.forms.recipe import Recipe
from shardmill.models.architecture import Architecture
from shardmill.models.caches import Shape
from shardmill.models.contract import GraphSpec
from shardmill.models.part_kinds import constants, encoder_spec

SMALLER = {FP16: "INT8 halves them", INT8: "INT4 halves them"}  # by the form of a recipe, what to do about many bytes


def file_bytes(shapes: Mapping[str, Shape], chosen: Recipe) -> int:
    """Return bytes of the weight file of a program.

    Args:
        shapes: the shapes of the program's constants, by path.
        chosen: the form of each matrix of the program.
    """
    return ALIGNMENT + sum(_constant_bytes(path, shape, chosen) for path, shape in shapes.items())


def _constant_bytes(path: str, shape: Shape, chosen: Recipe) -> int:
    """Return the bytes of a constant in the weight file.

    Integers have scales beside them, and palettes have tables. A short constant lies outside the weight file.
    """
    if prod(shape) < SMALLEST:
        return 0
    return sum(map(_blob_bytes, form(chosen.form(path) if len(shape) == MATRIX else FP16).blobs(shape)))


def _blob_bytes(size: int) -> int:
    """Return the bytes of a blob with its record, padded to the start of the next blob."""
    return ALIGNMENT + -(-size // ALIGNMENT) * ALIGNMENT


def layer_bytes(config: Config, a: Architecture) -> list[int]:
    """Return bytes of each layer in a weight file; of an encoder with what stands around its layers."""
    chosen = config.convert.recipe
    specs = [GraphSpec("layers", a.graph, ((i, kind),)) for i, kind in enumerate(a.kinds)]
    if a.ends is not None:
        specs = [encoder_spec(a, i, i + 1) for i in range(a.layers)]
    return [file_bytes(constants(one), chosen) - ALIGNMENT for one in specs]


def slice_bytes(config: Config, a: Architecture, count: int) -> int:
    """Return bytes of each of `count` slices of the LM head."""
    return file_bytes(constants(GraphSpec("head", a.graph, rows=a.vocab // count)), config.convert.recipe)


def weight_limit(config: Config) -> Limit:
    """Return the most bytes of a weight file that every system of the config takes."""
    return strictest(config.systems).weight_bytes


def refused_over(config: Config, chosen_here: bool = False) -> Limit:
    """Return the limit over which a program is refused: of named systems each counts, of all that are known some one.

    A program that was `chosen_here`, and not by the config, suits every system.
    """
    return weight_limit(config) if config.program.runs_on or chosen_here else loosest().weight_bytes


def warnings(config: Config, sizes: Mapping[str, int]) -> list[str]:
    """Return in a line what some of the config's systems are expected to run on the CPU; nothing if there is nothing.

    Args:
        config: the config.
        sizes: bytes of the weight file of each program, by its name.
    """
    limit = weight_limit(config)
    large = {name: size for name, size in sizes.items() if size > limit.most}
    if not large:
        return []
    lost = [system for system in config.systems if system not in taking(max(large.values()), config.systems)]
    where = f"expected on the CPU on {listed(lost)}, whose limit is {limit.most} bytes of weights (rule {limit.rule})"
    cut = all(name.startswith(("layers", "head", "encoder")) for name in large)
    fewer = SMALLER.get(config.convert.recipe.default)
    remedies = ["smaller parts run on the Neural Engine everywhere"] if cut else [fewer] if fewer else []
    return [f"{', '.join(large)}: {where}; {', or '.join([*remedies, _naming(config, max(large.values()))])}"]


def refusal(config: Config, key: str, what: str, size: int, remedy: str) -> str:
    """Return why a program is refused: no system takes it, or one that the config is for does not."""
    taken = taking(size, config.systems)
    limit = weight_limit(config) if taken or config.program.runs_on else loosest().weight_bytes
    where = f" on {listed(system for system in config.systems if system not in taken)}" if taken else ""
    why = f"holds {size} bytes of weights, the limit is {limit.most}{where} (rule {limit.rule})"
    return f"{key}: {what} {why}; {remedy}{f', or {_naming(config, size)}' if taken else ''}"


def _naming(config: Config, size: int) -> str:
    """Return how a config says that it is only for systems that take a program of this size."""
    taken = taking(size, config.systems)
    of_one = [system for system in taken if system.split()[0] == taken[0].split()[0]]
    return f"`program.runs_on: [{of_one[0]}, {of_one[-1]}]` names only systems that take it"


def fewer_bytes(config: Config) -> str:
    """Return what to do about a matrix or a layer that is too large."""
    return SMALLER.get(config.convert.recipe.default, "this model can't be built")
