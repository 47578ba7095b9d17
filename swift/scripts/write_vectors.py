"""Write what the Python runtime does, for the Swift tests: swift/Tests/Vectors/*.json.

    python swift/scripts/write_vectors.py [FOLDER]

tests/swift/test_vectors.py writes the files again and compares, so neither side can drift from the other.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from drafted_decoding.drafters import create_drafter
from drafted_decoding.engine import PlainEngine
from drafted_decoding.sampler import Sampler, Sampling
from drafted_decoding.session import Session
from drafted_decoding.text import TextStream

from shardmill.checkpoint.tokenizer import ODD_TEXTS
from shardmill.runtime.expected import numbers, rows
from shardmill.runtime.kv import KVLayout
from shardmill.runtime.label import text_windows
from shardmill.runtime.pack import packed_texts
from shardmill.runtime.spans import TRANSITIONS, Span, bioes_spans, grouped_spans, likeliest
from shardmill.templates.form import Around, ChatFormat, Edit, Strip

VECTORS = Path(__file__).parents[1] / "Tests" / "Vectors"
ROPE = {"inv_freq": [1.0, 0.31622776, 0.1, 0.0316], "scale": 1.19}
LOCAL = {"inv_freq": [1.0, 0.01], "scale": 1.0}


def layouts() -> Iterator[dict[str, Any]]:
    """Yield scripted passes over each kind of layout, and the arrays of every pass."""
    plain = {"context": 12, "rope": {"rope": ROPE}, "window": None, "window_slots": 0, "conv_taps": 0}
    masked = plain | {"rope": {"rope": ROPE, "rope_local": LOCAL}, "window": 4}
    ring = masked | {"window_slots": 8}
    conv = plain | {"context": 64, "conv_taps": 3}
    recurrent = plain | {"context": 64, "recurrent": {"block": 3, "taps": 3}}
    blocks = plain | {"context": 64, "recurrent": {"block": 2, "taps": 3, "narrow": 2}}
    forward = [["pass", [0, 1, 2], [0, 1, 2]], ["pass", [3], [3]], ["pass", [4, 5, 6, 7], [4, 5, 6, 7]]]
    rejected = [["pass", [5, 6], [5, 6]], ["rewindable", 2], ["rewindable", 5]]
    slide = [["forget", [4, 5]], ["pass", [4, 5], [12, 13]]]
    lengths = [
        ["resize", 6],
        ["pass", [4, 5], [4, 5]],
        ["resize", 12],
        ["pass", [6], [6]],
        ["reset"],
        ["pass", [0], [0]],
    ]
    far = [["pass", list(range(8, 12)), list(range(8, 12))], ["pass", [0, 1], [0, 1]]]
    long = [["pass", list(range(s, s + 8)), list(range(s, s + 8))] for s in range(8, 48, 8)]
    # Passes from these positions, of these widths. Some come back to before drafts; some are where no pass may begin.
    passes = [(0, 2), (2, 1), (3, 2), (4, 3), (5, 1), (6, 1), (7, 3), (4, 1), (10, 4), (20, 1), (0, 2), (2, 3)]
    folded = [["undoable", 0]]
    for start, count in passes:
        where = list(range(start, start + count))
        folded += [["rewindable", start], ["pass", where, where], ["undoable", start + 1], ["rewindable", start - 1]]
    folded += [["pass", [6, 8], [6, 8]], ["reset"], ["rewindable", 1], ["undoable", 0], ["pass", [0], [0]]]
    wide = [["pass", list(range(s, s + n)), list(range(s, s + n))] for s, n in ((0, 6), (6, 1), (7, 5), (12, 2))]
    wide += [["rewindable", 12], ["undoable", 13], ["pass", [14], [14]], ["rewindable", 12]]
    for runtime, script in (
        (plain, [*forward, *rejected, *slide]),
        (masked, [*forward, *rejected, *lengths]),
        (ring, [*forward, *rejected, *far]),
        (conv, [*forward, *rejected, *long, ["rewindable", 20], ["pass", [9], [9]], ["rewindable", 40]]),
        (recurrent, folded),
        (blocks, [*wide, ["reset"], wide[0]]),
    ):
        yield {
            "runtime": runtime,
            "steps": [_stepped(step, layout) for layout in [KVLayout(runtime)] for step in script],
        }


def _stepped(step: Sequence[Any], layout: KVLayout) -> dict[str, Any]:
    """Run one step of a script; return it with its result."""
    name, *arguments = step
    record: dict[str, Any] = {"step": name, "given": arguments}
    if name == "pass":
        try:
            arrays = layout.arrays(*arguments)
        except ValueError as error:
            return record | {"error": str(error)}
        return record | {"arrays": {key: [list(a.shape), a.ravel().tolist()] for key, a in arrays.items()}}
    if name in ("rewindable", "undoable"):
        return record | {"result": getattr(layout, name)(*arguments)}
    getattr(layout, name)(*arguments)
    return record


def samplers() -> Iterator[dict[str, Any]]:
    """Yield settings, rows of logits, and the tokens that are drawn from them."""
    rng = np.random.default_rng(5)
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "seed": 11},
        {"temperature": 1.3, "top_k": 5, "seed": 2**63 + 9},
        {"temperature": 0.9, "min_p": 0.1, "repetition_penalty": 1.2},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "seed": 3, "logit_bias": {7: 2.5, 11: -100.0}},
        {"repetition_penalty": 1.5, "logit_bias": {3: 1.0}},
        {"temperature": 1e-4, "seed": 4},
        {"presence_penalty": 1.5, "frequency_penalty": 0.25},
        {"temperature": 0.9, "presence_penalty": -0.4, "frequency_penalty": 0.3, "seed": 12, "logit_bias": {2: 3.0}},
        {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.7}
        | {"frequency_penalty": -0.2},
    ]
    for values in settings:
        for vocab in (16, 301):
            rows = (np.round(rng.standard_normal((12, vocab)) * 96) / 32).astype(np.float32)  # short in JSON
            rows[3] = np.round(rows[3])  # ties
            prompt = [int(t) for t in rng.integers(0, vocab, 5)]
            sampler = Sampler(Sampling(**values), prompt, vocab)
            yield {
                "sampling": values | {"logit_bias": {str(t): b for t, b in values.get("logit_bias", {}).items()}},
                "prompt": prompt,
                "rows": rows.tolist(),
                "margin": _finite(sampler.margin(rows[0])),
                "tokens": [sampler.next(row) for row in rows],
            }


WIDE = 151_936


def wide_row(place: int) -> Any:
    """Return made logits [WIDE]: each further unit has about half as many tokens, and many are equal."""
    hashed = (np.arange(WIDE, dtype=np.uint64) * 2654435761 + place * 40503 + 123_456_789) % 2**32
    zeros = 31 - np.floor(np.log2(np.maximum(hashed, 1)))
    return (zeros + (hashed % 8) / 8).astype(np.float32)


def wide() -> Iterator[dict[str, Any]]:
    """Yield settings, and the tokens that are drawn from the made logits of a large vocabulary.

    Filters keep a few of the tokens, or most of them.
    """
    for values in (
        {"temperature": 0.5, "top_p": 0.9, "seed": 1},
        {"temperature": 0.8, "top_p": 0.5, "seed": 2},
        {"temperature": 1.0, "top_p": 0.9, "seed": 3},
        {"temperature": 5.0, "top_p": 0.9, "seed": 17},
        {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "seed": 5},
        {"temperature": 1.5, "top_k": 3, "seed": 6},
        {"temperature": 1.0, "min_p": 0.05, "seed": 7},
        {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.3, "seed": 8, "logit_bias": {9: 16.0, 77: 17.5}},
        {"temperature": 1.0, "seed": 9},
        {"temperature": 1.5, "seed": 27},  # most draws are unlikely tokens, a few by a little
        {"repetition_penalty": 1.3, "logit_bias": {9: 16.0}},
        {"temperature": 0.7, "top_k": 200_000, "top_p": 0.8, "seed": 10},
        {"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.1, "frequency_penalty": 0.6, "seed": 13},
        {"repetition_penalty": 1.3, "presence_penalty": 17.0, "frequency_penalty": 0.3},
    ):
        sampler = Sampler(Sampling(**values), [5, 9], WIDE)  # type: ignore[arg-type]  # values of several types
        rows = [wide_row(place) for place in range(8)]
        yield {
            "sampling": values | {"logit_bias": {str(t): b for t, b in values.get("logit_bias", {}).items()}},  # type: ignore[union-attr,attr-defined]
            "prompt": [5, 9],
            "margin": _finite(sampler.margin(rows[0])),
            "tokens": [sampler.next(row) for row in rows],
        }


def _finite(number: float) -> float | None:
    """Return a number, or None for infinity, which JSON can't say."""
    return number if np.isfinite(number) else None


