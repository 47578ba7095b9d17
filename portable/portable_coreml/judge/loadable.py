"""Models that Core ML is known to refuse when it loads them; the portable engine refuses them at the same moment.

- Values whose types contradict each other. Every value has one type. Parameters are tensors and states, each name
  once; a state is read and written, and by nothing else. The arguments of an operation that coremltools' definitions
  give one type have one type, and a cast gives what it names. The inputs and outputs of blocks match in number, and
  states also in type.
- A default shape that the description does not allow, or that a join can't take (coremltools'
  test_stack_dynamic_range_dim); a fixed shape that any operation can't take.
- Programs that do not load according to placement rules of confidence A or B: see _REFUSED. Reports by one party on one
  machine stay errors of `lint`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from portable_coreml.dtypes import BY_NAME
from portable_coreml.errors import InputError, ProgramError
from portable_coreml.files.features import feature_of
from portable_coreml.files.model import LoadedModel
from portable_coreml.files.write_text import OPSETS
from portable_coreml.judge.rule import Target, subjects
from portable_coreml.judge.rules import RULES
from portable_coreml.judge.shapes import STATE_OPS, Shape, infer_shapes
from portable_coreml.program import Binding, Block, Function, Op, StateType, TensorType, Type, Value

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
        for rule in (RULES[identity] for identity in _REFUSED if subject.function is function):
            for finding in rule.findings(subject):
                raise ProgramError(f"Core ML does not load it ({rule.id}): {finding.why}; {finding.remedy}")
    infer_shapes(function, default_shapes(function, description))


def default_shapes(function: Function, description: Any) -> dict[str, Shape]:
    """Return the described default shape of every multi-array input.

    Raises ProgramError if a shape contradicts the program, or is not among the shapes that the description allows.
    """
    params = {item.name: item.type for item in function.inputs}
    shapes: dict[str, Shape] = {}
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
        shapes[message.name] = feature.shape
    return shapes


_Types = dict[str, Type]
_Texts = dict[str, str]  # constants that are strings
_LIKE_X = frozenset(
    [
        "abs",
        "add",
        "concat",
        "conv",
        "exp",
        "expand_dims",
        "layer_norm",
        "linear",
        "maximum",
        "minimum",
        "mul",
        "pad",
        "reduce_max",
        "reduce_mean",
        "reduce_min",
        "reduce_sum",
        "relu",
        "reshape",
        "rsqrt",
        "sigmoid",
        "silu",
        "slice_by_index",
        "slice_by_size",
        "slice_update",
        "softmax",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "sub",
        "tanh",
        "tile",
        "transpose",
    ]
)  # their results are of the type of `x`, concat's of `values`


def check_function(function: Function) -> None:
    """Raise ProgramError, naming the parameter or the operation, if the types of a function contradict each other."""
    types: _Types = {}
    for item in function.inputs:
        if item.name in types:
            raise ProgramError(f"function '{function.name}': parameter '{item.name}' is there twice")
        if not isinstance(item.type, (TensorType, StateType)):
            raise ProgramError(f"function '{function.name}': parameter '{item.name}' is neither a tensor nor a state")
        types[item.name] = item.type
    _check_block(function.block, types, {}, function.opset)


def _check_block(block: Block, outer: _Types, texts: _Texts, opset: str) -> None:
    types = outer | {item.name: item.type for item in block.inputs}
    for op in block.ops:
        if op.kind in STATE_OPS:
            _check_state(op, types)
        else:
            _check_operands(op, types, opset)
        _check_results(op, types, texts)
        for inner in op.blocks:
            _check_block(inner, types, dict(texts), opset)
        if op.kind == "const":
            texts[op.outputs[0].name] = _text(op.attributes.get("val"))
        types.update({out.name: out.type for out in op.outputs})
    for name in block.outputs:
        if isinstance(types.get(name), StateType):
            raise ProgramError(f"the state '{name}' is returned without a read_state")


def _check_state(op: Op, types: _Types) -> None:
    """Check that the argument is a state, and that what is read from it or written to it has its type."""
    name = next(iter(op.inputs.get("input", ())), None)
    kind = types.get(name) if isinstance(name, str) else None
    if not isinstance(kind, StateType):
        raise ProgramError(f"{op.kind} '{op.name}': argument 'input' is not a state")
    moved: list[Type | None] = [out.type for out in op.outputs]
    moved += [_type_of(binding, types) for binding in op.inputs.get("data", ())]
    for other in moved:
        if other is not None and not _fits(other, kind.wrapped):
            raise ProgramError(f"{op.kind} '{op.name}': the state '{name}' holds {kind.wrapped}, this is {other}")


def _fits(one: Type, two: TensorType) -> bool:
    """Return whether one value can have both types."""
    if not isinstance(one, TensorType) or one.dtype != two.dtype:
        return False
    if one.variadic or two.variadic:
        return True
    pairs = zip(one.shape, two.shape, strict=False)
    return len(one.shape) == len(two.shape) and all(a is None or b is None or a == b for a, b in pairs)


def _check_operands(op: Op, types: _Types, opset: str) -> None:
    groups = _type_groups(op.kind, opset)
    first: dict[str, tuple[str, TensorType]] = {}  # type domain -> the argument that decides it
    for argument, binding in _bindings(op):
        kind = _type_of(binding, types)
        if isinstance(kind, StateType):
            raise ProgramError(f"{op.kind} '{op.name}' takes the state '{binding}' without a read_state")
        group = groups.get(argument)
        if group is None or not isinstance(kind, TensorType) or kind.dtype == "string":
            continue
        other, wanted = first.setdefault(group, (argument, kind))
        if kind.dtype != wanted.dtype:
            both = f"'{argument}' is {kind.dtype}, '{other}' is {wanted.dtype}"
            raise ProgramError(f"{op.kind} '{op.name}': {both}; they must be of one type")


def _check_results(op: Op, types: _Types, texts: _Texts) -> None:
    """Check result types that follow from arguments, and how many values go into and out of blocks."""
    source = _type_of(next(iter([*op.inputs.get("x", ()), *op.inputs.get("values", ())]), ""), types)
    alike = op.outputs if op.kind in _LIKE_X else ()
    for out in alike:
        if isinstance(source, TensorType) and (not isinstance(out.type, TensorType) or out.type.dtype != source.dtype):
            raise ProgramError(f"{op.kind} of {source.dtype} gives '{out.name}', declared {out.type}")
    if op.kind == "cast" and len(op.outputs) == 1:
        bound, made = next(iter(op.inputs.get("dtype", ())), None), op.outputs[0].type
        name = texts.get(bound, "") if isinstance(bound, str) else _text(bound)
        if name in BY_NAME and isinstance(made, TensorType) and made.dtype != name:
            raise ProgramError(f"cast '{op.name}' to {name} gives '{op.outputs[0].name}', declared {made.dtype}")
    if op.kind == "const" and len(op.outputs) != 1:
        raise ProgramError(f"const '{op.name}' has {len(op.outputs)} results, not 1")
    for what, count, wanted in _numbers(op):
        if count != wanted:
            raise ProgramError(f"{op.kind} '{op.name}': {what} {count} values, not {wanted}")


def _numbers(op: Op) -> Iterator[tuple[str, int, int]]:
    """Yield (what, how many values it has, how many it should have) for control flow with its two blocks."""
    if op.kind not in ("cond", "while_loop") or len(op.blocks) != 2:
        return
    first, second = op.blocks
    wanted = len(op.outputs)
    if op.kind == "cond":
        yield "its first branch gives", len(first.outputs), wanted
        yield "its second branch gives", len(second.outputs), wanted
        return
    yield "it starts from", len(op.inputs.get("loop_vars", ())), wanted
    yield "its condition takes", len(first.inputs), wanted
    yield "its condition gives", len(first.outputs), 1
    yield "its body takes", len(second.inputs), wanted
    yield "its body gives", len(second.outputs), wanted


def _bindings(op: Op) -> Iterator[tuple[str, Binding]]:
    for argument, bound in op.inputs.items():
        for binding in bound:
            yield argument, binding


def _type_of(binding: Binding, types: Mapping[str, Type]) -> Type | None:
    return binding.type if isinstance(binding, Value) else types.get(binding)


def _text(value: Value | None) -> str:
    """Return a string literal's text."""
    return str(value.data) if value is not None and value.type == TensorType("string") else ""


@cache
def _type_groups(kind: str, opset: str) -> Mapping[str, str]:
    """Return argument -> its type domain, by coremltools' definition of an operation.

    Empty if coremltools does not know the operation.
    """
    from coremltools.converters.mil._deployment_compatibility import AvailableTarget
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry

    target = getattr(AvailableTarget, OPSETS.get(opset, "").replace("ios", "iOS"), None)
    versions: Mapping[Any, Any] = SSAOpRegistry.core_ops.get(kind, {})
    known = [version for version in versions if target is not None and version <= target]
    if not known:
        return {}
    arguments = versions[max(known)].input_spec.input_types
    groups = {name: getattr(item, "type_domain_id", None) for name, item in arguments.items()}
    return {name: group for name, group in groups.items() if group is not None}
