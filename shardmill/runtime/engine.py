"""The programs of a built model as one causal language model: tokens in, logits out.

The host does what the graph contract leaves to it: embedding lookup, rotary tables, masks, and the chaining of parts.
What a token may see is decided here and nowhere else: token t sees slot s if and only if s was last written with a
position <= positions[t]. So a rejected draft's slots are hidden until they are written again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.errors import ShardmillError
from shardmill.machine import load_programs_as
from shardmill.runtime.manifest import read_manifest

Floats = NDArray[np.float32]
MASKED = np.float32(-1e4)  # never -inf: the Neural Engine's softmax turns it into NaN (rule N4)
NEVER = np.iinfo(np.int64).max


def rope_tables(rope: Mapping[str, Any], positions: int) -> tuple[Floats, Floats]:
    """cos and sin for every position, [positions, rope_dim / 2], LongRoPE's attention factor included."""
    angles = np.arange(positions, dtype=np.float32)[:, None] * np.asarray(rope["inv_freq"], np.float32)
    scale = np.float32(rope["scale"])
    return np.cos(angles) * scale, np.sin(angles) * scale


class Program:
    """One loaded Core ML program, a compiled bundle or a package, with its state."""

    def __init__(self, path: Path, stateful: bool, compute_units: str = "CPU_AND_NE") -> None:
        import coremltools as ct

        self.name, self.path = path.stem, path
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # for who wants to watch it run
        try:
            load = ct.models.CompiledMLModel if path.suffix == ".mlmodelc" else ct.models.MLModel
            self.model = load(str(path), compute_units=ct.ComputeUnit[compute_units])
            self.state = self.model.make_state() if stateful else None
        except Exception as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ShardmillError(f"{path} can't be loaded: {first}") from error

    def __call__(self, inputs: Mapping[str, Floats]) -> Floats:
        """The program's one output."""
        with self.around():
            outputs = self.model.predict(dict(inputs), state=self.state)
        (result,) = outputs.values()
        return np.asarray(result, dtype=np.float32)


class Engine:
    """A built model, resident: implements the protocol of shardmill.decode.engine."""

    def __init__(self, manifest: Mapping[str, Any], root: Path, positions: int | None = None) -> None:
        """Args: model.json's content; the folder its paths start from; how many positions the rotary tables hold
        (default: as many as there are slots)."""
        self.slots: int = manifest["context"]
        self.vocab: int = manifest["vocab"]
        self.widths: tuple[int, ...] = tuple(manifest["widths"])
        self.max_tokens: int = manifest["tokens_max"]
        self.table = read_table(root / manifest["embedding"]["path"])  # [vocab, d] fp16
        self.cos, self.sin = rope_tables(manifest["rope"], positions or self.slots)
        parts = [(part, root / part["program"]["path"]) for part in manifest["parts"]]
        self.layers = [Program(path, stateful=True) for part, path in parts if part["kind"] == "layers"]
        self.heads = [Program(path, stateful=False) for part, path in parts if part["kind"] == "head"]
        self.held = np.full(self.slots, NEVER)  # position that each slot was last written with

    def reset(self) -> None:
        """Forgets every slot. What the states hold is masked until it is overwritten."""
        self.held[:] = NEVER

    def forget(self, slots: Sequence[int]) -> None:
        """Hides slots until they are written again."""
        self.held[list(slots)] = NEVER

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """Writes each token's key and value into its slot and returns float32 logits [T, vocab]."""
        hidden = self.hidden(tokens, slots, positions)
        logits = [head({"hidden": hidden})[0, :, :, 0] for head in self.heads]  # each [V_j, T]
        return np.concatenate(logits).T

    def write(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> None:
        """`forward` without the logits: the LM head does not run."""
        self.hidden(tokens, slots, positions)

    def hidden(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Floats:
        """The last layer's output [1, d, T, 1]."""
        x = self.table[list(tokens)].astype(np.float32).T[None, :, :, None]  # [1, d, T, 1]
        shared = self.shared_inputs(slots, positions)
        for part in self.layers:
            x = part({"x": x, **shared})
        return x

    def shared_inputs(self, slots: Sequence[int], positions: Sequence[int]) -> dict[str, Floats]:
        """Rotary rows and masks of a pass; marks its slots as written."""
        at, where = np.asarray(positions), np.asarray(slots)
        self.held[where] = at
        return {
            "rope_cos": self.cos[at],  # [T, rope_dim / 2]
            "rope_sin": self.sin[at],
            "attn_mask": attention_mask(self.held, at),
            "kv_write_mask": write_mask(self.slots, where),
        }


def read_table(file: Path) -> NDArray[np.float16]:
    """The host's embedding table [vocab, d]. Raises ShardmillError for a file that holds none."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # maps the file, where safetensors.numpy reads all of it

    try:
        table: NDArray[np.float16] = load_file(file)["embedding"].numpy()
    except (OSError, SafetensorError, KeyError) as error:
        raise ShardmillError(f"{file} can't be read as the embedding table: {error}; build again") from error
    return table


def attention_mask(held: NDArray[np.int64], positions: NDArray[np.int64]) -> Floats:
    """[1, 1, T, S]: 0 where slot s holds a position <= the token's, else -1e4."""
    visible = held[None, :] <= positions[:, None]
    return np.where(visible, np.float32(0), MASKED)[None, None]


def write_mask(slots: int, where: NDArray[np.int64]) -> Floats:
    """[1, 1, S, T], one-hot: row s, column t = 1 writes token t into slot s."""
    mask = np.zeros((1, 1, slots, len(where)), np.float32)
    mask[0, 0, where, np.arange(len(where))] = 1
    return mask


def load(build: Path, precision: str = "fp16", **options: Any) -> Engine:
    """The engine of a finished build folder. Raises ShardmillError where it is not one.

    `precision` is the portable engine's, "fp16" as the Neural Engine computes or "fp32"; Core ML has no choice.
    """
    manifest = read_manifest(build)
    with load_programs_as(precision):
        return Engine(manifest, build, **options)
