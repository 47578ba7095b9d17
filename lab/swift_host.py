"""How long does the host take for a pass, in Swift and in Python?

    python lab/swift_host.py [--command .build/release/shardmill-check] [--vocab 151936] [--repeats 30]

Both runtimes decode with programs that return at once, the same logits for every token. What is left is the host's
work: embeddings, masks, rotary rows, chaining, choosing tokens, acceptance. The model has the sizes of Qwen2.5 0.5B,
and no weights. T is the number of tokens of a pass: with 4, a drafter that knows the text proposes 3 tokens, and all
are accepted. Times are milliseconds of the processor for a pass, the least of --repeats. The exit code is 1 if the two
runtimes choose other tokens, or if Swift isn't --goal times as fast.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import coremltools as ct
import numpy as np
from drafted_decoding import Sampling, Session
from drafted_decoding.drafters import EMPTY, Draft
from drafted_decoding.drafters.base import NoDrafter
from drafted_decoding.generate import GenerationResult, Options, TokenEvent, generate
from drafted_decoding.policies import AlwaysDraft

from shardmill.runtime.engine import Engine

HIDDEN, CONTEXT, HALF, PASSES = 896, 2048, 32, 16
PROMPT = list(range(5, 25))
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature 0.8": {"temperature": 0.8, "seed": 3},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "top-k 40, top-p 0.9": {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3},
}


def write_build(folder: Path, vocab: int) -> dict[str, Any]:
    """Write model.json and a table of zeros; return the manifest. Nothing else of a build is read."""
    states = {"k_0": [1, 2, CONTEXT, 64]}
    rotary = {"rope_cos": ["T", HALF], "rope_sin": ["T", HALF]}
    masks = {"attn_mask": [1, 1, "T", CONTEXT], "kv_write_mask": [1, 1, CONTEXT, "T"]}
    layers = {"x": [1, HIDDEN, "T", 1], **rotary, **masks}
    parts: list[dict[str, Any]] = [
        {"name": f"layers_{start:02}_{start + 12}", "kind": "layers", "start": start, "end": start + 12}
        | {"inputs": layers, "states": states, "output": "hidden"}
        for start in (0, 12)
    ]
    half = vocab // 2
    parts += [
        {"name": f"head_{place}", "kind": "head", "start": start, "end": end}
        | {"inputs": {"hidden": [1, HIDDEN, "T", 1]}, "states": {}, "output": "logits"}
        for place, (start, end) in enumerate(((0, half), (half, vocab)))
    ]
    manifest = {
        "format": 2,
        "model": "host",
        "vocab": vocab,
        "rope": {"rope": {"inv_freq": (1e6 ** -(np.arange(HALF) / HALF)).tolist(), "scale": 1.0}},
        "embedding": {"path": "embedding.safetensors"},
        "tokenizer": {"path": "tokenizer.json"},
        "parts": [part | {"program": {"path": f"{part['name']}.mlmodelc"}} for part in parts],
        "context": CONTEXT,
        "tokens_max": 4,
        "widths": [1, 4],
        "verify": 4,
        "window": None,
        "window_slots": 0,
        "conv_taps": 0,
        "eos_token_ids": [],
    }
    (folder / "model.json").write_text(json.dumps(manifest))
    size = vocab * HIDDEN * 2
    header = json.dumps({"embedding": {"dtype": "F16", "shape": [vocab, HIDDEN], "data_offsets": [0, size]}}).encode()
    with (folder / "embedding.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    return manifest


class Idle:
    """A program that returns at once."""

    rows: ClassVar[dict[str, Any]] = {}  # by program, [1, channels, 4, 1]

    def __init__(self, path: str, **options: Any) -> None:
        whole = self.rows[Path(path).stem]
        self.output = "logits" if "head" in Path(path).stem else "hidden"
        self.outputs = {tokens: np.ascontiguousarray(whole[:, :, :tokens]) for tokens in (1, 4)}

    def make_state(self) -> object:
        """Return no state."""
        return object()

    def predict(self, inputs: Mapping[str, Any], state: object = None) -> dict[str, Any]:
        """Return the output for the tokens of the inputs."""
        array = inputs["x"] if "x" in inputs else inputs["hidden"]
        return {self.output: self.outputs[array.shape[2]]}


class Reciter(NoDrafter):
    """A drafter that knows the text."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text

    def propose(self, context: Sequence[int], limit: int) -> Draft:
        """Return what follows."""
        tokens = tuple(self.text[len(context) - len(PROMPT) :][:limit])
        return Draft(tokens, (0.99,) * len(tokens)) if tokens else EMPTY


