"""Recipes: which form each matrix of a model has.

A recipe is a JSON file, written by a person or a step of the pipeline, or one of three names.

    {"schema": 1, "default": "int4", "matrices": {"lm_head.weight": "int8", "layers.0.mlp.down_proj.weight": "int8"}}

A matrix is called by its path in the programs; the LM head has one name, which all of its slices share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor, log10, prod
from pathlib import Path
from typing import Any

from shardmill.errors import ConfigError
from shardmill.files import load_json
from shardmill.forms.form import FP16, INT4, INT8, MATRIX, Shape, form, matrices, misfit, stored_bytes
from shardmill.printable import printable


def amount(budget: str, value: float) -> str:
    """Return a budget's value as a person writes it."""
    return f"{value:.0f}" if budget == "bytes_per_token" else f"{value:.8g}"


def at_least(budget: str, value: float) -> str:
    """Return a budget's least possible value as a person writes it, rounded up so that the budget can be kept."""
    if budget == "bytes_per_token":
        return f"{ceil(value)}"
    text = amount(budget, value)
    return text if float(text) >= value else amount(budget, value + 10.0 ** (floor(log10(value)) - 7))


def unreachable(budget: Mapping[str, float | None], forms: Sequence[str], constants: Mapping[str, Shape]) -> list[str]:
    """Return a problem for each budget of bits or bytes that the smallest form of each matrix still exceeds.

    Args:
        budget: the config's budgets, by name.
        forms: the forms that the search may choose.
        constants: the constants of all programs; for the LM head, the constants of the whole head.
    """
    least = {
        path: min((stored_bytes(name, shape) for name in forms if not misfit(name, shape)), default=0)
        for path, shape in matrices(constants).items()
    }
    numbers = sum(map(prod, matrices(constants).values()))
    others = sum(stored_bytes(FP16, shape) for path, shape in constants.items() if path not in least)
    reached = {"bits_per_weight": 8 * sum(least.values()) / numbers, "bytes_per_token": sum(least.values()) + others}
    return [
        f"convert.budget.{name}: {amount(name, limit)} is less than any forms reach: "
        f"with {', '.join(forms)} it is {at_least(name, reached[name])} at least"
        for name, limit in budget.items()
        if name in reached and limit is not None and limit < reached[name]
    ]


WORST = 12  # matrices that are listed


@dataclass(frozen=True)
class Costly:
    """A matrix as it was chosen to be stored, and what the next form with more bits and less loss would change."""

    path: str
    form: str
    nats: float
    share: float  # of the cost of all matrices
    saves: float  # nats, in the next form; 0 without a next form
    takes: int  # bytes more


def costliest(search: Mapping[str, Any]) -> list[Costly]:
    """Return the matrices that cost most, in falling order."""
    forms, costs, sizes = search["forms"], search["costs"], search["sizes"]
    total = sum(costs[path][chosen] for path, chosen in forms.items()) or 1.0
    rows = []
    for path, chosen in forms.items():
        cost, size = costs[path][chosen], sizes[path][chosen]
        larger = [(other_size, costs[path][other]) for other, other_size in sizes[path].items() if other_size > size]
        most, nats = min(((size, nats) for size, nats in larger if nats < cost), default=(size, cost))
        rows.append(Costly(path, chosen, cost, cost / total, cost - nats, int(most - size)))
    return sorted(rows, key=lambda one: (-one.nats, one.path))[:WORST]


SCHEMA = 1
KEYS = {"schema", "default", "matrices"}
# Matrices after a model's layers: an error in these matrices reaches the output unchanged.
LAST = ("lm_head.weight", "classifier.weight", "dense.weight")


