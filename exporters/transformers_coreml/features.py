"""A package of any model of transformers that takes arrays of fixed shapes, compared within their domains.

Whoever asks names the class, and each input with its sizes and its domain. The comparison runs the package on seeded
arrays within the domains, and on the least and the largest numbers of each.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.exporters.base import ExportedModel
from transformers.exporters.utils import get_leaf_tensors

DTYPES = {"float": torch.float32, "int": torch.int64}
EXACT = 1e-4  # of an output in fp32: sums in another order
FORM = "NAME=TYPE:SIZES:LEAST:LARGEST, such as pixel_values=float:1x3x224x224:-1:1"


class FeaturesError(ValueError):
    """What was asked for can't be done; the message is one line."""


@dataclass(frozen=True)
class Input:
    """An input: numbers of one type and shape, from `low` to `high`, both included."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float

    def drawn(self, seed: int) -> Tensor:
        """Return numbers drawn evenly from the domain."""
        rng = torch.Generator().manual_seed(seed)
        if self.dtype == "int":
            return torch.randint(int(self.low), int(self.high) + 1, self.shape, generator=rng)
        return torch.rand(self.shape, generator=rng) * (self.high - self.low) + self.low

    def filled(self, number: float) -> Tensor:
        """Return one number everywhere."""
        return torch.full(self.shape, int(number) if self.dtype == "int" else number, dtype=DTYPES[self.dtype])


@dataclass(frozen=True)
class Compared:
    """An output for one case of inputs.

    Attributes:
        inputs: "seeded", "least" or "largest".
        output: its name.
        precision: the package's, "fp32" or "fp16".
        error: the size of the difference relative to the size of the model's numbers, both as roots of sums of squares.
        limit: the most that is allowed.
    """

    inputs: str
    output: str
    precision: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Return whether the limit holds; NaN holds no limit."""
        return self.error <= self.limit


def input_of(text: str) -> Input:
    """Return the input that a text of FORM describes. Raises FeaturesError."""
    name, _, rest = text.partition("=")
    kind, *fields = rest.split(":")
    if not name.isidentifier() or len(fields) != 3:
        raise FeaturesError(f"{text!r} is no input; write {FORM}")
    if kind not in DTYPES:
        raise FeaturesError(f"input {name}: its type is {kind!r}, must be {' or '.join(DTYPES)}")
    sizes, *domain = fields
    try:
        shape = tuple(int(size) for size in sizes.split("x"))
        low, high = (int(number) if kind == "int" else float(number) for number in domain)
    except ValueError as error:
        raise FeaturesError(f"input {name}: {error}; write {FORM}") from None
    if min(shape) < 1:
        raise FeaturesError(f"input {name}: its sizes are {sizes}, must all be 1 or more")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise FeaturesError(f"input {name}: its domain is {domain[0]} to {domain[1]}, must be two numbers, least first")
    return Input(name, kind, shape, low, high)


def model_of(folder: Path, class_name: str, part: str = "", weights: bool = True) -> nn.Module:
    """Return a checkpoint's model in fp32, or a part of it.

    Args:
        folder: the checkpoint's.
        class_name: a class of transformers, or of the module of the checkpoint's model_type there.
        part: the path of a module in the model, such as "encoder"; the whole model if empty.
        weights: whether to read the weights. Otherwise they are random, and the folder needs config.json alone.

    Raises:
        FeaturesError: there is no such folder, class or part, or the checkpoint lacks weights of the class.
    """
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FeaturesError(f"{folder}: its config.json can't be read: {error}") from None
    chosen = _class(class_name, str(settings.get("model_type", "")))
    try:
        if weights:
            model, told = chosen.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
        else:
            torch.manual_seed(0)
            model, told = chosen(chosen.config_class.from_pretrained(folder)), {"missing_keys": ()}
    except Exception as error:
        raise FeaturesError(f"{folder}: {class_name} can't be loaded from it: {line_of(error)}") from error
    missing = sorted(told["missing_keys"])
    if missing:
        some = f"it lacks {len(missing)} weights of {class_name}, {missing[0]} first"
        raise FeaturesError(f"{folder}: {some}; name the class that was saved, and its part with --part")
    try:
        return model.eval().get_submodule(part)  # type: ignore[no-any-return]
    except AttributeError:
        parts = ", ".join(name for name, _ in model.named_children())
        raise FeaturesError(f"{class_name} has no part {part!r}; it has {parts}") from None


