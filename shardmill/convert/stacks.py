"""The inputs of adapters in a program: one stack for a part in place of a slice for each layer.

coremltools converts a layer with the layer's own slices as inputs, so that templates fit layers at any place. In the
finished program, the inputs are the stacks of models/adapters.py, and an operation at the beginning takes each stack
apart into the slices, which keep their names.
"""

from __future__ import annotations

from typing import Any

from coremltools.proto import MIL_pb2

from shardmill.convert.package import constant, copied, main_block, main_function, named_arguments
from shardmill.models.adapters import adapted_layers, adapter_inputs
from shardmill.models.contract import GraphSpec

LAYER_AXIS = 1


def stack_inputs(spec: Any, part_spec: GraphSpec) -> None:
    """Replace the slices among the inputs of a program by stacks, in place; without adapters, change nothing.

    Args:
        spec: Model_pb2.Model in normal form.
        part_spec: the spec of its part.
    """
    graph, layers, first = part_spec.graph, part_spec.layers, list[Any]()
    for name, shape in adapter_inputs(graph, layers, part_spec.calls.adapters).items():
        slices = [f"{name}_{index}" for index in adapted_layers(graph, layers)[name]]
        described, taken = (
            _one_for_all(described_inputs, slices)
            for described_inputs in (spec.description.input, main_function(spec).inputs)
        )
        if len(slices) == 1:  # nothing to take apart
            for argument in (one for op in main_block(spec).operations for _, one in named_arguments(op)):
                argument.name = name if argument.name == slices[0] else argument.name
        else:
            first += _taken_apart(name, slices, taken.type)
        described.name = taken.name = name
        described.type.multiArrayType.shape[:] = shape
        taken.type.tensorType.dimensions[LAYER_AXIS].constant.size = len(slices)
    operations = main_block(spec).operations
    others = [copied(operation) for operation in operations]
    del operations[:]
    operations.extend([*first, *others])


def _one_for_all(inputs: Any, slices: list[str]) -> Any:
    """Remove the inputs with these names from a list of inputs; append the first one again, and return that."""
    others = [copied(one) for one in inputs if one.name not in slices]
    first = next(copied(one) for one in inputs if one.name == slices[0])
    del inputs[:]
    inputs.extend([*others, first])
    return inputs[-1]


def _taken_apart(name: str, slices: list[str], kind: Any) -> list[Any]:
    """Return the operations that take the stack `name` apart into slices of the type `kind`: constants and a split."""
    from coremltools.converters.mil.backend.mil.helper import create_scalar_value

    split = MIL_pb2.Operation(type="split")
    split.attributes["name"].CopyFrom(create_scalar_value(f"{name}_slices"))
    split.inputs["x"].arguments.add(name=name)
    numbers = {"axis": LAYER_AXIS, "num_splits": len(slices)}
    for parameter in numbers:
        split.inputs[parameter].arguments.add(name=f"{name}_{parameter}")
    for one in slices:
        split.outputs.add(name=one, type=kind)
    return [*(constant(f"{name}_{key}", create_scalar_value(number)) for key, number in numbers.items()), split]
