"""One loaded Core ML program for either engine: its functions by width and context, its states or the host's caches.

Sessions and gates feed passes of the widths that decoding uses. A gate also feeds narrower ones at the end of a text,
where no slot is left for a padding token; those are padded here with masks that write nothing.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardmill.errors import LoadError, ShardmillError
from shardmill.machine import is_portable, load_programs_as, native_call, precision
from shardmill.models.caches import CacheKind, cache_kind
from shardmill.models.contract import has_positions
from shardmill.models.interface import own_bundle
from shardmill.printable import first_line
from shardmill.runtime.bundles import hints, report_load
from shardmill.runtime.kv import Floats
from shardmill.runtime.manifest import part_in

OWNED = 30.0  # seconds that an array outlives its program; Core ML has been seen to own inputs for one second

Arrays = dict[tuple[str, tuple[int, ...]], NDArray[np.generic]]
_retired: deque[tuple[float, Arrays]] = deque()  # arrays of programs that are gone, the oldest first


class Buffers:
    """The arrays of one program, by the input's name and shape."""

    def __init__(self) -> None:
        self._arrays: Arrays = {}
        free_retired()
        weakref.finalize(self, _retire, self._arrays)

    def filled(self, name: str, value: NDArray[np.floating]) -> NDArray[np.generic]:
        """Return the array of an input, in fp32, filled with the numbers of `value`."""
        array = self.array(name, value.shape, np.float32)
        np.copyto(array, value)
        return array

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
        """Return the array of an input with its previous contents; zeros if the array is new."""
        array = self._arrays.get((name, shape))
        if array is None:
            array = self._arrays[name, shape] = np.zeros(shape, dtype)
        return array


def _retire(arrays: Arrays) -> None:
    _retired.append((time.monotonic(), arrays))


def free_retired() -> None:
    """Free the arrays of programs that have been gone for so long that Core ML no longer owns them."""
    while _retired and time.monotonic() - _retired[0][0] > OWNED:
        _retired.popleft()


SLOTS = 2  # the slot axis of keys and values
RINGS = "conv_write_mask"  # [1, 1, T, R]: a token's row gives its slot; in the others, [1, 1, S, T], its column
Shapes = Mapping[str, tuple[int, ...]]  # by name