def generators() -> Iterator[dict[str, Any]]:
    """Yield random numbers by seed and index: integers, numbers in [0, 1) and exponential variables, by their places.

    The places are the first ones and some of a large vocabulary.
    """
    for seed, index in ((0, 0), (1, 7), (2**64 - 1, 2**40)):
        first, second = (np.random.Philox(key=seed, counter=[0, 0, 2, index]) for _ in range(2))
        places = [*range(9), 1023, 49_152, WIDE - 2, WIDE - 1]
        numbers = np.random.Generator(first).random(WIDE)[places]
        yield {
            "seed": str(seed),
            "index": str(index),
            "places": places,
            "integers": [str(n) for n in second.random_raw(WIDE)[places]],
            "numbers": numbers.tolist(),
            "waits": (-np.log(1 - numbers)).tolist(),
        }


def drafts() -> Iterator[dict[str, Any]]:
    """Yield texts that repeat themselves, and what each drafter proposes as they grow."""
    rng = random.Random(3)
    for name in ("ngram", "suffix"):
        for kinds in (2, 5, 40):
            text = [rng.randrange(kinds) for _ in range(60)]
            text += text[10:40]
            drafter = create_drafter(name)
            drafter.reset(text[:20])
            rounds = []
            for start in range(20, len(text), 3):
                draft = drafter.propose(text[:start], 6)
                rounds.append({"tokens": list(draft.tokens), "confidence": list(draft.confidence)})
                drafter.observe(text[start : start + 3], 0)
            yield {"drafter": name, "text": text, "rounds": rounds}


