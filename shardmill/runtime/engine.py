"""The programs of a built model as one function: a decoder's from tokens to logits, an encoder's to a row for each.

The host does what the graph contract assigns to it: table lookup, the arrays of a pass (runtime/kv.py),
and the chaining of parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill import files
from shardmill.errors import LoadError, ShardmillError
from shardmill.files import digest
from shardmill.machine import load_programs_as
from shardmill.models.contract import PER_LAYER
from shardmill.models.interface import LABELS, TOWER
from shardmill.runtime.adapters import adapter_digest, load_adapter
from shardmill.runtime.bundles import loadable, reshaping
from shardmill.runtime.copies import Copy, engine_identity, load_copies, save_copies
from shardmill.runtime.expected import (
    Expected,
    decoder_errors,
    first_answer,
    planned_operations,
    read_expected,
    tower_errors,
)
from shardmill.runtime.kv import Floats, KVLayout, token_rows
from shardmill.runtime.manifest import (
    EXPECTED,
    folds_blocks,
    label_tokens,
    lengths,
    read_manifest,
    reshape_frequency,
    verify_width,
)
from shardmill.runtime.program import Program
from shardmill.runtime.rows import Grid, HeldRows
from shardmill.runtime.tower import Tower, rows_of

EMBEDDING, SCALE = "embedding", ".scale"


@dataclass(frozen=True)
class Table:
    """A table, memory-mapped from its file; looked-up rows are float32.

    Attributes:
        values: [rows, d] in fp16 or int8.
        scale: for values in int8, the scale of each row, [rows] in fp16.
    """

    values: NDArray[Any]
    scale: NDArray[np.float16] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of rows and of columns."""
        return self.values.shape

    def __getitem__(self, rows: Any) -> Floats:
        """Return some rows, indexed as in numpy: [n, d]."""
        vectors: Floats = self.values[rows].astype(np.float32)
        return vectors if self.scale is None else vectors * self.scale[rows].astype(np.float32)[..., None]