@dataclass
class HostCaches:
    """The caches that the host keeps for one program.

    Core ML's inputs and outputs are fp32, so its caches are fp32 from the start and are written in place (see
    `Buffers`). The portable engine's caches are fp16 until its first output shows that it computes in fp32.

    Attributes:
        written: for each cache, by the name of its input, the output with the rows that a pass adds.
        shapes: the shapes of the caches.
    """

    written: Mapping[str, str]
    shapes: Shapes
    arrays: dict[str, Any] = field(init=False)
    _buffers: Buffers = field(init=False, default_factory=Buffers)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Fill the caches with zeros."""
        kind = np.float16 if is_portable() else np.float32
        self.arrays = {name: self._buffers.array(name, shape, kind) for name, shape in self.shapes.items()}
        for array in self.arrays.values():
            array.fill(0)

    def resize(self, shapes: Shapes) -> None:
        """Change the number of slots of the caches and keep their contents, as far as they fit."""
        self.shapes = shapes
        for name, shape in shapes.items():
            old = self.arrays[name]
            if old.shape == shape:  # a ring stays as it is
                continue
            new = self._buffers.array(name, shape, old.dtype).astype(old.dtype, copy=False)
            new.fill(0)
            self.arrays[name] = _carried(old, new)

    def write(self, outputs: Mapping[str, Any], inputs: Mapping[str, Floats]) -> None:
        """Write the new rows of a pass into the slots that its masks name.

        Args:
            outputs: the program's outputs; rows of tokens beyond the masks' tokens are ignored.
            inputs: the inputs of the pass.
        """
        for name, output in self.written.items():
            rows = np.asarray(outputs[output])
            if rows.dtype != self.arrays[name].dtype:  # an engine that computes in fp32 shows it in its first output
                self.arrays[name] = self.arrays[name].astype(rows.dtype)
            cache = self.arrays[name]
            kind = cache_kind(name)
            if kind is CacheKind.STATE:
                np.copyto(cache, rows)
            elif kind is CacheKind.RING:
                tokens, slots = np.nonzero(inputs[RINGS][0, 0])  # a recurrence's ring does not get every token
                cache[..., slots] = rows[..., tokens]
            else:
                slots = written_slots(cache.shape[2], inputs)
                cache[:, :, slots] = rows[:, :, : len(slots)]


def _carried(before: NDArray[Any], into: NDArray[Any]) -> NDArray[Any]:
    """Copy the contents of one cache [1, ., slots, .] into another cache of the same layer, as far as they fit.

    A ring and a recurrence's state are the same in every context, so all of their contents are copied.
    """
    rows = min(before.shape[SLOTS], into.shape[SLOTS])
    into[:, :, :rows] = before[:, :, :rows]
    return into


def written_slots(count: int, inputs: Mapping[str, Floats]) -> Any:
    """Return the slot of each token, from the write mask for caches of `count` slots."""
    mask = next(mask for name, mask in inputs.items() if name.startswith("kv_write_mask") and mask.shape[2] == count)
    return mask[0, 0].argmax(axis=0)


TOKENS = 2  # the token axis of an output [1, channels, T, 1]
# Prefixes of the inputs that are zeros for tokens that fill a pass up: write masks, and masks that programs sum over T.
WRITES = ("kv_write_mask", "conv_write_mask", "recurrent_")


@dataclass(frozen=True)
class ContextSize:
    """A program in a context of some number of slots.

    Attributes:
        functions: the name of the function for each width of a pass; empty if one function accepts passes of any width.
        kept: the shapes of the states, or of the host's caches.
    """

    functions: Mapping[int, str]
    kept: Shapes


def _in_context(entry: Mapping[str, Any]) -> ContextSize:
    """Return the form of a program that has a single context."""
    shapes = {name: entry["inputs"][name] for name in entry["written"]} if "written" in entry else entry["states"]
    functions = {int(width): str(name) for width, name in entry.get("functions", {}).items()}
    return ContextSize(functions, {name: tuple(map(int, shape)) for name, shape in shapes.items()})


def function_location(program: Path, function: str) -> tuple[Path, str]:
    """Return the path to load for a function, and the function's name there, "" if it is the only one."""
    bundle = own_bundle(program, function)
    return (bundle, "") if function and bundle.is_dir() else (program, function)