def _class(name: str, model_type: str) -> Any:
    """Return a class with a config. Raises FeaturesError."""
    spaces = [transformers]
    if model_type.isidentifier():
        with suppress(ImportError):  # a model_type that transformers doesn't have, beside a class that it has
            spaces.append(importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"))
    for space in spaces:
        chosen = getattr(space, name, None)
        if getattr(chosen, "config_class", None) is not None:
            return chosen
    like = get_close_matches(name, {one for space in spaces for one in dir(space)}, 3, 0.6)
    near = f"; like it are {', '.join(like)}" if like else ""
    raise FeaturesError(f"transformers {transformers.__version__} has no model class {name}{near}")


def check_inputs(model: nn.Module, inputs: Sequence[Input]) -> dict[str, Tensor]:
    """Return seeded arrays that the model takes.

    Raises:
        FeaturesError: an input is named twice, is missing or unknown, or the model can't compute with these.
    """
    names = [one.name for one in inputs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise FeaturesError(f"input {twice[0]} is named twice")
    asked = {
        name: parameter.default is parameter.empty
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    kind = type(model).__name__
    for name in names:
        if name not in asked:
            raise FeaturesError(f"{kind} has no input {name}; it has {', '.join(asked)}")
    for name, needed in asked.items():
        if needed and name not in names:
            raise FeaturesError(f"input {name} is missing, which {kind} needs; write {FORM}")
    arrays = seeded(inputs)
    _results(model, arrays)
    return arrays


def seeded(inputs: Sequence[Input]) -> dict[str, Tensor]:
    """Return numbers from within each input's domain, by name; the same ones each time."""
    return {one.name: one.drawn(place) for place, one in enumerate(inputs)}


def cases(inputs: Sequence[Input]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the name of each case and its arrays."""
    yield "seeded", seeded(inputs)
    yield "least", {one.name: one.filled(one.low) for one in inputs}
    yield "largest", {one.name: one.filled(one.high) for one in inputs}


def compare(
    model: nn.Module, exported: ExportedModel, inputs: Sequence[Input], precision: str, limit: float
) -> list[Compared]:
    """Compare a package with its model, in every case.

    Args:
        model: the model in fp32.
        exported: the package.
        inputs: the domains.
        precision: the package's.
        limit: the error that is allowed of an output.
    """
    rows: list[Compared] = []
    for name, arrays in cases(inputs):
        passed: dict[str, Any] = {**arrays}
        wanted, made = _results(model, arrays), get_leaf_tensors(exported(**passed))
        rows += [
            Compared(name, output, precision, _gap(numbers, made[output]), limit) for output, numbers in wanted.items()
        ]
    return rows


def write_comparison(path: Path, rows: Sequence[Compared], about: Mapping[str, Any]) -> None:
    """Write what was compared, and how it went, as JSON."""
    content = {**about, "passed": all(row.passed for row in rows), "outputs": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _results(model: nn.Module, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's tensors by their paths in its result. Raises FeaturesError."""
    try:
        with torch.no_grad():
            return get_leaf_tensors(model(**arrays))  # type: ignore[no-any-return]
    except Exception as error:
        raise FeaturesError(f"{type(model).__name__} can't compute with these inputs: {line_of(error)}") from error


def _gap(exact: Tensor, other: Tensor) -> float:
    a, b = exact.double().flatten(), other.double().flatten()
    if a.shape != b.shape:
        return math.inf
    size, difference = float(a.norm()), float((a - b).norm())
    return difference / size if size else difference


def line_of(error: BaseException) -> str:
    """Return the type of an error and its first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
