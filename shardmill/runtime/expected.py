"""What each program of a build must give for inputs that any machine can make: the results that `check` compares.

The inputs are numbers of one integer generator, so a build carries seeds in their place. docs/model-json.md describes
the generator, the file and the passes; a runtime in another language compares with the same results. Programs keep
what earlier passes have left behind in their slots, as in use: only masks may hide it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from kit_runner.compute_plan import planned
from kit_runner.figures import relative_error
from numpy.typing import NDArray

from shardmill import files
from shardmill.errors import ShardmillError
from shardmill.files import parse_json
from shardmill.machine import is_portable, load_programs_as, native_call
from shardmill.models.tower import KEY_MASK
from shardmill.runtime.bundles import reshaping
from shardmill.runtime.kv import Floats, KVLayout
from shardmill.runtime.manifest import bucket_of, of_drafter, reshape_frequency
from shardmill.runtime.program import Program, function_location, written_slots

if TYPE_CHECKING:
    from shardmill.runtime.encoder import Encoder
    from shardmill.runtime.engine import Engine
    from shardmill.runtime.tower import Tower

ABOUT = "about"  # the file's one entry of metadata
FORMAT = 1
ROWS = 7  # tokens of a decoder's sequence, and rows that are compared of an encoder's text
PLACES, LARGEST = 256, 10  # logits of a row that are recorded: at places that a seed chooses, and the largest ones
LAYERS = "layers"  # the kind of parts whose tokens have slots
FULL, LAST = "a full bucket", "the last slots"
NEAR_TIE = "near tie"  # begins what is said of tokens that may change places
GOLDEN, FIRST, SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def numbers(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first `count` numbers of a seed: SplitMix64."""
    state = np.uint64(seed) + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN
    state = (state ^ (state >> np.uint64(30))) * FIRST
    state = (state ^ (state >> np.uint64(27))) * SECOND
    return state ^ (state >> np.uint64(31))


def rows(seed: int, exponent: int, count: int, channels: int) -> Floats:
    """Return numbers of a seed between +-2^exponent, each exact in fp16: [count, channels]."""
    odd = 2 * (numbers(seed, count * channels) >> np.uint64(54)).astype(np.int64) - 1023
    return (odd.reshape(count, channels) * 2.0 ** (exponent - 10)).astype(np.float32)


def shares(count: int, experts: int, taken: int) -> Floats:
    """Return the weights of a group's experts, where each row takes `taken` experts, in turn: [count, experts]."""
    row, number = np.arange(count)[:, None], np.arange(taken)
    weights = np.zeros((count, experts), np.float32)
    np.put_along_axis(weights, (row * taken + number) % experts, (1 + row % 3) / 4 / 2.0**number, 1)
    return weights


def below(seed: int, count: int, limit: int) -> list[int]:
    """Return integers of a seed from 0 to `limit` - 1: the tokens of an encoder's text, or places of logits."""
    return [int(number) for number in numbers(seed, count) % np.uint64(limit)]


@dataclass(frozen=True)
class Way:
    """Passes that feed the tokens of a sequence, each at the position of its number.

    Attributes:
        name: what a person reads.
        passes: first and last token of each pass, [start, stop), and the tokens that it has when it is filled up.
        offset: added to a position to get its slot.
    """

    name: str
    passes: Sequence[tuple[int, int, int]]
    offset: int = 0


def ways(count: int, widths: Sequence[int], slots: int, whole: int, fills: bool = True) -> list[Way]:
    """Return the ways in which a decoder's program is run: token by token, in a wide pass, and in the last slots.

    Args:
        count: tokens of the sequence.
        widths: the widths of passes in model.json.
        slots: of the shortest context.
        whole: slots of the whole context.
        fills: whether the host fills a pass up to the next width, and not the program.
    """
    one, last, start = [(t, t + 1, 1) for t in range(count)], [], 0
    while start < count:  # no slot is left for a token that fills a pass up
        taken = max((width for width in widths if width <= count - start), default=count - start)
        last.append((start, start + taken, taken))
        start += taken
    wide = _wide_passes(count, widths, slots, fills)
    return [Way("T=1", one), Way(f"T={max(widths)}", wide), Way(LAST, last, whole - count)]