def read_tables(file: Path) -> dict[str, Table]:
    """Return the host's tables by name. Raises LoadError if the file has no table `embedding`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # maps the file; safetensors.numpy would read it all

    try:
        files.check(file)
        tensors = {name: tensor.numpy() for name, tensor in load_file(file).items()}
        if EMBEDDING not in tensors:
            raise KeyError(f"it contains no tensor '{EMBEDDING}'")
    except (OSError, SafetensorError, KeyError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise LoadError(f"{file} can't be read as the embedding table ({why})") from error
    return {n: Table(values, tensors.get(n + SCALE)) for n, values in tensors.items() if not n.endswith(SCALE)}


Call = Callable[[Mapping[str, Floats]], Floats]  # a program


@dataclass(frozen=True)
class Layers:
    """A part of layers, and the groups of experts that the host routes to after it."""

    name: str
    program: Program
    inputs: Sequence[str]
    experts: list[tuple[Program, int]]  # each program and its number of experts
    start: int  # the first layer's index


class Engine:
    """A built model in memory; implements the protocol of drafted_decoding.engine."""

    def __init__(self, manifest: Mapping[str, Any], root: Path) -> None:
        """Load every program, at the shortest length of its context.

        Args:
            manifest: model.json's content.
            root: the folder that the manifest's paths are relative to.
        """
        self.manifest, self.root = manifest, root
        self.slots: int = manifest["context"]
        self.lengths = lengths(manifest)
        self.vocab: int = manifest["vocab"]
        self.widths: tuple[int, ...] = tuple(manifest["widths"])
        self.verify = verify_width(manifest)
        self.tokens_max: int = manifest["tokens_max"]
        self.pads = folds_blocks(manifest)
        tables = read_tables(root / manifest["embedding"]["path"])
        self.table, self.rows = tables[EMBEDDING], tables.get(PER_LAYER)  # [vocab, d], [vocab * layers, P]
        self.shown = HeldRows(self.vocab, self.slots)
        self.host = KVLayout(manifest)
        self._adapter = ""  # the sha256 of the present adapter's matrices
        self.host.resize(self.lengths[0])
        # Channels that a token carries beside the residual stream: the first part's x has them, the table does not.
        self.carry: int = manifest["parts"][0]["inputs"]["x"][1] - self.table.shape[1]
        self.tower = Tower(manifest, root) if TOWER in manifest else None
        self.copies: dict[int, Copy] = {}  # by key
        self.layers: list[Layers] = []
        self.heads: list[Program] = []
        self.labels = label_tokens(manifest)
        self.label_heads: list[Program] = []  # one program, or none
        self.read: tuple[int, ...] = tuple(manifest.get("drafter", {}).get("taps", ()))
        # What a drafter reads, the hidden states at the inputs of the layers `read`, by slot: [S, n d].
        self.taps = np.zeros((self.slots, len(self.read) * self.table.shape[1]), np.float16)
        self.last: dict[int, Floats] = {}  # the last layer's output [d] for each position of the last pass
        for part in manifest["parts"]:
            if part.get("drafter") or part["kind"] == TOWER:
                continue
            with reshaping(reshape_frequency(manifest)):
                program = Program(root / part["program"]["path"], part, self.slots)
            if part["kind"] == "layers":
                elsewhere = {name for key in ("written", "lent", "adapters") for name in part.get(key, ())}
                inputs = [name for name in part["inputs"] if name not in elsewhere]
                program.borrow(before.program for before in self.layers)
                self.layers.append(Layers(part["name"], program, inputs, [], part["start"]))
            elif part["kind"] == "experts":
                self.layers[-1].experts.append((program, part["inputs"]["weights"][1]))
            else:
                (self.label_heads if part["kind"] == LABELS else self.heads).append(program)
        # Parts up to the last that keeps something for later passes, or gives a drafter what it reads.
        keeping = (i for i, part in enumerate(self.layers, start=1) if part.program.caches)
        self.keeping = len(self.layers) if self.read else max(keeping, default=0)

    @property
    def beyond(self) -> bool:
        """Return whether a text may have rows of pictures, which `hold` was given."""
        return TOWER in self.manifest

    @property
    def programs(self) -> list[Program]:
        """Return the programs of a pass, in its order."""
        layers = ([part.program, *(program for program, _ in part.experts)] for part in self.layers)
        return [*chain.from_iterable(layers), *self.heads]

    def reset(self) -> None:
        """Forget every slot. Old contents of the states are masked until they are overwritten."""
        self.host.reset()
        self._move(self.lengths[0])

    def renew(self) -> None:
        """Forget every slot, and make all states and caches anew."""
        for part in self.layers:
            part.program.renew()
        self.taps[:] = 0
        self.reset()

    def fit(self, slots: int) -> None:
        """Move to the shortest context of at least `slots` slots; the contents of slots beyond it are forgotten.

        Raises:
            ShardmillError: the whole context has fewer slots.
        """
        fitting = [length for length in self.lengths if length >= slots]
        if not fitting:
            raise ShardmillError(
                f"a text takes {slots} slots, the context has {self.slots}: shorten it, or build with a larger context"
            )
        self._move(fitting[0])

    def _move(self, length: int) -> None:
        """Move to another context length with the cached contents, or stay if a part can't be loaded at that length."""
        if length == self.host.length:
            return
        try:
            for part in self.layers:
                part.program.move(length, keep=not self.host.is_empty)
        except BaseException:
            for part in self.layers:
                part.program.move(self.host.length, keep=not self.host.is_empty)
            raise
        self.host.resize(length)

    def adapt(self, name: str | None) -> str:
        """Use an adapter of the build from now on, or none; what the slots hold belongs to the adapter before.

        Returns:
            The sha256 of the adapter's matrices, or an empty text.

        Raises:
            ShardmillError: if the build has no such adapter, or it is damaged; the adapter before then stays.
        """
        sha256 = adapter_digest(self.root, name) if name else ""
        if sha256 != self._adapter:
            matrices = load_adapter(self.root, self.manifest, name) if name else {}
            for part in self.layers:
                part.program.adapt(matrices.get(part.name, {}))
            self._adapter = sha256
        return self._adapter

    def show(self, numbers: Sequence[int], columns: Floats, grid: Grid) -> None:
        """Let the tower compute the rows of a picture or of a window of a sound, and hold them.

        Args:
            numbers: of the rows, see media/numbers.py.
            columns: the picture's patches, see `Tower.rows`.
            grid: rows and columns of patches.

        Raises:
            ShardmillError: if the build has no tower, or no program of it takes the picture.
        """
        if self.tower is None:
            raise ShardmillError("the build takes text alone: it has no tower")
        self.hold(numbers, self.tower.rows(columns, grid), rows_of(self.tower.rules, grid))

    def hold(self, numbers: Sequence[int], rows: Floats, grid: Grid) -> None:
        """Hold the rows of a picture, see `HeldRows.hold`."""
        self.shown.hold(numbers, rows, grid)

    def release(self, numbers: Sequence[int]) -> None:
        """Give up rows."""
        self.shown.release(numbers)

    def forget(self, slots: Sequence[int]) -> None:
        """Hide slots until they are written again."""
        self.host.forget(slots)

    def copy_bytes(self) -> tuple[int, int]:
        """Return about how many bytes a copy takes for each position, and for caches without a slot for each."""
        rows, rest = self.taps.itemsize * self.taps.shape[1], 0
        for program in (part.program for part in self.layers):
            for name, size in program.cache_bytes().items():
                if name in program.positional:
                    rows += size // self.host.length
                else:
                    rest += size
        return rows, rest

    def copy_out(self, spans: Mapping[int, tuple[int, int]], rest: int | None = None) -> dict[int, int]:
        """Copy what the programs keep for positions that have the slots of their numbers, and return the bytes by key.

        Args:
            spans: [start, stop) of the positions by the key of their copy.
            rest: the key of the copy that also gets all caches without a slot for each position; they must be as they
                were after `stop` positions.
        """
        made = {
            key: Copy(
                start,
                stop,
                {},
                self.taps[start:stop].copy(),
                {},
                self.host.rings() if key == rest else None,
                self.shown.after(start, stop),
            )
            for key, (start, stop) in spans.items()
        }
        for i, part in enumerate(self.layers):
            for name in part.program.caches:
                whole = part.program.read(name)
                if name not in part.program.positional:
                    if rest is not None:
                        made[rest].rest[i, name] = whole.copy()
                    continue
                for copy in made.values():
                    copy.rows[i, name] = whole[:, :, copy.start : copy.stop].copy()
        self.copies |= made
        return {key: copy.nbytes for key, copy in made.items()}

    def copy_in(self, keys: Sequence[int]) -> None:
        """Write copies back, in this order; slots beyond them keep their content."""
        copies = [self.copies[key] for key in keys]
        for i, part in enumerate(self.layers):
            for name in part.program.caches:
                pieces = [(slice(one.start, one.stop), one.rows[i, name]) for one in copies if (i, name) in one.rows]
                pieces += [(slice(None), one.rest[i, name]) for one in copies if (i, name) in one.rest]
                if pieces:
                    part.program.write(name, pieces)
        for one in copies:
            self.taps[one.start : one.stop] = one.taps
            self.shown.restore(one.start, one.stop, one.shifts)
            self.host.restore(one.start, one.stop, one.rings)

    def drop_copies(self, keys: Sequence[int]) -> None:
        """Free copies."""
        for key in keys:
            del self.copies[key]

    def save_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> None:
        """Write the copies of a text's tokens to a file, see `copies.save_copies`."""
        save_copies([self.copies[key] for key in keys], file, self._identity(tokens))

    def load_copies(self, keys: Sequence[int], file: Path, tokens: Sequence[int]) -> dict[int, int]:
        """Read the copies of a text's tokens, give them keys, and return their bytes; see `copies.load_copies`."""
        copies = load_copies(file, self._identity(tokens))
        self.copies |= dict(zip(keys, copies, strict=True))
        return {key: self.copies[key].nbytes for key in keys}

    def _identity(self, tokens: Sequence[int]) -> str:
        """Return a digest of all that decides what the programs keep of a text."""
        engine = engine_identity(self.layers[0].program.precision)
        return digest({"model": self.manifest, "adapter": self._adapter, "tokens": list(tokens), "engine": engine})

    def errors(self, part: str) -> dict[str, float]:
        """Return how far a part is from what the build says that it must give, see `expected.decoder_errors`."""
        entry = next(each for each in self.manifest["parts"] if each["name"] == part)
        if self.tower and entry["kind"] == TOWER:
            return dict(tower_errors(self.tower, entry, self._expected.parts[part]))
        return dict(decoder_errors(self, part, self._expected.parts[part]))

    def first_answer(self) -> str:
        """Return what differs from the first answer that the build has recorded, see `expected.first_answer`."""
        assert self._expected.answer is not None
        said = first_answer(self, self._expected.answer, self.manifest.get("margin", 0.0))
        self.renew()
        return said

    @cached_property
    def _expected(self) -> Expected:
        return read_expected(self.root / self.manifest[EXPECTED]["path"])

    def operations(self, part: str) -> list[dict[str, Any]]:
        """Return Core ML's plan for each operation of a part, see `expected.planned_operations`."""
        towers = self.tower.programs.values() if self.tower else ()
        return planned_operations({each.name: each for each in (*self.programs, *self.label_heads, *towers)}[part])

    def rewindable(self, position: int) -> bool:
        """Return whether the next pass may start at an earlier position, or at the end."""
        return self.host.rewindable(position)

    def undoable(self, position: int) -> int | None:
        """Return how many tokens fed one by one from a position on can be undone; None if any number."""
        return self.host.undoable(position)

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """Write each token's key and value into its slot and return float32 logits [T, vocab]."""
        return self.logits(self.hidden(tokens, slots, positions))

    def logits(self, hidden: Floats) -> Floats:
        """Return logits [T, vocab], given the last layer's output [1, d, T, 1]."""
        logits = [head({"hidden": hidden})[0, :, :, 0] for head in self.heads]  # each [V_j, T]
        return np.concatenate(logits).T

    def forward_labels(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """Do the same as `forward`, but return the logits of the tokens `labels` only, [T, labels]."""
        (head,) = self.label_heads
        logits: Floats = head({"hidden": self.hidden(tokens, slots, positions)})[0, : len(self.labels), :, 0].T
        return logits

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """Do the same as `forward`, but run only the programs that keep something for later passes."""
        self.hidden(tokens, slots, positions, self.keeping)

    def fed(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]
    ) -> tuple[Floats, dict[str, Floats]]:
        """Return the first part's x [1, channels, T, 1], and all other inputs that tokens decide."""
        x = self.shown.look_up(tokens, self.table).T[None, :, :, None]  # [1, d, T, 1]
        x = np.concatenate([x, np.zeros((1, self.carry, len(tokens), 1), np.float32)], axis=1) if self.carry else x
        if self.rows is None:
            return x, {}
        return x, {"embedded": x, **token_rows(self.rows, tokens, self.rows.shape[0] // self.vocab)}

    def hidden(
        self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int], parts: int | None = None
    ) -> Floats:
        """Return the output [1, d, T, 1] of the last layer, or of the last of the first `parts` parts of layers."""
        x, by_token = self.fed(tokens, slots, positions)
        if max(slots) >= self.host.length:
            self.fit(max(slots) + 1)
        turned = self.shown.turned(tokens, positions) if len(self.host.axes) and positions[-1] < self.slots else None
        arrays, tapped = self.host.arrays(slots, positions, turned) | by_token, dict[int, Floats]()
        for part in self.layers[:parts]:
            width, arrays["x"] = x.shape[1], x
            tapped[part.start] = x
            hidden = part.program({name: arrays[name] for name in part.inputs})
            tapped |= part.program.tapped
            x = joined(hidden, width, self.table.shape[1], part.experts) if part.experts else hidden
        if self.read:
            rows = [tapped.get(layer, x)[0, : self.table.shape[1], :, 0] for layer in self.read]  # each [d, T]
            self.taps[list(slots)] = np.concatenate(rows).T
        whole = parts in (None, len(self.layers))
        self.last = dict(zip(positions, x[0, : self.table.shape[1], :, 0].T, strict=True)) if whole else {}
        return x


def joined(hidden: Floats, width: int, stream: int, experts: Sequence[tuple[Call, int]]) -> Floats:
    """Return the next part's x [1, width, T, 1], given the output of a part that ends before routed experts.

    Args:
        hidden: that output, see models/contract.py.
        width: channels of x.
        stream: channels of the residual stream, the first of x.
        experts: each group's program, in order, and its number of experts. A group that no token is routed to does not
            run.
    """
    x, z, weights = np.split(hidden, [width, width + stream], axis=1)
    x, first = x.copy(), 0
    for program, count in experts:
        share = weights[:, first : first + count]
        if share.any():
            x[:, :stream] += program({"x": z, "weights": share})
        first += count
    return x


def load(build: Path, precision: str = "fp16") -> Engine:
    """Load the engine of a finished build folder.

    Args:
        build: the folder.
        precision: the portable engine's precision, "fp16" as the Neural Engine computes or "fp32"; ignored on Core ML.

    Raises:
        ShardmillError: if the folder is not a finished build.
    """
    manifest = read_manifest(build)
    missing = {"layers", "head"} - {part["kind"] for part in manifest["parts"]}
    if missing:
        raise ShardmillError(f"{build / 'model.json'} names no program of {max(missing)}; build again")
    manifest = loadable(manifest, build)
    with load_programs_as(precision):
        return Engine(manifest, build)