class _Recorder(PlainEngine):
    """An engine that records its calls and returns a row that its tokens and positions decide."""

    def __init__(self, slots: int, widths: Sequence[int], verify: int) -> None:
        self.slots, self.vocab, self.widths, self.verify = slots, 32, widths, verify
        self.calls: list[Any] = []

    def forward(self, tokens: Sequence[int], slots: Sequence[int], positions: Sequence[int]) -> Any:
        self.calls.append([list(slots), list(positions)])
        return np.eye(32, dtype=np.float32)[[(7 * t + p) % 32 for t, p in zip(tokens, positions, strict=True)]]

    def forget(self, slots: Sequence[int]) -> None:
        self.calls.append(["forget", list(slots)])

    def reset(self) -> None:
        self.calls.append("reset")


def sessions() -> Iterator[dict[str, Any]]:
    """Yield requests to a session, and the engine's calls for them: slots and positions."""
    for slots, widths, verify, policy, lengths in (
        (64, [1, 4], 4, "stop", [10, 3, 30]),
        (64, [1, 2, 4, 16], 4, "stop", [1, 7, 50]),
        (64, [1, 4, 16], 4, "slide", [20, 90, 200]),
        (48, [1, 2], 2, "slide", [47, 60]),
    ):
        engine = _Recorder(slots, widths, verify)
        session = Session(engine, context_policy=policy)  # type: ignore[arg-type]  # both are policies
        steps = []
        for length in lengths:
            prompt = [(3 * i + length // 20) % 32 for i in range(length)]
            prefill = session.prefill(prompt)
            engine.calls.append({"prefill": [prefill.held, prefill.reused, prefill.passes, prefill.width]})
            fed = []
            for wanted in (1, 2, 4, 1, 3):
                if count := min(wanted, session.room()):
                    session.feed([5] * count)
                    session.commit(max(1, count - 1))
                    fed.append([count, session.room()])
            steps.append({"prompt": prompt, "fed": fed, "calls": engine.calls[:]})
            engine.calls.clear()
        yield {"slots": slots, "widths": widths, "verify": verify, "policy": policy, "requests": steps}


def streams() -> Iterator[dict[str, Any]]:
    """Yield tokens that are pieces of bytes, and the text that becomes final with each."""
    text = "a é 日本 👨‍👩‍👧 naïve END of it \ufffd and more, STO".encode()
    rng = random.Random(9)
    for prompt, stop in ((0, []), (3, ["END"]), (5, ["STOP", "it \ufffd"]), (7, ["never"])):
        pieces, at = [], 0
        while at < len(text):
            step = rng.randrange(1, 4)
            pieces.append(text[at : at + step])
            at += step
        pieces += [b"\xe6", b"\xff", b"x"]

        def decode(tokens: Sequence[int], pieces: list[bytes] = pieces) -> str:
            return b"".join(pieces[t] for t in tokens).decode(errors="replace")

        stream = TextStream(decode, stop, range(prompt))
        pushed = [stream.push(token) for token in range(prompt, len(pieces))]
        yield {
            "pieces": [list(piece) for piece in pieces],
            "prompt": prompt,
            "stop": stop,
            "pushed": pushed,
            "stopped": stream.stopped,
            "rest": stream.flush(),
        }


def chats() -> Iterator[dict[str, Any]]:
    """Yield chat formats of the usual shapes, and the texts of conversations."""
    for begin, instead, before, after, strip, system, generate in (
        ("", "", "<|im_start|>{}\n", "<|im_end|>\n", False, True, "<|im_start|>assistant\n"),
        ("<|system|>\n", "You are helpful.", "<|{}|>", "<|end|>\n", False, True, "<|assistant|>"),
        ("<|begin|>", "", "<|header|>{}<|header|>\n\n", "<|eot|>", True, True, "<|header|>assistant<|header|>\n\n"),
        ("<bos>", "", "<turn>{}\n", "<end>\n", True, False, "<turn>model\n"),
        ("<s>", "", "[{}] ", "</s>", False, False, ""),
    ):
        edit = Edit(Strip() if strip else None)
        around = {role: Around(before.format(role), after, edit) for role in ("system", "user", "assistant")}
        chat_format = ChatFormat(
            begin, instead, around["system"] if system else None, around["user"], around["assistant"], generate
        )
        talks = [[("user", text)] for text in ODD_TEXTS]
        talks.append([("assistant" if turn % 2 else "user", text) for turn, text in enumerate(ODD_TEXTS[:-1])])
        talks += [[("system", text), *talks[-1][:3]] for text in ODD_TEXTS if system]
        yield {
            "format": chat_format.as_json() | {"stop": []},
            "talks": [
                {"messages": talk, "text": chat_format.text([{"role": role, "content": text} for role, text in talk])}
                for talk in talks
            ],
        }


def encoders() -> Iterator[dict[str, Any]]:
    """Yield texts divided into windows, texts that share passes, and labels that become spans."""
    for count, before, after, longest, reach in (
        (5, [1], [2], 16, None),
        (14, [1], [2], 16, None),
        (15, [1], [2], 16, None),
        (90, [1], [2], 16, None),
        (90, [1, 3], [2], 16, 6),
        (90, [1, 3], [2], 16, 7),
        (90, [], [], 16, 1),
        (33, [1], [], 32, 12),
    ):
        tokens = list(range(100, 100 + count))
        read = text_windows(tokens, (before, after), longest, reach)
        asked = {"count": count, "before": before, "after": after, "longest": longest, "reach": reach}
        taken = [[span.start, span.stop] for span in read.taken]
        yield {"windows": asked, "tokens": [list(one) for one in read.tokens], "taken": taken, "exact": read.exact}
    rng = random.Random(5)
    for longest in (8, 20):
        counts = [rng.randrange(1, 9) for _ in range(30)]
        yield {"counts": counts, "longest": longest, "passes": packed_texts(counts, longest)}
    labels = ["O", *(f"{prefix}-{kind}" for kind in ("a", "b-c") for prefix in "BIES"), "loose"]
    names = sorted(set(TRANSITIONS.values()))
    for place in range(4):
        biases = {name: rng.randrange(-8, 9) / 4 for name in names}
        scores = [[rng.randrange(-40, 1) / 8 for _ in labels] for _ in range(30)]
        path = likeliest(np.array(scores), labels, biases)
        drawn = [rng.randrange(len(labels)) for _ in scores]
        shares = [rng.randrange(1, 9) / 8 for _ in scores]

        def spans(rows: Sequence[int], shares: list[float] = shares) -> list[Span]:
            return [Span(3 * i, 3 * i + 2, labels[row], shares[i]) for i, row in enumerate(rows)]

        yield {
            "labels": labels,
            "biases": {f"transition_bias_{name}": bias for name, bias in biases.items() if place or bias > 0},
            "scores": scores,
            "path": path if place else likeliest(np.array(scores), labels, {n: max(b, 0.0) for n, b in biases.items()}),
            "drawn": drawn,
            "shares": shares,
            "grouped": [list(vars(span).values()) for span in grouped_spans(spans(drawn))],
            "bioes": [list(vars(span).values()) for span in bioes_spans(spans(path))],
            "along": path,
        }


def expected() -> Iterator[dict[str, Any]]:
    """Yield seeds, with the numbers and the rows that they give; integers as text, which JSON readers round."""
    for seed, exponent in ((0, -8), (7, -2), (2**53 - 1, 8)):
        integers = [str(number) for number in numbers(seed, 20).tolist()]
        row_numbers = rows(seed, exponent, 4, 5).ravel().tolist()
        yield {"seed": str(seed), "exponent": exponent, "numbers": integers, "rows": row_numbers}


WRITERS = {
    "layouts": layouts,
    "samplers": samplers,
    "wide": wide,
    "generators": generators,
    "drafts": drafts,
    "sessions": sessions,
    "streams": streams,
    "chats": chats,
    "encoders": encoders,
    "expected": expected,
}


def write(folder: Path) -> None:
    """Write every file."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, cases in WRITERS.items():
        lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in cases())
        (folder / f"{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else VECTORS)
