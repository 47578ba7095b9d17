"""Part of a model as a Core AI program on Apple's runtime, with the weights that a package stores.

The graph is the PyTorch module that was traced for the Core ML program. Codes stay codes in the graph: Apple's runtime
multiplies them by their scales, or looks them up in their tables. Everything else is Apple's code: `coreai-torch`
converts the graph, `coreai-core` compiles and runs it (PyPI; Linux x86_64 and macOS).

A part is converted in pieces of a few layers, because a conversion keeps several copies of its weights in memory.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from shardmill.gates.stored import Stored
from shardmill.imports import quiet_process
from shardmill.models.architecture import LayerSpec, joints
from shardmill.models.caches import T
from shardmill.models.contract import GraphSpec, states
from shardmill.models.interface import GRAPH
from shardmill.models.part_kinds import PART_KINDS, constants, inputs, output
from shardmill.models.parts import build
from shardmill.runtime.kv import Floats

PIECE = 50_000_000  # weights of a piece; a conversion needs about 11 bytes for each


class CoreAIProgram:
    """A part on Apple's runtime, with one piece at a time in memory."""

    def __init__(self, spec: GraphSpec, stored: Callable[[str], Stored], widths: Sequence[int]) -> None:
        """Store the arguments.

        Args:
            spec: the part's spec.
            stored: returns a constant as the package stores it, given its path.
            widths: tokens of a pass; each width is an entry point.
        """
        self.spec, self.stored, self.widths = replace(spec, calls=replace(spec.calls, state=GRAPH)), stored, widths

    def run(self, feeds: Mapping[str, Callable[[Any], Floats]]) -> dict[str, Floats]:
        """Return each feed's result, given a program that the feed calls as `runtime.program.Program` is called.

        No input of a pass depends on an output before it. So the inputs are recorded first; then each piece computes
        all passes of all feeds before the next piece is converted; then the feeds get the outputs.
        """
        tapes = {name: Tape(self.spec) for name in feeds}
        for name, feed in feeds.items():
            feed(tapes[name])
        for each in _pieces(self.spec):
            piece = Piece(each, self.stored, self.widths)
            try:
                for tape in tapes.values():
                    tape.pass_through(piece)
            finally:
                piece.close()
        return {name: feed(tapes[name].rewound()) for name, feed in feeds.items()}


class Tape:
    """The calls of a feed: first their inputs, then the results of the pieces that have run.

    Attributes:
        calls: inputs of each pass by name; None marks that all states are set to zero.
        states: contents at the end, by name.
    """

    def __init__(self, spec: GraphSpec) -> None:
        self.channels = spec.rows or spec.graph.hidden
        self.calls: list[dict[str, Floats] | None] = []
        self.states = {name: np.zeros(shape, np.float32) for name, shape in states(spec).items()}
        self.results: Iterator[Floats] | None = None

    def pass_through(self, piece: Piece) -> None:
        """Replace the input of each pass by the piece's output."""
        for call in self.calls:
            if call is None:
                piece.renew()
            else:
                call["x" if "x" in call else "hidden"] = piece(call)
        self.states |= {name: np.array(state.numpy(), np.float32) for name, state in piece.state.items()}

    def rewound(self) -> Tape:
        """Return the tape with the outputs in the order of the calls."""
        self.results = iter([call["x" if "x" in call else "hidden"] for call in self.calls if call is not None])
        return self

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """Return the output [1, channels, T, 1] of a pass; zeros as long as inputs are recorded."""
        if self.results is not None:
            return next(self.results)
        self.calls.append({name: values.copy() for name, values in inputs.items()})  # caches are written in place
        return np.zeros((1, self.channels, _width(inputs), 1), np.float32)

    def renew(self) -> None:
        """Set all states to zero."""
        if self.results is None:
            self.calls.append(None)

    def move(self, slots: int, keep: bool = True) -> None:
        """Accept the whole context, the only context that the program has."""

    def kept(self, name: str) -> Floats:
        """Return a state's contents."""
        return self.states[name]


def _width(inputs: Mapping[str, Floats]) -> int:
    """Return the number of tokens of a pass."""
    width: int = next(values.shape[2] for name, values in inputs.items() if name in ("x", "hidden"))
    return width


def _pieces(spec: GraphSpec) -> Iterator[GraphSpec]:
    """Split a part of layers into runs of layers with at most PIECE weights; other parts are one piece.

    Layers that share a cache stay in one run, whatever they weigh.
    """
    if not PART_KINDS[spec.kind].by_layer:
        yield spec
        return
    run: list[tuple[int, LayerSpec]] = []
    for start, end in pairwise(joints([kind for _, kind in spec.layers])):
        unit = spec.layers[start:end]
        if run and sum(map(prod, constants(replace(spec, layers=(*run, *unit))).values())) > PIECE:
            yield replace(spec, layers=tuple(run))
            run = []
        run.extend(unit)
    yield replace(spec, layers=tuple(run))


