"""Writes a checkpoint of a given config's true size with seeded random weights, for work without a network.

The weights are bf16 and laid out as the hub's: same tensor names and shapes, files of at most 5 GB and an index.
They behave like a trained model's where it matters to a converter: projections keep unit variance, what a layer
adds to the residual stream is scaled down by its depth (the GPT-2 initialisation), and a few channels of the
stream are outliers. The same seed gives the same bytes on any machine and with any number of threads.
"""

import functools
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardmill.checkpoint.layout import text_files
from shardmill.checkpoint.paths import INDEX_FILE
from shardmill.errors import CheckpointError
from shardmill.files import replacing, write_json

MAX_FILE_BYTES = 5_000_000_000
BLOCK_ELEMENTS = 1 << 20
LOUD_CHANNELS = 6
LOUD_STREAM = 8.0  # what writes to an outlier channel is this much larger,
LOUD_NORM = 0.25  # the norm that reads it holds it down, as trained norms do,
LOUD_COLUMN = 4.0  # and its column in a projection has larger weights: the case that per-channel INT8 finds hard

Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class Normal:
    """Where values are drawn from."""

    mean: float
    std: float


@dataclass(frozen=True)
class Recipe:
    """One tensor [rows, columns] (rows = 0: a vector of columns); `loud` is for outlier channels along `axis`."""

    name: str
    rows: int
    columns: int
    usual: Normal
    loud: Normal
    axis: str  # "rows" or "columns"

    @property
    def shape(self) -> list[int]:
        return [self.rows, self.columns] if self.rows else [self.columns]

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def synth_checkpoint(
    config: dict[str, Any],
    dest: Path,
    seed: int,
    *,
    tokenizer: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    threads: int = 4,
) -> None:
    """Writes the checkpoint that `config` (a phi3 config.json's content) describes to the new folder `dest`.

    `tokenizer` is a folder whose tokenizer files are copied. Memory is a few blocks of BLOCK_ELEMENTS per thread.
    Raises CheckpointError for another model_type, missing settings, a folder in the way, or too little space.
    """
    recipes = list(_phi3_recipes(config))
    total = sum(recipe.nbytes for recipe in recipes)
    if dest.exists():
        raise CheckpointError(f"{dest}: is there already; remove it or choose another folder")
    dest.parent.mkdir(parents=True, exist_ok=True)
    if total > shutil.disk_usage(dest.parent).free:
        raise CheckpointError(f"{dest}: disk full, {total / 1e9:.1f} GB to write; free space")
    files = _split(recipes, max_file_bytes)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    with replacing(dest) as folder:
        folder.mkdir()
        for name, members in zip(names, files, strict=True):
            _write_file(folder / name, members, seed, threads)
        weight_map = {r.name: name for name, members in zip(names, files, strict=True) for r in members}
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _write_texts(folder, config, tokenizer)


def _phi3_recipes(config: dict[str, Any]) -> Iterator[Recipe]:
    if config.get("model_type") != "phi3":
        raise CheckpointError(f"synthetic weights for model_type {config.get('model_type')!r}: only phi3 is known")
    try:
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
        vocab, kv_heads = config["vocab_size"], config["num_key_value_heads"]
    except KeyError as error:
        raise CheckpointError(f"synthetic weights: config.json has no {error}; add it") from error
    head_dim = config.get("head_dim") or hidden // heads
    added = 1 / math.sqrt(2 * layers)  # each layer adds to the residual stream twice
    table = config.get("initializer_range", 0.02)
    yield _writer("model.embed_tokens.weight", vocab, hidden, table, "columns")
    for index in range(layers):
        p = f"model.layers.{index}."
        yield _norm(p + "input_layernorm.weight", hidden)
        yield _reader(p + "self_attn.qkv_proj.weight", (heads + 2 * kv_heads) * head_dim, hidden)
        yield _writer(p + "self_attn.o_proj.weight", hidden, heads * head_dim, added / math.sqrt(heads * head_dim))
        yield _norm(p + "post_attention_layernorm.weight", hidden)
        yield _reader(p + "mlp.gate_up_proj.weight", 2 * ffn, hidden)
        yield _writer(p + "mlp.down_proj.weight", hidden, ffn, added / math.sqrt(ffn))
    yield _norm("model.norm.weight", hidden)
    if not config.get("tie_word_embeddings", False):
        yield _writer("lm_head.weight", vocab, hidden, table, "columns")