def main() -> int:
    """Print the table; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", nargs="+", default=[".build/release/shardmill-check"])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--goal", type=float, default=5.0)
    parser.add_argument("--deviation", type=float, default=4.0, help="of the logits, see benchmarks/sampling.py")
    options = parser.parse_args()

    logits = (options.deviation * np.random.default_rng(7).standard_normal(options.vocab)).astype(np.float32)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        manifest = write_build(folder, options.vocab)
        (folder / "logits.f32").write_bytes(logits.tobytes())
        session = idle_session(manifest, folder, logits)
        texts = {key: in_python(session, sampling, [])[0] for key, sampling in SAMPLINGS.items()}
        wanted = [(key, width) for key in SAMPLINGS for width in (1, 4)]
        python = []
        for key, width in wanted:
            rounds = [in_python(session, SAMPLINGS[key], texts[key], width) for _ in range(options.repeats)]
            python.append((rounds[0][0], min(seconds for _, seconds in rounds)))
        swift = in_swift(options.command, folder, texts, wanted, options.repeats)
    print("| choice | T | Python, ms | Swift, ms | times as fast |\n|---|---|---|---|---|")
    good = True
    for (name, width), (tokens, mine), (theirs, seconds) in zip(wanted, python, swift, strict=True):
        good &= tokens == theirs and mine / seconds >= options.goal
        other = "" if tokens == theirs else ", other tokens"
        print(f"| {name} | {width} | {1000 * mine:.3f} | {1000 * seconds:.3f} | {mine / seconds:.1f}{other} |")
    return 0 if good else 1


def idle_session(manifest: Mapping[str, Any], folder: Path, logits: Any) -> Session:
    """Return a session whose programs return at once."""
    for part in manifest["parts"]:
        head = part["kind"] == "head"
        column = logits[part["start"] : part["end"]] if head else np.zeros(HIDDEN, np.float32)
        Idle.rows[part["name"]] = np.repeat(column[None, :, None, None], 4, axis=2)
    ct.models.MLModel = ct.models.CompiledMLModel = Idle
    return Session(Engine(manifest, folder))


def in_python(
    session: Session, sampling: Mapping[str, Any], text: Sequence[int], width: int = 1
) -> tuple[list[int], float]:
    """Return the tokens of a request, and the seconds of a pass; the first token comes from the prompt."""
    events = generate(
        session,
        PROMPT,
        max_new_tokens=1 + PASSES * (width if text else 4),
        drafter=Reciter(text) if width > 1 else None,
        policy=AlwaysDraft(),
        options=Options(Sampling(**sampling)),
    )
    start = next(time.thread_time() for event in events if isinstance(event, TokenEvent))
    *_, result = events
    assert isinstance(result, GenerationResult)
    return list(result.tokens), (time.thread_time() - start) / result.passes


def in_swift(
    command: Sequence[str],
    folder: Path,
    texts: Mapping[str, Sequence[int]],
    wanted: Sequence[tuple[str, int]],
    repeats: int,
) -> list[tuple[list[int], float]]:
    """Return the tokens, and the least seconds of a pass, of each case."""
    requests = []
    for name, width in wanted:
        known = {"drafter": "recite", "recite": list(texts[name])} if width > 1 else {}
        request = {"prompt": PROMPT, "max_tokens": 1 + PASSES * width, **SAMPLINGS[name], **known}
        requests += [request] * repeats
    files = {option: folder / option for option in ("requests", "result")}
    files["requests"].write_text(json.dumps(requests))
    named = [text for option, file in files.items() for text in (f"--{option}", str(file))]
    subprocess.run([*command, str(folder), *named, "--idle", str(folder / "logits.f32")], check=True)
    answers = json.loads(files["result"].read_text())["requests"]
    assert all(answer["passes"] == PASSES for answer in answers)
    rounds = [answers[place : place + repeats] for place in range(0, len(answers), repeats)]
    return [(some[0]["tokens"], min(answer["host_seconds_per_pass"] for answer in some)) for some in rounds]


if __name__ == "__main__":
    sys.exit(main())