@dataclass(frozen=True)
class Recipe:
    """The form of each matrix.

    Attributes:
        default: of the matrices that are not named.
        matrices: forms by the matrices' paths.
        strict: whether each name has to be one of the model's.
        towers: of a tower's matrices that are not named; "" for the default.
    """

    default: str
    matrices: Mapping[str, str] = field(default_factory=dict)
    strict: bool = True
    towers: str = ""

    def form(self, path: str) -> str:
        """Return the form of a matrix."""
        of_tower = self.towers if path.startswith("tower.") else ""
        return self.matrices.get(path) or of_tower or self.default

    def forms(self, constants: Mapping[str, Shape]) -> dict[str, str]:
        """Return the form of each matrix among a program's constants."""
        return {path: self.form(path) for path in matrices(constants)}

    def bytes_by_form(self, constants: Mapping[str, Shape]) -> dict[str, int]:
        """Return bytes of a program's constants by form, without the weight file's padding.

        All but matrices count as fp16.
        """
        sizes: dict[str, int] = {}
        for path, shape in constants.items():
            name = self.form(path) if len(shape) == MATRIX else FP16
            sizes[name] = sizes.get(name, 0) + stored_bytes(name, shape)
        return sizes

    def numbers(self, constants: Mapping[str, Shape]) -> dict[str, int]:
        """Return how many numbers of a program's matrices have each form."""
        numbers: dict[str, int] = {}
        for path, shape in matrices(constants).items():
            numbers[self.form(path)] = numbers.get(self.form(path), 0) + prod(shape)
        return numbers

    def within(self, constants: Mapping[str, Shape]) -> dict[str, Any]:
        """Return the recipe as a file's content: the names that the model has and whose form is not the default."""
        named = {path: name for path, name in sorted(self.forms(constants).items()) if name != self.default}
        return {"schema": SCHEMA, "default": self.default, "matrices": named}


SEARCH = "search"
# The search does not choose the form of the experts: they are in INT8.
# int4 leaves the last matrices in INT8: the logits hang on them directly, and they are a small share of a large model.
RULES = {
    FP16: Recipe(FP16),
    INT8: Recipe(INT8),
    INT4: Recipe(INT4, dict.fromkeys(LAST, INT8), strict=False),
    SEARCH: Recipe(INT8),
}


def recipe(precision: str) -> Recipe:
    """Return the recipe of that name, or in that file.

    Raises ConfigError, which names the file and what is wrong in it.
    """
    if precision in RULES:
        return RULES[precision]
    file = Path(precision)
    if not file.is_file():
        raise ConfigError(f"convert.precision: {precision} is none of {', '.join(RULES)}, and no file")
    try:
        content = load_json(file, unique=True)
    except ValueError as error:
        raise ConfigError(f"{file}: no JSON: {printable(str(error))}") from error
    return read_recipe(content, str(file))


def read_recipe(content: Any, name: str) -> Recipe:
    """Return a recipe file's content, checked. Raises ConfigError with `name` in front."""
    if not isinstance(content, Mapping) or content.keys() != KEYS or not isinstance(content["matrices"], Mapping):
        raise ConfigError(f"{name}: no recipe; it has the keys schema, default and matrices, see docs/precision.md")
    if content["schema"] != SCHEMA or not isinstance(content["schema"], int):
        raise ConfigError(f"{name}: schema {content['schema']!r}, this shardmill reads {SCHEMA}")
    for where, chosen in (("default", content["default"]), *content["matrices"].items()):
        if not where.isascii():
            raise ConfigError(f"{name}: {where!a}: no matrix has such a name")
        try:
            form(chosen if isinstance(chosen, str) else repr(chosen))
        except ConfigError as error:
            raise ConfigError(f"{name}: {where}: {error}") from error
    return Recipe(content["default"], dict(content["matrices"]))


def called(convert: Mapping[str, Any]) -> str:
    """Return the usual name for the weights of a build with this `convert` in its config.

    Older builds have the key `weights` in place of `precision`.
    """
    precision = str(convert.get("precision") or convert["weights"])
    return precision.upper() if precision in RULES else "mixed"


def unfit(forms: Sequence[str], constants: Mapping[str, Shape]) -> Iterator[str]:
    """Yield a problem for each matrix that fits no form of a search."""
    for path, shape in matrices(constants).items():
        if all(misfit(name, shape) for name in forms):
            yield f"convert.search.forms: {', '.join(forms)}: none of them fits {path}, {list(shape)}; add int8"


def recipe_misfits(chosen: Recipe, constants: Mapping[str, Shape]) -> Iterator[str]:
    """Yield how a recipe contradicts a model, given the constants of all programs; of a slice of the head, its rows."""
    known = matrices(constants)
    if chosen.strict:
        for path in sorted(chosen.matrices.keys() - known):
            near = "; it stays in fp16" if path in constants else _near(path, [*known])
            yield f"convert.precision: {printable(path)} is no matrix of this model{near}"
    for path, shape in known.items():
        if problem := misfit(chosen.form(path), shape):
            yield f"convert.precision: {path}: {problem}"


def _near(path: str, known: Sequence[str]) -> str:
    """Return which matrices have a name like the given one."""
    from difflib import get_close_matches

    near = get_close_matches(path, known, n=1) or [known[0], known[-1]]
    return f"; there is {' or '.join(near)}, and `shardmill plan --json` of a config without it lists all"
