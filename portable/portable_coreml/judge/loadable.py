"""Models that Core ML is known to refuse when it loads them; the portable engine refuses them at the same moment.

- Values whose types contradict each other, which judge/types.py finds.
- A default shape that the description does not allow, or that a join can't take (coremltools'
  test_stack_dynamic_range_dim); a fixed shape that any operation can't take.
- Programs that do not load according to placement rules of confidence A or B: see _REFUSED. Reports by one party on one
  machine stay errors of `lint`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from portable_coreml.errors import InputError, ProgramError
from portable_coreml.files.features import feature_of
from portable_coreml.files.model import LoadedModel
from portable_coreml.judge.placement.rules import BY_ID
from portable_coreml.judge.placement.subject import Target, subjects
from portable_coreml.judge.shapes import Shape, infer_shapes
from portable_coreml.judge.types import check_function
from portable_coreml.program import Function, TensorType

_REFUSED = ("ST1", "ST2", "D3")
# What each function was found sound with, by all else that is judged: programs are loaded again and again.
_SOUND: WeakKeyDictionary[Function, set[tuple[Path, int, bytes]]] = WeakKeyDictionary()


def check_loadable(model: LoadedModel, function: Function, description: Any) -> None:
    """Raise ProgramError where Core ML would not load this function of a model."""
    sound = _SOUND.setdefault(function, set())
    told = (model.model_dir, model.spec_version, description.SerializeToString(deterministic=True))
    if told not in sound:
        _check(model, function, description)
        sound.add(told)


def _check(model: LoadedModel, function: Function, description: Any) -> None:
    check_function(function)
    for subject in subjects(model, Target()):
        for rule in (BY_ID[identity] for identity in _REFUSED if subject.function is function):
            for finding in rule.findings(subject):
                raise ProgramError(f"Core ML does not load it ({rule.id}): {finding.why}; {finding.remedy}")
    infer_shapes(function, default_shapes(function, description))


def default_shapes(function: Function, description: Any) -> dict[str, Shape]:
    """Return the described default shape of every multi-array input.

    Raises ProgramError where it contradicts the program
    or is not among the shapes that the description allows.
    """
    params = {item.name: item.type for item in function.inputs}
    found: dict[str, Shape] = {}
    for message in description.input:
        feature, kind = feature_of(message), params.get(message.name)
        if message.type.WhichOneof("Type") != "multiArrayType" or not feature.shape or not isinstance(kind, TensorType):
            continue
        try:
            feature.check(feature.shape)
        except InputError as error:
            raise ProgramError(f"the default shape is not one that the model takes: {error}") from error
        fits = len(kind.shape) == len(feature.shape) and all(
            want in (None, got) for want, got in zip(kind.shape, feature.shape, strict=True)
        )
        if not fits and not kind.variadic:
            raise ProgramError(
                f"input '{message.name}' is described as {list(feature.shape)}, the program takes {list(kind.shape)}"
            )
        found[message.name] = feature.shape
    return found