class Piece:
    """One Core AI program with an entry point for each width."""

    def __init__(self, spec: GraphSpec, stored: Callable[[str], Stored], widths: Sequence[int]) -> None:
        self.names, self.output = list(inputs(spec)), output(spec)
        self.shapes = states(spec)
        self.loop, self.stack = asyncio.new_event_loop(), ExitStack()
        with TemporaryDirectory() as folder, quiet_process():
            asset = Path(folder, "piece.aimodel")
            _convert(spec, {path: stored(path) for path in constants(spec)}, widths, asset)
            self.model = self._load(asset)
            self.functions = {width: self.model.load_function(_entry_point(width)) for width in widths}
        self.renew()

    def _load(self, asset: Path) -> Any:
        """Lower the asset for this machine and load it."""
        from coreai.authoring import AIModelAsset

        opened = AIModelAsset.load(asset).executable()
        model = self.loop.run_until_complete(opened.__aenter__())
        self.stack.callback(self.loop.close)
        self.stack.callback(lambda: self.loop.run_until_complete(opened.__aexit__(None, None, None)))
        return model

    def renew(self) -> None:
        """Set the states to zero."""
        self.state = {name: _array(np.zeros(shape, np.float32)) for name, shape in self.shapes.items()}

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """Run a pass and return the output [1, channels, T, 1]."""
        width = _width(inputs)
        arrays = {name: _array(inputs[name]) for name in self.names}
        state = {"state": self.state} if self.state else {}
        outputs = self.loop.run_until_complete(self.functions[width](inputs=arrays, **state))
        result: Floats = outputs[self.output].numpy().copy()
        return result

    def close(self) -> None:
        """Free the program."""
        self.functions.clear()
        self.stack.close()


def _array(values: Floats) -> Any:
    """Return an NDArray with a copy of the values. It has the strides of a new array, also along axes of size 1."""
    from coreai.runtime import NDArray

    fresh = np.empty(values.shape, np.float32)
    fresh[...] = values
    return NDArray(fresh)


def _entry_point(width: int) -> str:
    """Return the name of the function for passes of `width` tokens."""
    return f"t{width}"


def _convert(spec: GraphSpec, stored: Mapping[str, Stored], widths: Iterable[int], asset: Path) -> None:
    """Write an .aimodel with an entry point for each width.

    Args:
        spec: the program's spec.
        stored: the constants by path.
        widths: tokens of a pass.
        asset: where to write.
    """
    with warnings.catch_warnings(action="ignore"):  # such as: only tried with torch up to 2.13.0
        from coreai_torch import TorchConverter, get_decomp_table

        module, shapes = CodedModule(spec, stored), inputs(spec)
        converter = TorchConverter(mode=TorchConverter.Mode.RELEASE)
        for width in widths:
            example = tuple(torch.zeros([width if n == T else n for n in shape]) for shape in shapes.values())
            with torch.no_grad():
                program = torch.export.export(module, example)
                _separate_reshapes(program)
                program = program.run_decompositions(get_decomp_table())
            converter.add_exported_program(
                program,
                entrypoint_name=_entry_point(width),
                input_names=list(shapes),
                output_names=[output(spec)],
                state_names=list(states(spec)),
            )
        converter.to_coreai().save_asset(asset)


class CodedModule(nn.Module):
    """A part's PyTorch module whose matrices are codes, expanded anew in each pass.

    The module itself is built around zeros that need no memory; `forward` puts the expanded matrices in their place.
    """

    def __init__(self, spec: GraphSpec, stored: Mapping[str, Stored]) -> None:
        super().__init__()
        shapes, self.coded = constants(spec), [path for path, one in stored.items() if one.coded]
        zero = torch.zeros(1)
        weights = {
            path: zero.expand(shapes[path]) if one.coded else one.values.float().reshape(shapes[path])
            for path, one in stored.items()
        }
        self.inner = build(spec, weights)
        self.expanded = nn.ModuleList([Expanded(stored[path], self.shape_of(path)) for path in self.coded])

    def shape_of(self, path: str) -> torch.Size:
        """Return the shape in which the module has a constant."""
        return self.inner.get_parameter(path).shape

    def forward(self, *inputs: Tensor) -> Tensor:
        matrices = {path: expand() for path, expand in zip(self.coded, self.expanded, strict=True)}
        output: Tensor = torch.func.functional_call(self.inner, matrices, inputs)
        return output


class Expanded(nn.Module):
    """Codes of a matrix [out, in], and the scales or tables that turn the codes into numbers."""

    codes: Tensor
    scale: Tensor
    tables: Tensor

    def __init__(self, stored: Stored, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.has_tables = shape, stored.tables is not None
        if stored.tables is None:
            assert stored.scale is not None
            self.register_buffer("codes", stored.values.to(torch.int8))
            self.register_buffer("scale", stored.scale.float().reshape(-1, 1))
        else:
            rows, entries = len(stored.values) // len(stored.tables), stored.tables.shape[1]
            first = entries * (torch.arange(len(stored.values)) // rows)  # where the row's table begins
            self.register_buffer("codes", (stored.values.int() + first[:, None].int()).int())
            self.register_buffer("tables", stored.tables.float().reshape(-1))

    def forward(self) -> Tensor:
        if self.has_tables:
            return self.tables[self.codes].reshape(self.shape)
        return (self.codes.float() * self.scale).reshape(self.shape)


def _separate_reshapes(program: ExportedProgram) -> None:
    """Multiply by one each operand of a matrix product that was reshaped or transposed.

    coreai-torch 0.4.3 moves a reshape through a broadcasting matrix product if the shapes allow it (docs/upstream.md).
    This happens at T = 1, where a key is written into its slot of a cache, and if T is the number of experts whose
    biases are summed. The result is then wrong. A product with one can't be moved, and changes no number. Core ML
    programs do not need this: T is symbolic in them, and coremltools has no pass that moves reshapes this way.
    """
    graph, views = program.graph_module.graph, (torch.ops.aten.reshape, torch.ops.aten.view, torch.ops.aten.transpose)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not torch.ops.aten.matmul.default:
            continue
        for operand in node.args:
            if getattr(operand.target, "overloadpacket", None) in views:
                with graph.inserting_before(node):
                    same = graph.call_function(torch.ops.aten.mul.Tensor, (operand, 1.0))
                same.meta["val"] = operand.meta["val"]
                node.replace_input_with(operand, same)
    program.graph_module.recompile()