def _wide_passes(count: int, widths: Sequence[int], slots: int, fills: bool = True) -> list[tuple[int, int, int]]:
    """Return passes of the widest width, see `Way`; if the host fills passes up, a narrower one to the next width."""
    passes = []
    for start in range(0, count, max(widths)):
        stop = min(start + max(widths), count)
        fitting = (width for width in widths if fills and stop - start <= width <= slots - start)
        passes.append((start, stop, min(fitting, default=stop - start)))
    return passes


def grids(bucket: int, rules: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return the grids of patches with which a tower's program is run: rows and columns of each.

    The first does not fill the bucket and is not square, the second is the smallest, and the third fills it. A tower
    that takes images of one size only has that grid alone. Of a tower for sounds, the last chunk of the first is cut.

    Args:
        bucket: tokens of the program.
        rules: model.json's `tower`.
    """
    if "chunk" in rules:
        whole = bucket // rules["rows"] * rules["chunk"]
        cut = max(whole - 2 * rules["chunk"], 0) + rules["chunk"] * 3 // 8  # a chunk at least is left, or most of one
        return [(1, frames) for frames in dict.fromkeys([cut, 1, whole])]
    if "grid" in rules:
        return [tuple(rules["grid"])]
    merge = rules["merge"]
    room = bucket // merge**2
    down = next((n for n in range(isqrt(max(room - 1, 1) // 2), 0, -1)), 1)
    across = max((room - 1) // down, 1)
    tall = next(n for n in range(isqrt(room), 0, -1) if room % n == 0)
    chosen = dict.fromkeys([(down, across), (1, 1), (room // tall, tall)])
    return [(rows_down * merge, columns * merge) for rows_down, columns in chosen]


def made_columns(x: Sequence[int], seed: int, exponent: int, grid: tuple[int, int], rules: Mapping[str, Any]) -> Floats:
    """Return made-up columns of an image of patches, or of a window's frames, as `Tower.rows` takes them.

    Args:
        x: the shape of the program's input.
        seed: see `rows`.
        exponent: see `rows`.
        grid: rows and columns of patches, or 1 and the number of frames.
        rules: model.json's `tower`.
    """
    numbers = x[2] if "chunk" in rules else x[1] // rules["frames"]
    return rows(seed, exponent, grid[0] * grid[1], numbers).T.copy()


@dataclass(frozen=True)
class Recorded:
    """What a part must give.

    Attributes:
        seeds: for each input that is made of numbers, its seed and its exponent, lent caches included; of an encoder
            also `tokens`, of logits `places`.
        limits: the largest relative error of a row, by precision.
        rows: by way, or for all ways as "", the results: [n, kept channels], or logits at the places and the largest.
        largest: of logits, where the largest stand in each row, [n, LARGEST].
        every: the step between the channels that are kept.
        taken: of a group of experts, how many of them each row takes.
        why_not: why nothing was recorded; empty if something was.
    """

    seeds: Mapping[str, tuple[int, int]]
    limits: Mapping[str, float]
    rows: Mapping[str, Floats]
    largest: NDArray[np.int32] | None = None
    every: int = 1
    taken: int = 0
    why_not: str = ""


@dataclass(frozen=True)
class Answer:
    """The greedy continuation of a prompt.

    Attributes:
        prompt: the tokens to begin with.
        tokens: the tokens that follow.
        rivals: for each of these, the token with the next largest logit, and by how much it is less.
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    rivals: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Expected:
    """The content of the file."""

    parts: Mapping[str, Recorded]
    answer: Answer | None


def read_expected(file: Path) -> Expected:
    """Return what a build's programs must give. Raises ShardmillError if the file can't be read."""
    from safetensors import SafetensorError, safe_open

    try:
        files.check(file)
        with safe_open(file, "np") as opened:
            about = parse_json((opened.metadata() or {})[ABOUT])
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        if about["format"] != FORMAT:
            raise ValueError(f"its format is {about['format']}, not {FORMAT}")
        parts = {name: _recorded(name, entry, arrays) for name, entry in about["parts"].items()}
        answer = about.get("answer")
        return Expected(parts, Answer(answer["prompt"], answer["tokens"], answer["rivals"]) if answer else None)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ShardmillError(f"{file}: can't be read as expected results ({error}); pull or build again") from error


def _recorded(name: str, entry: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> Recorded:
    recorded = {key.removeprefix(f"{name}/"): array for key, array in arrays.items() if key.startswith(f"{name}/")}
    largest = recorded.pop("largest", None)
    listed = entry.get("seeds") or entry.get("inputs", {})
    seeds = {key: (int(seed), int(exponent)) for key, (seed, exponent) in listed.items()}
    by_way = {key.removeprefix("rows").removeprefix("/"): array for key, array in recorded.items()}
    why_not = "" if seeds else entry.get("why_not", "")  # both are there for readers that know no `taken` or `inputs`
    every, taken = entry.get("every", 1), entry.get("taken", 0)
    return Recorded(seeds, entry.get("limits", {}), by_way, largest, every, taken, why_not)


def picked(logits: Floats, recorded: Recorded) -> Floats:
    """Return the logits [n, rows] that are compared: at the seed's places, at the largest ones', and the maximum."""
    columns = compared_columns(recorded, logits.shape[1], 0)
    return np.column_stack([np.take_along_axis(logits, columns, axis=1), logits.max(axis=1)])


def compared_columns(recorded: Recorded, channels: int, count: int) -> NDArray[np.int64]:
    """Return which channels of results [n, channels] are compared, in order: of logits [n, k], otherwise [1, count]."""
    if recorded.largest is None:
        return np.arange(channels)[:: recorded.every][None, :count]
    at = below(recorded.seeds["places"][0], PLACES, channels)
    return np.column_stack([np.tile(at, (len(recorded.largest), 1)), recorded.largest]).astype(np.int64)


def limit(recorded: Recorded, precision: str) -> float:
    """Return the largest relative error that a part may have, on this machine's engine in its precision."""
    return float(recorded.limits["fp32" if is_portable() and precision == "fp32" else "fp16"])


def decoder_errors(engine: Engine, name: str, recorded: Recorded) -> Iterator[tuple[str, float]]:
    """Run a part of a decoder on its own, in all ways, and yield how far its results are from the recorded ones.

    Args:
        engine: the loaded model; its slots are forgotten.
        name: the part's name.
        recorded: what the part must give.
    """
    entry, count = next(part for part in engine.manifest["parts"] if part["name"] == name), min(ROWS, engine.slots)
    shapes, elsewhere = entry["inputs"], {n for key in ("written", "lent", "adapters") for n in entry.get(key, ())}
    program, host = _beside(engine, entry) if entry.get("drafter") else (_loaded(engine, name), engine.host)
    inputs = {
        key: rows(seed, exponent, count, shapes[key][1] * (shapes[key][3] if key in program.lent else 1))
        for key, (seed, exponent) in recorded.seeds.items()
        if key in shapes
    }
    if recorded.taken:
        inputs["weights"] = shares(count, shapes["weights"][1], recorded.taken)
    is_layers = entry["kind"] == LAYERS
    names = [each for each in shapes if each not in elsewhere] if is_layers else [*inputs]
    for way in ways(count, engine.widths, engine.lengths[0], engine.slots, not engine.pads):
        engine.reset()
        if is_layers and way.offset:
            engine.fit(engine.slots)
        if host is not engine.host:
            host.reset()
            host.resize(engine.host.length)
            program.move(engine.host.length, keep=False)
        outputs = _run(program, names, inputs, way, host if is_layers else None)
        yield way.name, _error(outputs, recorded, "")
    engine.reset()


def _loaded(engine: Engine, name: str) -> Program:
    return next(each for each in (*engine.programs, *engine.label_heads) if each.name == name)


def _beside(engine: Engine, entry: Mapping[str, Any]) -> tuple[Program, KVLayout]:
    """Load a drafter's program by itself; return it with the positions in its slots, and let it read lent caches."""
    with load_programs_as(engine.heads[0].precision), reshaping(reshape_frequency(engine.manifest)):
        program = Program(engine.root / entry["program"]["path"], entry, engine.slots)
    program.borrow(part.program for part in engine.layers)
    return program, KVLayout(of_drafter(engine.manifest))


def _error(outputs: Floats, recorded: Recorded, way: str) -> float:
    expected = recorded.rows[way]
    if recorded.largest is not None:
        return relative_error(picked(outputs, recorded), np.column_stack([expected, expected[:, PLACES]]))
    return relative_error(outputs[:, compared_columns(recorded, outputs.shape[1], expected.shape[1])[0]], expected)


def _run(
    program: Program, names: Sequence[str], inputs: Mapping[str, Floats], way: Way, host: KVLayout | None
) -> Floats:
    """Return a program's outputs [n, channels] for rows [n, channels] that are fed in one of the ways."""
    outputs = []
    for start, stop, width in way.passes:
        at = range(start, start + width)
        arrays = host.arrays([position + way.offset for position in at], at) if host else {}
        taken = [min(position, stop - 1) for position in at]
        for name, lender in program.borrowed.items():
            cache = lender.arrays[name]  # [1, heads, slots, head_dim]
            cache[:, :, written_slots(cache.shape[2], arrays)] = (
                inputs[name][taken].reshape(len(taken), cache.shape[1], cache.shape[3]).swapaxes(0, 1)
            )
        arrays |= {name: values[taken].T[None, :, :, None] for name, values in inputs.items()}
        outputs.append(program({name: arrays[name] for name in names})[0, :, : stop - start, 0].T)
    return np.concatenate(outputs)


def lengths_of(bucket: int) -> dict[str, list[int]]:
    """Return the texts with which an encoder's program is run: by way, the rows of the text that are compared.

    The text of a way ends with its last row.
    """
    few = min(ROWS, bucket)
    return {"one token": [0], f"{few} tokens": [*range(few)], FULL: spread(bucket)}


def encoder_errors(encoder: Encoder, name: str, recorded: Recorded) -> Iterator[tuple[str, float]]:
    """Do what `decoder_errors` does for a program of an encoder's bucket."""
    part = encoder.parts[name]
    bucket, channels = bucket_of(encoder.manifest, part), part["inputs"]["x"][1]
    embedded = encoder.embedded(below(recorded.seeds["tokens"][0], bucket, encoder.manifest["vocab"]))
    x = rows(*recorded.seeds["x"], bucket, channels) if "x" in recorded.seeds else embedded
    for way, at in lengths_of(bucket).items():
        outputs = encoder.through_part(name, bucket, x[: at[-1] + 1], embedded[: at[-1] + 1])
        yield way, _error(outputs[at][: len(recorded.rows[way])], recorded, way)


def tower_errors(tower: Tower, part: Mapping[str, Any], recorded: Recorded) -> Iterator[tuple[str, float]]:
    """Do what `decoder_errors` does for a program of a tower; `part` is its entry in model.json."""
    bucket, seed, rules = part["inputs"][KEY_MASK][-1], recorded.seeds["x"], tower.rules
    for grid in grids(bucket, rules):
        columns = made_columns(part["inputs"]["x"], *seed, grid, rules)
        outputs = tower.rows(columns, grid, bucket) / np.float32(rules["scale"])
        way = f"{grid[0]} x {grid[1]}"
        yield way, _error(outputs[spread(len(outputs))], recorded, way)


def spread(count: int) -> list[int]:
    """Return which of an image's rows are compared: at most ROWS, spread from the first to the last."""
    few = min(ROWS, count)
    return [i * (count - 1) // max(few - 1, 1) for i in range(few)]


def first_answer(engine: Engine, answer: Answer, margin: float) -> str:
    """Continue a prompt; return what differs from the recorded answer, "" if nothing does.

    Args:
        engine: the loaded model; its slots are forgotten.
        answer: what it must answer.
        margin: how close two logits may be that can change places, see model.json. A text with such a near tie is
            named, and begins with NEAR_TIE: what follows it is not compared.
    """
    engine.reset()
    fed, last = [*answer.prompt, *answer.tokens], len(answer.prompt) - 1
    for start, stop, width in _wide_passes(last, engine.widths, engine.slots, not engine.pads):
        at = range(start, start + width)
        engine.write([fed[min(position, stop - 1)] for position in at], at, at)
    for number, (token, (rival, gap)) in enumerate(zip(answer.tokens, answer.rivals, strict=True)):
        (logits,) = engine.forward([fed[last + number]], [last + number], [last + number])
        likeliest = int(logits.argmax())
        if likeliest == token:
            continue
        said = f"token {number + 1} is {likeliest}, not {token}"
        close = likeliest == rival and gap <= margin
        return f"{NEAR_TIE}: {said}, {gap:.2g} less likely in logits" if close else said
    return ""


def planned_operations(program: Program) -> list[dict[str, Any]]:
    """Return where Core ML will run each operation of a loaded program, see `kit_runner.compute_plan.planned`.

    A plan is of the program's default shape, and of its default function or of the function with a bundle of its own.
    """
    path, _ = function_location(program.path, next(iter(program.models)))
    with native_call():
        return list(planned(path))