class Program:
    """A compiled bundle, or a package, or a folder with a bundle for each function.

    Attributes:
        lengths: the program's form by the slots of the context, ascending; empty if there is only one form.
        slots: the current number of slots, if there are several.
        functions: the functions at this number of slots, see `ContextSize`.
        tapped: the outputs of the last pass that other programs read, [1, d, T, 1], by the layer whose input they are.
        held: the caches that the host keeps for the program, if it does.
        borrowed: by the input's name, the caches of other programs that it reads, see `borrow`.
        caches: the names of the states, or of the host's caches.
        positional: the caches that have a slot for each position of the context, see `contract.has_positions`.
        adapter: the inputs with an adapter's matrices, by name; zeros if there is no adapter.
        around: a context that surrounds each run, for observing it.
    """

    def __init__(self, path: Path, entry: Mapping[str, Any], slots: int = 0, compute_units: str = "CPU_AND_NE") -> None:
        """Load the program, each function as a separate model; all functions of one context share one state.

        Of several contexts only the shortest is loaded now, the others on first use.

        Args:
            path: the bundle, package or folder.
            entry: the part's entry in model.json, or an equal one from `models.interface.interface`.
            slots: slots of the whole context, for a part that has several contexts.
            compute_units: a name of ct.ComputeUnit.

        Raises:
            ShardmillError: if Core ML can't load the program.
        """
        self.name, self.path, self.stateful, self.compute_units = path.stem, path, bool(entry["states"]), compute_units
        self.precision = precision()  # also for functions of other lengths, loaded later
        lengths = (*sorted(map(int, entry["contexts"])), slots) if "contexts" in entry else ()  # JSON sorts by text
        self.lengths = {length: _in_context(part_in(entry, length)) for length in lengths}
        self.slots = next(iter(lengths), 0)
        form = self.lengths[self.slots] if lengths else _in_context(entry)
        self.functions = form.functions
        whole = self.lengths[slots].kept if lengths else form.kept
        self.caches, self._kept = tuple(whole), form.kept
        self.positional = frozenset(name for name, shape in whole.items() if has_positions(name, shape, slots))
        self.held = HostCaches(entry["written"], form.kept) if entry.get("written") else None
        self.lent: tuple[str, ...] = tuple(entry.get("lent", ()))
        self.borrowed: dict[str, HostCaches] = {}
        self.output, self.taps = str(entry["output"]), {str(name): int(n) for name, n in entry.get("taps", {}).items()}
        self.tapped: dict[int, Floats] = {}
        self._token_axes = {name: shape.index("T") for name, shape in entry["inputs"].items() if "T" in shape}
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.models: dict[str, Any] = {}
        self.buffers = Buffers()
        kind = np.float16 if is_portable() else np.float32  # see HostCaches
        shapes = {name: tuple(map(int, entry["inputs"][name])) for name in entry.get("adapters", ())}
        self.adapter = {name: self.buffers.array(name, shape, kind) for name, shape in shapes.items()}
        self._shapes: set[tuple[Any, ...]] = set()  # of inputs that have run: a shape's first pass takes long
        self.state: Any = self._loaded(self.functions)

    def _loaded(self, functions: Mapping[int, str]) -> Any:
        """Load the functions of a length that are not loaded yet; return zeroed states for them."""
        import coremltools as ct

        report_load(self.name)
        try:
            load = ct.models.CompiledMLModel if self.path.suffix == ".mlmodelc" else ct.models.MLModel
            units = ct.ComputeUnit[self.compute_units]
            with load_programs_as(self.precision), native_call():
                for name in (name for name in _names(functions) if name not in self.models):
                    path, function = function_location(self.path, name)
                    named = {"function_name": function} if function else {}
                    self.models[name] = load(str(path), compute_units=units, **named, **hints())
            return self._made_state(functions)
        except Exception as error:
            raise LoadError(f"{self.path} can't be loaded: {first_line(error)}") from error

    def _made_state(self, functions: Mapping[int, str]) -> Any:
        """Return zeroed states, which all functions of a length share."""
        return self.models[_names(functions)[0]].make_state() if self.stateful else None

    def renew(self) -> None:
        """Replace the states, or clear the caches, with zeros."""
        self.state = self._made_state(self.functions)
        if self.held:
            self.held.forget()

    def adapt(self, matrices: Mapping[str, NDArray[np.floating]]) -> None:
        """Copy an adapter's matrices into the program's inputs; zeros into inputs that have none."""
        for name, array in self.adapter.items():
            np.copyto(array, matrices.get(name, np.float16(0)), casting="unsafe")

    def borrow(self, programs: Iterable[Program]) -> None:
        """Let each run read the inputs that are caches of other programs, as the host then holds these caches."""
        lenders = [each.held for each in programs if each.held]
        self.borrowed = {name: caches for caches in lenders for name in caches.shapes if name in self.lent}

    def move(self, slots: int, keep: bool = True) -> None:
        """Move to another context length; a program with a single length stays unchanged.

        Args:
            slots: slots of that length.
            keep: True to copy states or caches, as far as they fit; False if their contents are no longer needed.

        Raises:
            ShardmillError: if Core ML can't load the functions of that length; the program then stays at its length.
        """
        if slots == self.slots or not self.lengths:
            return
        before, context = self.state, self.lengths[slots]
        self.state = self._loaded(context.functions)
        self.slots, self.functions = slots, context.functions
        if self.held:
            self.held.resize(context.kept)
        for name in context.kept if self.stateful and keep else ():
            self.state.write_state(name, _carried(before.read_state(name), self.state.read_state(name)))

    def kept(self, name: str) -> Floats:
        """Return a copy of a state, or of a host's cache: later passes write in place."""
        return np.array(self.read(name), np.float32)

    def read(self, name: str) -> NDArray[np.floating]:
        """Return a copy of a state, or the host's cache itself, which later passes change."""
        values: NDArray[np.floating] = self.held.arrays[name] if self.held else self.state.read_state(name)
        return values

    def cache_bytes(self) -> dict[str, int]:
        """Return the bytes of each state, or of each of the host's caches."""
        if self.held:
            return {name: array.nbytes for name, array in self.held.arrays.items()}
        size = 4 if self.precision == "fp32" and is_portable() else 2
        shapes = self.lengths[self.slots].kept if self.lengths else self._kept
        return {name: size * prod(shape) for name, shape in shapes.items()}

    def write(self, name: str, changes: Sequence[tuple[slice, NDArray[np.floating]]]) -> None:
        """Replace slots of a state or of a host's cache, each slice by the array of its new content."""
        array = self.read(name)
        if self.held:  # an empty cache has not met the precision of the engine yet
            kinds = [array.dtype, *(content.dtype for _, content in changes)]
            array = self.held.arrays[name] = array.astype(np.result_type(*kinds), copy=False)
        for slots, content in changes:
            array[:, :, slots] = content
        if not self.held:
            self.state.write_state(name, array)

    def function(self, tokens: int) -> str:
        """Return the name of the function for a pass of `tokens` tokens; "" for a program's only function."""
        return self.functions[self._width(tokens)] if self.functions else ""

    def _width(self, tokens: int) -> int:
        """Return the least width for `tokens` tokens. Raises ShardmillError if no function is wide enough."""
        least = min((width for width in self.functions if width >= tokens), default=0)
        if not least:
            raise ShardmillError(f"a pass of {tokens} tokens: the program takes {max(self.functions)} at most")
        return least

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """Run the program and return its first output; write new rows to the caches, and keep the taps."""
        tokens = width = 0
        if self.functions:
            name = next(name for name in inputs if name in self._token_axes)
            tokens = inputs[name].shape[self._token_axes[name]]
            width = self._width(tokens)
        padded = (
            inputs if width == tokens else {name: self._padded(name, array, width) for name, array in inputs.items()}
        )
        outputs = self._run(self.functions.get(width, ""), padded)
        if self.held:
            self.held.write(outputs, inputs)
        count = tokens or None  # of a pass that was padded, only its own tokens
        self.tapped = {layer: np.asarray(outputs[name], np.float32)[:, :, :count] for name, layer in self.taps.items()}
        result = self.result(outputs)
        return result if width == tokens else result.take(range(tokens), TOKENS)

    def _padded(self, name: str, array: Floats, width: int) -> Floats:
        """Return an input with its last token repeated up to `width` tokens; a write mask writes the others nowhere."""
        axis = self._token_axes.get(name)
        if axis is None:
            return array
        last = np.take(array, [-1], axis)
        more = np.repeat(np.zeros_like(last) if name.startswith(WRITES) else last, width - array.shape[axis], axis)
        return np.concatenate([array, more], axis)

    def result(self, outputs: Mapping[str, Any]) -> Floats:
        """Return the output that belongs neither to a cache nor to another program."""
        return np.asarray(outputs[self.output], dtype=np.float32)

    def _run(self, function: str, inputs: Mapping[str, Floats]) -> dict[str, Any]:
        caches = dict(self.held.arrays) if self.held else {}
        caches |= {name: others.arrays[name] for name, others in self.borrowed.items()}
        filled = {name: self.buffers.filled(name, value) for name, value in inputs.items()}
        shapes = (function, *(value.shape for value in inputs.values()))
        first = native_call() if shapes not in self._shapes else nullcontext()
        self._shapes.add(shapes)
        with self.around(), first:
            outputs: dict[str, Any] = self.models[function].predict(
                {**self.adapter, **caches, **filled}, state=self.state
            )
        return outputs


Loaded = TypeVar("Loaded")


def reused(load: Callable[[], Loaded]) -> Callable[[], Loaded]:
    """Return a function that returns what `load` loads, and loads it again only if the precision has changed.

    Core ML has one precision, so there it is loaded once. The portable engine's two precisions are two loads, and only
    one of the two is in memory at a time.
    """
    last: dict[str, Loaded] = {}

    def loaded() -> Loaded:
        key = precision() if is_portable() else ""
        if key not in last:
            last.clear()
            last[key] = load()
        return last[key]

    return loaded


def _names(functions: Mapping[int, str]) -> list[str]:
    """Return the names of a length's functions; "" for a program's only function."""
    return list(dict.fromkeys(functions.values())) or [""]