def _norm(name: str, hidden: int) -> Recipe:
    return Recipe(name, 0, hidden, Normal(1.0, 0.1), Normal(LOUD_NORM, 0.02), "columns")


def _reader(name: str, rows: int, hidden: int) -> Recipe:
    std = 1 / math.sqrt(hidden)
    return Recipe(name, rows, hidden, Normal(0.0, std), Normal(0.0, LOUD_COLUMN * std), "columns")


def _writer(name: str, rows: int, columns: int, std: float, axis: str = "rows") -> Recipe:
    return Recipe(name, rows, columns, Normal(0.0, std), Normal(0.0, LOUD_STREAM * std), axis)


def _split(recipes: list[Recipe], limit: int) -> list[list[Recipe]]:
    """Consecutive tensors to files of at most `limit` bytes (a larger tensor gets a file of its own)."""
    files: list[list[Recipe]] = [[]]
    for recipe in recipes:
        if files[-1] and sum(r.nbytes for r in files[-1]) + recipe.nbytes > limit:
            files.append([])
        files[-1].append(recipe)
    return files


def _write_file(path: Path, recipes: list[Recipe], seed: int, threads: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for recipe in recipes:
        end = at + recipe.nbytes
        header[recipe.name] = {"dtype": "BF16", "shape": recipe.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream, ThreadPoolExecutor(threads) as pool:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.flush()
        os.truncate(path, 8 + len(text) + at)

        def write(recipe: Recipe, first: int, last: int) -> None:
            block = draw_rows(recipe, first, last, seed)
            start = 8 + len(text) + header[recipe.name]["data_offsets"][0] + 2 * first * recipe.columns
            os.pwrite(stream.fileno(), block.data, start)

        for done in [pool.submit(write, *job) for recipe in recipes for job in _blocks(recipe)]:
            done.result()


def _blocks(recipe: Recipe) -> Iterator[tuple[Recipe, int, int]]:
    rows, step = max(recipe.rows, 1), max(BLOCK_ELEMENTS // recipe.columns, 1)
    for first in range(0, rows, step):
        yield recipe, first, min(first + step, rows)


def draw_rows(recipe: Recipe, first: int, last: int, seed: int) -> Bits:
    """bf16 bits of rows [first, last), where `first` begins a block: [last - first, columns]."""
    shape = (last - first, recipe.columns)
    source = np.random.SFC64(np.random.SeedSequence([seed, zlib.crc32(recipe.name.encode()), first]))
    # 16 random bits choose one of 65536 quantiles: as exact as bf16 asks for, and a table look-up is quick.
    uniform = source.random_raw(-(-math.prod(shape) // 4)).astype("<u8", copy=False).view("<u2")
    uniform = uniform[: math.prod(shape)].reshape(shape)
    block: Bits = _quantiles(recipe.usual).take(uniform, mode="clip")
    channels = _loud_channels(recipe.rows if recipe.axis == "rows" else recipe.columns, seed)
    loud = _quantiles(recipe.loud)
    if recipe.axis == "columns":
        block[:, channels] = loud[uniform[:, channels]]
    else:
        rows = channels[(channels >= first) & (channels < last)] - first
        block[rows] = loud[uniform[rows]]
    return block


def _loud_channels(hidden: int, seed: int) -> NDArray[np.int64]:
    """The outlier channels of the residual stream, the same in every layer."""
    raw = np.random.SFC64(np.random.SeedSequence([seed, hidden])).random_raw(LOUD_CHANNELS)
    return np.unique(raw % np.uint64(hidden)).astype(np.int64)


@functools.cache
def _standard_quantiles() -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)])


@functools.cache
def _quantiles(normal: Normal) -> Bits:
    """bf16 bits of 65536 equally likely values, rounded to nearest even."""
    bits = (normal.mean + normal.std * _standard_quantiles()).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_texts(folder: Path, config: dict[str, Any], tokenizer: Path | None) -> None:
    write_json(folder / "config.json", config)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
    if tokenizer is None:
        return
    if not tokenizer.is_dir():
        raise CheckpointError(f"{tokenizer}: no such folder; give one that holds tokenizer files")
    for name in text_files([entry.name for entry in tokenizer.iterdir()]):
        if not (folder / name).exists() and not name.startswith("model.safetensors"):
            shutil.copyfile(tokenizer / name, folder / name)
