"""Records the inputs and outputs of a build's programs: in fp32, and with fp16 rounding as they are shipped.

The portable engine runs a short text in passes of each width, with all parts chained, in fp32. Every part then runs
again with the same inputs in fp16. A device's outputs are compared with both.
"""

from __future__ import annotations

import hashlib
import io
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import portable_coreml

from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import ShardmillError
from shardmill.evidence.file import Evidence, file_name, of_build, read_result
from shardmill.evidence.folder import FOLDER
from shardmill.files import replacing
from shardmill.machine import load_programs_as
from shardmill.pipeline.ungated import taken_ungated
from shardmill.runtime import engine
from shardmill.runtime.encoder import Encoder
from shardmill.runtime.expected import ROWS as ROWS_OF_CHECK
from shardmill.runtime.expected import (
    compared_columns,
    decoder_errors,
    encoder_errors,
    lengths_of,
    read_expected,
    ways,
)
from shardmill.runtime.kv import Floats
from shardmill.runtime.manifest import COMPLETE, EXPECTED, MARK, bucket_of, read_manifest
from shardmill.runtime.program import Program


def import_result(file: Path, builds: Sequence[Path]) -> list[tuple[Path, Evidence]]:
    """Copy a result beside the builds that it measured.

    Args:
        file: result.json of measure.py.
        builds: folders of finished builds.

    Returns:
        Each build, the imported file, and its evidence for that build.

    Raises:
        ShardmillError: the file is not a result or was changed, it measured none of the builds, or a build has another
            result of the same chip and system.
    """
    content = read_result(file)
    measured = []
    for build in builds:
        target = build / FOLDER / file_name(content)
        with taken_ungated(build) as folder:
            evidence = of_build(target, content, read_manifest(folder, COMPLETE))
        if evidence is not None:
            measured.append((build, target, evidence))
    if not measured:
        if not builds:
            raise ShardmillError(f"{file}: there is no finished build here; name the build that was measured")
        names = ", ".join(map(str, builds))
        raise ShardmillError(f"{file}: its programs ({', '.join(content['variants'])}) are not those of {names}")
    for _, target, _ in measured:
        if target.parent.exists() and not target.parent.is_dir():
            raise ShardmillError(f"{target.parent}: is not a folder, so it can't hold evidence; remove it")
        if target.is_dir() or (target.exists() and target.read_bytes() != file.read_bytes()):
            raise ShardmillError(f"{target} holds another run on that chip and system; remove it to take this one")
    for _, target, _ in measured:
        with replacing(target) as temporary:
            shutil.copyfile(file, temporary)
    return [(target, evidence) for _, target, evidence in measured]


TEXT = "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n"
TOKENS = 8  # least number of tokens for every width, in at least two passes
ROWS = 4096  # the most output channels of a program that are recorded, evenly spaced
Row = dict[str, dict[str, Any]]  # one pass: for each part the keys of `inputs`, `fp32` and `fp16`, and the stride


@dataclass
class Arrays:
    """Recorded arrays by content: parts share most of their inputs."""

    files: dict[str, bytes] = field(default_factory=dict)

    def add(self, array: Floats) -> str:
        """Store an array and return its key; float16 is used if it is lossless."""
        half = array.astype(np.float16)
        stored = half if np.array_equal(half.astype(np.float32), array) else array
        written = io.BytesIO()
        np.lib.format.write_array(written, np.ascontiguousarray(stored), version=(1, 0), allow_pickle=False)
        content = written.getvalue()
        key = hashlib.sha256(content).hexdigest()[:32]
        self.files[key] = content
        return key

    def __getitem__(self, key: str) -> Floats:
        """Return an array in float32."""
        array = np.lib.format.read_array(io.BytesIO(self.files[key]), allow_pickle=False)
        return np.asarray(array, np.float32)


