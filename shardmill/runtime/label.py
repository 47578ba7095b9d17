"""A built encoder with its tokenizer: spans, labels or embeddings of texts of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL
from shardmill.models.host import Floats
from shardmill.runtime import encoder as runtime
from shardmill.runtime.load import load_tokenizer
from shardmill.runtime.spans import CALIBRATION, Span, bioes_spans, grouped, likeliest, read_calibration
from shardmill.runtime.windows import Rows, through

LEAST = 1e-30  # a share of nothing has no logarithm

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from shardmill.runtime.encoder import Encoder


@dataclass(frozen=True)
class Reader:
    """What reads texts.

    Attributes:
        encoder: the programs.
        tokenizer: the checkpoint's.
        biases: the checkpoint's calibration of transitions between labels; None if it has none.
        before_pass: called before every pass; what it raises ends the work.
    """

    encoder: Encoder
    tokenizer: Tokenizer
    biases: Mapping[str, float] | None = None
    before_pass: Callable[[], object] = bool

    @property
    def task(self) -> str:
        """What the model is for, as the hub calls it."""
        return str(self.encoder.manifest["task"])

    def run(self, tokens: Sequence[int]) -> Floats:
        """What comes out for tokens that one pass takes, a row each."""
        self.before_pass()
        return self.encoder.run(tokens)

    @property
    def embeds(self) -> bool:
        """Whether it gives embeddings, rather than labels."""
        return self.task == EMBED

    @property
    def classifies(self) -> bool:
        """Whether its labels are of whole texts, rather than of spans."""
        return self.task == CLASSIFY


@dataclass(frozen=True)
class Labelled:
    """What was found in a text.

    Attributes:
        spans: in the order of the text.
        tokens: how many the text has, those around it included.
        windows: how many passes it took.
        exact: whether it is what the whole text in one pass would give.
    """

    spans: tuple[Span, ...]
    tokens: int
    windows: int
    exact: bool


def load(build: Path, precision: str) -> Reader:
    """The reader of a finished build folder.

    Args:
        build: the folder.
        precision: the portable engine's, "fp32" or "fp16"; Core ML has no choice.

    Raises:
        ShardmillError: where it holds no finished build of an encoder.
    """
    encoder = runtime.load(build, precision)
    tokenizer = load_tokenizer(build, encoder.manifest)
    texts = encoder.manifest.get("texts", {})
    calibrated = CALIBRATION in texts.get("files", {})
    biases = read_calibration(build / texts["path"] / CALIBRATION) if calibrated else None
    return Reader(encoder, tokenizer, biases)


def label(reader: Reader, text: str) -> Labelled:
    """The spans of a text, [start, end) in characters of it.

    With the checkpoint's calibration they are those of the best path through BIOES; without one, those that
    transformers' pipeline makes of each token's likeliest label (aggregation strategy "simple").

    Raises:
        ShardmillError: the model labels no tokens.
    """
    _check_task(reader, LABEL)
    encoding, inside, rows = _read(reader, text)
    if not len(inside):
        return Labelled((), len(encoding.ids), rows.windows, rows.exact)
    shares = probabilities(rows.values)
    labels = reader.encoder.labels
    best = shares.argmax(-1).tolist()
    if reader.biases is not None:
        best = likeliest(np.log(np.maximum(shares, LEAST)), labels, reader.biases)
    places = [encoding.offsets[i] for i in inside]
    tokens = [
        Span(start, end, labels[row], float(share[row]))
        for (start, end), row, share in zip(places, best, shares, strict=True)
    ]
    found = grouped(tokens) if reader.biases is None else bioes_spans(tokens)
    return Labelled(tuple(found), len(encoding.ids), rows.windows, rows.exact)


def classify(reader: Reader, text: str) -> dict[str, float]:
    """The share of each label for a whole text, the likeliest first.

    Raises:
        ShardmillError: the model classifies no texts, or the text has more tokens than a pass takes.
    """
    _check_task(reader, CLASSIFY)
    (shares,) = probabilities(_first_pass(reader, reader.tokenizer.encode(text).ids)[:1])
    named = dict(zip(reader.encoder.labels, map(float, shares), strict=True))
    return dict(sorted(named.items(), key=lambda item: -item[1]))


def embed(reader: Reader, tokens: Sequence[int]) -> Floats:
    """The embedding [d] of a text's tokens, of length 1: the mean of their rows, or the first of them.

    Raises:
        ShardmillError: the model embeds no texts, or there are more tokens than a pass takes.
    """
    _check_task(reader, EMBED)
    rows = _first_pass(reader, tokens)
    pooled: Floats = rows.mean(0) if reader.encoder.manifest["pooling"] == "mean" else rows[0]
    length: Floats = pooled / np.maximum(np.linalg.norm(pooled), 1e-12)
    return length


def redacted(text: str, spans: Iterable[Span]) -> str:
    """The text with the type of every span in its place.

    Spans may share a character: tokens of bytes have the places of the character that they are parts of.
    """
    pieces, at = [], 0
    for span in spans:
        pieces += [text[at : span.start], f"[{span.type}]"]
        at = max(at, span.end)
    return "".join([*pieces, text[at:]])


def as_object(text: str, found: Labelled) -> dict[str, Any]:
    """What was found in a text, as plain data."""
    spans = [
        {"start": s.start, "end": s.end, "type": s.type, "score": s.score, "text": text[s.start : s.end]}
        for s in found.spans
    ]
    return {"spans": spans, "tokens": found.tokens, "windows": found.windows, "exact": found.exact}


def probabilities(logits: Floats) -> Floats:
    """Softmax of logits [n, labels]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    found: Floats = powers / powers.sum(-1, keepdims=True)
    return found


def _read(reader: Reader, text: str) -> tuple[Encoding, list[int], Rows]:
    """A text's encoding, which of its tokens are the text's own, and their rows."""
    encoding = reader.tokenizer.encode(text)
    inside = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    if not inside:
        return encoding, inside, Rows(np.zeros((0, len(reader.encoder.labels)), np.float32), 0, True)
    around = encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
    tokens = encoding.ids[inside[0] : inside[-1] + 1]
    encoder = reader.encoder
    return encoding, inside, through(tokens, around, encoder.longest, encoder.manifest["reach"], reader.run)


def _first_pass(reader: Reader, tokens: Sequence[int]) -> Floats:
    """The rows of tokens that one pass takes."""
    if not 0 < len(tokens) <= reader.encoder.longest:
        raise ShardmillError(f"the text has {len(tokens)} tokens: it may have 1 to {reader.encoder.longest}")
    return reader.run(tokens)


def _check_task(reader: Reader, task: str) -> None:
    """Raises ShardmillError for a model that is for another task."""
    if reader.task != task:
        raise ShardmillError(f"{reader.encoder.manifest['model']} is for {reader.task}, not for {task}")
