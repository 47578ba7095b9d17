"""What a program computes once, value by value: an ML Program, an exported program of PyTorch, or recorded arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_coreml.errors import InputError, first_line
from portable_coreml.files.arrays import SUFFIXES, read_arrays
from portable_coreml.files.blob import WeightLoader
from portable_coreml.files.bundle import load_model
from portable_coreml.judge.drift import Case
from portable_coreml.judge.rule import input_names
from portable_coreml.program import Op


@dataclass(frozen=True, eq=False)
class Trace:
    """What a program computed once.

    Attributes:
        path: the program's file.
        kinds: name -> the type of the operation, "input" or "recorded", in program order.
        values: name -> the numbers.
        takes: name -> the names of the values that the operation takes; empty for recorded arrays.
        outputs: the names of the values that the program returns.
        ops: name -> the operation, of an ML Program.
        constants: gives the array of a literal, of an ML Program.
    """

    path: str
    kinds: Mapping[str, str]
    values: Mapping[str, Tensor]
    takes: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    ops: Mapping[str, Op] = field(default_factory=dict)
    constants: Any = None

    @property
    def recorded(self) -> bool:
        return "recorded" in self.kinds.values()

    @cached_property
    def by_size(self) -> Mapping[int, list[tuple[float, str]]]:
        """Return number of elements -> (norm, name) of each value with that number of elements."""
        sizes: dict[int, list[tuple[float, str]]] = {}
        for name, value in self.values.items():
            sizes.setdefault(value.numel(), []).append((norm(value), name))
        return sizes


def trace_of(case: Case, path: Path, data: Mapping[str, Any], constants: Any) -> Trace:
    """Run a function once in fp32, from states of zeros."""
    computed = case.values(data, case.exact.new_state())
    ops = {out.name: op for op in case.function.block.ops for out in op.outputs}
    takes: dict[str, tuple[str, ...]] = {}
    written: dict[str, str] = {}  # state -> the value that was written to it last
    for op in case.function.block.ops:
        names = [
            *input_names(op),
            *(name for block in op.blocks for inner in block.walk() for name in input_names(inner)),
        ]
        names = [written.get(name, name) for name in names]
        if op.kind == "write_state":
            written[next(input_names(op))] = names[-1]
        takes.update({out.name: tuple(name for name in names if name in computed) for out in op.outputs})
    kinds, values = (
        {name: kind for name, (kind, _) in computed.items()},
        {name: value for name, (_, value) in computed.items()},
    )
    return Trace(str(path), kinds, values, takes, case.outputs(), ops, constants)


def trace_other(path: Path, case: Case, data: Mapping[str, Any]) -> Trace:
    """Run what a program is compared with once, from the same inputs.

    Args:
        path: an .mlpackage, an .mlmodelc, a .pt2, an .npz or a .safetensors.
        case: the first program's function.
        data: its inputs, which are passed on by name, or in their order where names differ.

    Raises:
        PortableError: it can't be read or run, or takes other inputs.
    """
    if path.suffix == ".pt2":
        return _exported(path, data)
    if path.suffix in SUFFIXES:
        return _recorded(path, case)
    model = load_model(path)
    names = [case.function.name] if case.function.name in model.program.functions else [""]
    other = Case(model, names[0])
    takes = [item.name for item in other.exact.inputs]
    shapes = {m.name: tuple(m.type.multiArrayType.shape) for m in other.description.input}
    fed = {name: _shaped(value, shapes.get(name, ()), path, name) for name, value in _named(data, takes, path).items()}
    return trace_of(other, path, fed, WeightLoader(model.model_dir))


def norm(value: Tensor) -> float:
    """Return the root of the sum of squares of the numbers that are finite."""
    numbers = value.double()
    return float(numbers[numbers.isfinite()].norm())


def _named(data: Mapping[str, Any], names: list[str], path: Path) -> dict[str, Any]:
    """Return inputs under the names of another program, in their order if those differ. Raises InputError."""
    if set(names) <= set(data):
        return {name: data[name] for name in names}
    if len(names) != len(data):
        raise InputError(f"{path}: it takes {len(names)} inputs ({', '.join(names)}), not {', '.join(data)}")
    return dict(zip(names, data.values(), strict=True))


def _shaped(value: Any, shape: tuple[int, ...], path: Path, name: str) -> Any:
    """Return an array in another program's shape, if only axes of length 1 differ. Raises InputError."""
    array = np.asarray(value)
    if not shape or array.shape == shape or len(array.shape) == len(shape):
        return array  # another extent may be one that it takes, too
    if [n for n in array.shape if n != 1] != [n for n in shape if n != 1]:
        raise InputError(f"{path}: input '{name}' is of shape {list(shape)}, not {list(array.shape)}")
    return array.reshape(shape)


def _exported(path: Path, data: Mapping[str, Any]) -> Trace:
    """Run an exported program, and keep the value of every node of its graph."""
    try:
        program = torch.export.load(path)
    except Exception as error:  # torch's errors of a damaged file are of many types
        raise InputError(f"{path}: not an exported program that this torch can load: {first_line(error)}") from error
    module = program.module()
    nodes = {node.name: node for node in module.graph.nodes}
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    values: dict[str, Tensor] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, node: torch.fx.Node) -> Any:
            value = super().run_node(node)
            if isinstance(value, Tensor) and node.op not in ("get_attr", "output"):
                values[node.name] = value.detach().clone()
            return value

    fed = []
    for name, value in _named(data, names, path).items():
        meta = nodes[name].meta["val"]
        shape = tuple(int(size) if isinstance(size, int) else -1 for size in meta.shape)
        array = _shaped(value, shape if -1 not in shape else (), path, name)
        fed.append(torch.from_numpy(np.array(array)).to(meta.dtype))
    try:
        with torch.no_grad():
            Recorder(module).run(*fed)
    except Exception as error:  # whatever an operator raises
        raise InputError(f"{path}: it can't be computed from these inputs: {first_line(error)}") from error
    (last,) = (node for node in module.graph.nodes if node.op == "output")
    outputs = tuple(node.name for node in last.all_input_nodes if node.name in values)
    kinds = {name: "input" if name in names else str(nodes[name].target) for name in values}
    takes = {name: tuple(n.name for n in nodes[name].all_input_nodes if n.name in values) for name in values}
    return Trace(
        str(path), kinds, {n: v.float() if v.is_floating_point() else v for n, v in values.items()}, takes, outputs
    )


def _recorded(path: Path, case: Case) -> Trace:
    inputs = {item.name for item in case.exact.inputs}
    values = {name: torch.from_numpy(np.array(array)) for name, array in read_arrays(path).items()}
    kinds = {name: "input" if name in inputs else "recorded" for name in values}
    return Trace(str(path), kinds, values, {}, tuple(name for name in values if name not in inputs))