@dataclass(frozen=True)
class Recording:
    """The recorded passes of a build.

    Attributes:
        passes: by width, pass by pass.
        tokens: by width, the likeliest token after each input token; empty for an encoder.
        checks: by part, what `shardmill check` feeds it in each way, and the results that the build carries.
    """

    passes: dict[int, list[Row]]
    tokens: dict[int, list[int]]
    checks: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


class _Tap:
    """A wrapper of a loaded model that records inputs and outputs."""

    def __init__(self, program: Program, model: Any, note: Callable[[str, Mapping[str, Floats], Floats], None]) -> None:
        self.program, self.model, self.note = program, model, note

    def predict(self, data: Mapping[str, Floats], state: Any = None) -> dict[str, Any]:
        """Run the model and record its inputs and its output."""
        inputs = {name: np.array(value, np.float32) for name, value in data.items()}
        outputs: dict[str, Any] = self.model.predict(dict(data), state=state)
        self.note(self.program.name, inputs, self.program.result(outputs))
        return outputs


def record(build: Path, manifest: Mapping[str, Any], arrays: Arrays) -> Recording:
    """Run a build's packages on the portable engine, even on a Mac, whose bundles are Apple's.

    Args:
        build: the folder.
        manifest: its model.json, as if it had one context only.
        arrays: stores the recorded arrays.

    Raises:
        ShardmillError: a program can't be loaded.
    """
    tokens, manifest = _text(build, manifest), _of_packages(manifest)
    run = _encoder if MARK in manifest else _decoder
    with portable_coreml.emulated():
        recording = run(build, manifest, tokens, arrays)
        for part in manifest["parts"]:
            _shipped(build, part, recording.passes, arrays)
    return recording


