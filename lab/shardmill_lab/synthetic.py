"""Writes a checkpoint of a given config's true size with seeded random weights, for work without a network.

The weights are bf16 and laid out as the hub's: same tensor names and shapes, files of at most 5 GB and an index.
They behave like a trained model's weights where it matters to a converter: projections keep unit variance, and a
few channels of the residual stream are outliers. A layer's output to the stream is scaled down by the model's depth
(the GPT-2 initialisation). The same seed gives the same bytes on any machine and with any number of threads.
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

from shardmill.checkpoint.headers import header_bytes
from shardmill.checkpoint.layout import text_files
from shardmill.checkpoint.paths import INDEX_FILE
from shardmill.errors import CheckpointError
from shardmill.files import replacing, write_json, write_text
from shardmill.models import DECODER, ENCODER, family, supported, type_fault
from shardmill.models.architecture import ModelDescription, TensorSource, blocks
from shardmill.models.contract import PER_LAYER
from shardmill.models.hf_config import FLOAT_TAG, model_description
from shardmill.models.part_kinds import model_constants, table_constants

MAX_FILE_BYTES = 5_000_000_000
BLOCK_ELEMENTS = 1 << 20
LOUD_CHANNELS = 6
LOUD_STREAM = 8.0  # weights that write to an outlier channel are this many times larger,
LOUD_NORM = 0.25  # the gain of a norm that reads the channel, which holds it down as trained norms do,
LOUD_COLUMN = 4.0  # the factor of the channel's column in a projection: the case that per-channel INT8 finds hard

DECIDED = 3.0  # the factor of a router's logits, so that the last expert that a token takes has little weight,
HUSHED = 0.5  # the factor of what experts write, so that another expert in its place changes little,
USUAL = 1.0  # the standard deviation of the labels' biases, as most tokens of a text have the same label

WRITERS = ("o_proj.weight", "down_proj.weight", "out_proj.weight")
ROUTERS = ("router.weight", "router.out_proj.weight")
FACTORS = ("_scale", "k_gain")  # vectors that multiply, and are about 1 in a trained model
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
WIDTHS = ("intermediate_size", "moe_intermediate_size")  # one of these settings is needed, too
MATRIX = 2

Bits = NDArray[np.uint16]


@dataclass(frozen=True)
class NormalWeights:
    """The normal distribution of drawn values."""

    mean: float
    std: float


@dataclass(frozen=True)
class SyntheticRecipe:
    """One tensor, drawn as [rows, columns]; a vector or number is one row. Channels along `axis` may be `loud`."""

    name: str
    shape: tuple[int, ...]
    usual: NormalWeights
    loud: NormalWeights
    axis: str = "columns"  # or "rows"

    @property
    def rows(self) -> int:
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:]) if len(self.shape) > 1 else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def write_synthetic_checkpoint(
    config: dict[str, Any],
    dest: Path,
    seed: int,
    *,
    tokenizer: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    threads: int = 4,
) -> None:
    """Write the checkpoint that `config` describes to the new folder `dest`.

    Memory is a few blocks of BLOCK_ELEMENTS per thread.

    Args:
        config: config.json's content, of any family that builds.
        dest: the new folder.
        seed: of the weights.
        tokenizer: a folder whose tokenizer files are copied.
        max_file_bytes: the most bytes of one weight file.
        threads: how many threads draw weights.

    Raises:
        CheckpointError: for a model_type that does not build, missing settings, a folder in the way, or too little
            space.
    """
    config = _with_infinities(config)
    recipes = list(_recipes(config))
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


def _recipes(config: dict[str, Any]) -> Iterator[SyntheticRecipe]:
    """Yield a recipe for each tensor of the checkpoint, in the order of a pass."""
    model = _described(config)
    a, g = model.architecture, model.architecture.graph
    table = config.get("initializer_range", 0.02)
    wanted = table_constants(a) | model_constants(a)
    made: set[str] = set()
    for path, shape in wanted.items():
        for source in blocks(model.sources[path]):
            if source.tensor not in made:  # a tied head, another column, or another expert of a stack
                made.add(source.tensor)
                yield _recipe(path, source, source.shape or shape, g.hidden, a.layers, table)
            for vector in (source.plus, source.by):
                if vector:
                    mean = float(vector == source.by)
                    yield SyntheticRecipe(vector, shape[-1:], NormalWeights(mean, table), NormalWeights(mean, table))
    for name, value in model.fixed.items():
        yield SyntheticRecipe(name, (), NormalWeights(value, 0.0), NormalWeights(value, 0.0))


def _with_infinities(content: Any) -> Any:
    """Return JSON's content with the numbers that transformers saves as objects, because JSON lacks them."""
    if isinstance(content, list):
        return [_with_infinities(value) for value in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {FLOAT_TAG}:
        number = str(content[FLOAT_TAG])
        if number not in ("Infinity", "-Infinity", "NaN"):
            raise CheckpointError(f"config.json: {FLOAT_TAG} is {number!r}, no number; correct it")
        return float(number)
    return {key: _with_infinities(value) for key, value in content.items()}


def _described(config: dict[str, Any]) -> ModelDescription:
    """Return the model of a config.json's content. Raises CheckpointError for one that can't be built."""
    from transformers import AutoConfig

    fault = type_fault(config.get("model_type"))
    if fault:
        raise CheckpointError(f"synthetic weights: {fault}")
    missing = [name for name in NEEDED if name not in config]
    missing += WIDTHS[:1] if not any(name in config for name in WIDTHS) else []
    if missing:
        raise CheckpointError(f"synthetic weights: config.json has no {missing[0]!r}; add it")
    rest = {key: value for key, value in config.items() if key != "model_type"}
    hf = AutoConfig.for_model(config["model_type"], **rest)
    kind = DECODER if config["model_type"] in supported(DECODER) else ENCODER
    return model_description(family(config["model_type"], kind), hf, 1)


def _recipe(
    path: str, source: TensorSource, shape: tuple[int, ...], hidden: int, layers: int, table: float
) -> SyntheticRecipe:
    """Return the recipe of a tensor, by its role in the program."""
    name = source.tensor
    if path in ("embedding", "positions", "types", "lm_head.weight"):
        return SyntheticRecipe(name, shape, NormalWeights(0.0, table), NormalWeights(0.0, LOUD_STREAM * table))
    if path == PER_LAYER:
        return _plain(name, shape, table)
    if path.endswith("norm.weight"):
        usual, loud = NormalWeights(1.0 - source.add, 0.1), NormalWeights(LOUD_NORM - source.add, 0.02)
        return SyntheticRecipe(name, shape, usual, loud if shape[0] == hidden else usual)
    if path.endswith(FACTORS):
        return SyntheticRecipe(name, shape, NormalWeights(1.0, 0.1), NormalWeights(1.0, 0.1))
    last = path.endswith(WRITERS) or bool(source.magnitude)  # of experts that share one, its factors may come first
    writes = last and "router" not in path  # to the residual stream, which each layer does twice
    scale = 1 / math.sqrt(2 * layers) if writes else DECIDED if path.endswith(ROUTERS) else 1.0
    scale *= HUSHED if writes and ".experts." in path else 1.0
    if len(shape) > MATRIX:  # experts on top of each other, and the taps of convolutions
        return _plain(name, shape, scale / math.sqrt(shape[-1]))
    if len(shape) < MATRIX:
        return _plain(name, shape, USUAL if path == "classifier.bias" else table)
    if writes:
        std = scale / math.sqrt(shape[-1])
        return SyntheticRecipe(name, shape, NormalWeights(0.0, std), NormalWeights(0.0, LOUD_STREAM * std), "rows")
    std = scale / math.sqrt(hidden)
    return SyntheticRecipe(name, shape, NormalWeights(0.0, std), NormalWeights(0.0, LOUD_COLUMN * std))


def _plain(name: str, shape: tuple[int, ...], std: float) -> SyntheticRecipe:
    """Return a tensor without outlier channels."""
    return SyntheticRecipe(name, shape, NormalWeights(0.0, std), NormalWeights(0.0, std))


def _split(recipes: list[SyntheticRecipe], limit: int) -> list[list[SyntheticRecipe]]:
    """Assign consecutive tensors to files of at most `limit` bytes (a larger tensor gets a separate file)."""
    files: list[list[SyntheticRecipe]] = [[]]
    for recipe in recipes:
        if files[-1] and sum(r.nbytes for r in files[-1]) + recipe.nbytes > limit:
            files.append([])
        files[-1].append(recipe)
    return files


def _write_file(path: Path, recipes: list[SyntheticRecipe], seed: int, threads: int) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for recipe in recipes:
        end = at + recipe.nbytes
        header[recipe.name] = {"dtype": "BF16", "shape": list(recipe.shape), "data_offsets": [at, end]}
        at = end
    prefix = header_bytes(header)
    with path.open("wb") as stream, ThreadPoolExecutor(threads) as pool:
        stream.write(prefix)
        stream.flush()
        os.truncate(path, len(prefix) + at)

        def write(recipe: SyntheticRecipe, first: int, last: int) -> None:
            block = draw_rows(recipe, first, last, seed)
            start = len(prefix) + header[recipe.name]["data_offsets"][0] + 2 * first * recipe.columns
            os.pwrite(stream.fileno(), block.data, start)

        for done in [pool.submit(write, *job) for recipe in recipes for job in _blocks(recipe)]:
            done.result()


def _blocks(recipe: SyntheticRecipe) -> Iterator[tuple[SyntheticRecipe, int, int]]:
    rows, step = recipe.rows, max(BLOCK_ELEMENTS // recipe.columns, 1)
    for first in range(0, rows, step):
        yield recipe, first, min(first + step, rows)


def draw_rows(recipe: SyntheticRecipe, first: int, last: int, seed: int) -> Bits:
    """Return bf16 bits of rows [first, last), where `first` begins a block: [last - first, columns]."""
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
    """Return the outlier channels of the residual stream, the same in every layer."""
    raw = np.random.SFC64(np.random.SeedSequence([seed, hidden])).random_raw(LOUD_CHANNELS)
    return np.unique(raw % np.uint64(hidden)).astype(np.int64)


@functools.cache
def _standard_quantiles() -> NDArray[np.float64]:
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / 65536) for i in range(65536)])


@functools.cache
def _quantiles(normal: NormalWeights) -> Bits:
    """Return bf16 bits of 65536 equally likely values, rounded to nearest even."""
    bits = (normal.mean + normal.std * _standard_quantiles()).astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_texts(folder: Path, config: dict[str, Any], tokenizer: Path | None) -> None:
    # Not by write_json, since a config may hold an infinity, which published ones spell as Python does.
    write_text(folder / "config.json", json.dumps(config, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    write_json(folder / "generation_config.json", {"_from_model_config": True, **tokens})
    if tokenizer is None:
        return
    if not tokenizer.is_dir():
        raise CheckpointError(f"{tokenizer}: no such folder; give one that holds tokenizer files")
    for name in text_files([entry.name for entry in tokenizer.iterdir()]):
        if not (folder / name).exists() and not name.startswith("model.safetensors"):
            shutil.copyfile(tokenizer / name, folder / name)
