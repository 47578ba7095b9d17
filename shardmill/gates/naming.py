"""Transformers' names for a checkpoint's tensors, by transformers' own conversions.

For most families the names on disk are the names in memory. For others they differ: experts, for example, may be
separate tensors on disk and one stacked tensor in memory. For these families transformers has a list of renamings and
converters, which is applied here one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Weights = Callable[[str], Tensor]  # a tensor's name in the checkpoint -> values in any float dtype


@dataclass
class Origin:
    """The origin of a parameter: tensors of the checkpoint and a converter."""

    converter: Any = None  # transformers' WeightConverter, or None for a tensor that is used unchanged
    tensors: list[tuple[str, str]] = field(default_factory=list)  # names on disk, each with the converter's pattern


def origins(model: nn.Module, names: Iterable[str]) -> dict[str, Origin]:
    """Map each parameter's name to its origin, given the names of a checkpoint's tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model) or []  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Origin] = {}
    for name in sorted(names, key=dot_natural_key):
        key, pattern = rename_source_key(name, renamings, converters)
        origin = found.setdefault(key, Origin(by_pattern[pattern] if pattern else None))
        origin.tensors.append((name, pattern or ""))
    return found


def origin_of(name: str, known: Mapping[str, Origin]) -> Origin:
    """Return a parameter's origin, given the result of `origins`; a name without an entry is a name on disk."""
    return known.get(name) or Origin(tensors=[(name, "")])


def loaded(name: str, known: dict[str, Origin], weights: Weights) -> Tensor:
    """Return a parameter's value in fp32.

    Args:
        name: the parameter's name.
        known: the result of `origins`; a name without an entry is a name on disk.
        weights: returns the tensors on disk by name.
    """
    origin = origin_of(name, known)
    if origin.converter is None:
        ((on_disk, _),) = origin.tensors
        return weights(on_disk).float()
    converter = deepcopy(origin.converter)
    for on_disk, pattern in origin.tensors:
        converter.add_tensor(name, on_disk, pattern, weights(on_disk).float())
    made = converter.convert(name)[name]
    result: Tensor = made[0] if isinstance(made, list) else made
    return result