def _of_packages(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with each part's package in place of its compiled program."""
    packages = manifest["packages"]
    parts = [part | {"program": {"path": packages[part["name"]]["path"]}} for part in manifest["parts"]]
    return {**manifest, "parts": parts}


def _stride(channels: int) -> int:
    """Return the step between recorded output channels of a program."""
    return max(1, math.ceil(channels / ROWS))


def _text(build: Path, manifest: Mapping[str, Any]) -> list[int]:
    """Return the tokens of a text that every tokenizer knows."""
    tokens: list[int] = read_tokenizer(build / manifest["tokenizer"]["path"]).encode(TEXT).ids
    return tokens or [0]


def _decoder(build: Path, manifest: Mapping[str, Any], text: Sequence[int], arrays: Arrays) -> Recording:
    with load_programs_as("fp32"):
        loaded = engine.Engine(manifest, build)
    recording, row = Recording({}, {}), _noted([*loaded.programs, *loaded.label_heads], arrays)
    for width in loaded.widths:
        count = min(max(2, math.ceil(TOKENS / width)), loaded.slots // width)
        fed = (list(text) * math.ceil(count * width / len(text)))[: count * width]
        recording.passes[width], recording.tokens[width] = [], []
        loaded.reset()
        for start in range(0, count * width, width):
            at = range(start, start + width)
            hidden = loaded.hidden(fed[start : start + width], at, at)
            logits = loaded.logits(hidden)
            for head in loaded.label_heads:
                head({"hidden": hidden})
            recording.tokens[width] += [int(token) for token in logits.argmax(axis=1)]
            recording.passes[width].append(row())
    filled = ways(min(ROWS_OF_CHECK, loaded.slots), loaded.widths, loaded.lengths[0], loaded.slots, not loaded.pads)
    places = {way.name: [[*range(stop - start)] for start, stop, _ in way.passes] for way in filled}
    _checks(recording, loaded, [*loaded.programs, *loaded.label_heads], lambda _: places, arrays)
    return recording


def _encoder(build: Path, manifest: Mapping[str, Any], text: Sequence[int], arrays: Arrays) -> Recording:
    with load_programs_as("fp32"):
        loaded = Encoder(manifest, build)
    programs = chain.from_iterable(each.values() for each in loaded.programs.values())
    recording, row = Recording({}, {}), _noted([*programs], arrays)
    for bucket in manifest["buckets"]:
        loaded.run((list(text) * math.ceil(bucket / len(text)))[: max(1, bucket - 1)], bucket)  # one is padding
        recording.passes[bucket] = [row()]
    parts = {part["name"]: part for part in manifest["parts"]}

    def places(part: str) -> dict[str, list[list[int]]]:
        return {way: [at] for way, at in lengths_of(bucket_of(manifest, parts[part])).items()}

    every = chain.from_iterable(each.values() for each in loaded.programs.values())
    _checks(recording, loaded, [*every], places, arrays)
    return recording


def _checks(
    recording: Recording,
    loaded: engine.Engine | Encoder,
    programs: Sequence[Program],
    places: Callable[[str], Mapping[str, list[list[int]]]],
    arrays: Arrays,
) -> None:
    """Record what a check feeds each program that is loaded, if the build carries results to compare with.

    Args:
        recording: what is recorded.
        loaded: the model.
        programs: its programs.
        places: returns by way which rows of each pass are compared, for a part.
        arrays: stores the recorded arrays.
    """
    if EXPECTED not in loaded.manifest:
        return
    expected, passes = read_expected(loaded.root / loaded.manifest[EXPECTED]["path"]), list[tuple[Any, Floats]]()

    def note(name: str, inputs: Mapping[str, Floats], output: Floats) -> None:
        passes.append(({key: arrays.add(value) for key, value in inputs.items()}, output))

    _tap(programs, note)
    for part in (program.name for program in programs):
        recorded = expected.parts.get(part)
        if recorded is None or recorded.why_not:
            continue
        errors: Any = decoder_errors if isinstance(loaded, engine.Engine) else encoder_errors
        recording.checks[part] = []
        for way, _ in errors(loaded, part, recorded):
            results = recorded.rows[way if way in recorded.rows else ""]
            columns = compared_columns(recorded, passes[0][1].shape[1], results.shape[1])
            fed = [
                {"inputs": inputs, "width": output.shape[2], "rows": rows[: len(results)]}
                for (inputs, output), rows in zip(passes, places(part)[way], strict=True)
            ]
            entry = {"way": way, "limit": recorded.limits["fp16"], "passes": fed}
            entry |= {"columns": arrays.add(columns.astype(np.float32)), "expected": arrays.add(results)}
            recording.checks[part].append(entry)
            passes.clear()


def _noted(programs: Sequence[Program], arrays: Arrays) -> Callable[[], Row]:
    """Wrap the models of programs; return a function that returns and clears the recorded pass."""
    current: Row = {}

    def note(name: str, inputs: Mapping[str, Floats], output: Floats) -> None:
        keys = {key: arrays.add(value) for key, value in inputs.items()}
        rows = output[:, :: _stride(output.shape[1])]
        current[name] = {"inputs": keys, "fp32": arrays.add(rows), "stride": _stride(output.shape[1])}

    def taken() -> Row:
        recorded = dict(current)
        current.clear()
        return recorded

    _tap(programs, note)
    return taken


def _tap(programs: Sequence[Program], note: Callable[[str, Mapping[str, Floats], Floats], None]) -> None:
    """Let programs note inputs and outputs from now on, in place of whatever noted them before."""
    for program in programs:
        models = {key: model.model if isinstance(model, _Tap) else model for key, model in program.models.items()}
        program.models = {key: _Tap(program, model, note) for key, model in models.items()}


def _shipped(build: Path, part: Mapping[str, Any], passes: Mapping[int, list[Row]], arrays: Arrays) -> None:
    """Add a part's output with fp16 rounding to each pass."""
    with load_programs_as("fp16"):
        program = Program(build / part["program"]["path"], part)
    for rows in passes.values():
        program.renew()
        for row in (row[part["name"]] for row in rows if part["name"] in row):
            output = program({name: arrays[key] for name, key in row["inputs"].items()})
            row["fp16"] = arrays.add(output[:, :: _stride(output.shape[1])])
