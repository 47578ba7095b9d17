"""A built encoder with its tokenizer: spans, labels or embeddings of texts of any length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL
from shardmill.models.buckets import packed
from shardmill.models.host import Floats
from shardmill.runtime.load import load_tokenizer
from shardmill.runtime.spans import CALIBRATION, Span, bioes_spans, grouped, likeliest, read_calibration
from shardmill.runtime.windows import Windows, windows

LEAST = 1e-30  # a share of nothing has no logarithm

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from shardmill.runtime.process import EncoderProcess


@dataclass(frozen=True)
class Reader:
    """What reads texts.

    Attributes:
        encoder: the programs.
        tokenizer: the checkpoint's.
        biases: the checkpoint's calibration of transitions between labels; None if it has none.
        before_pass: called before every pass; what it raises ends the work.
    """

    encoder: EncoderProcess
    tokenizer: Tokenizer
    biases: Mapping[str, float] | None = None
    before_pass: Callable[[], object] = bool

    @property
    def task(self) -> str:
        """What the model is for, as the hub calls it."""
        return str(self.encoder.manifest["task"])

    def run(self, texts: Sequence[Sequence[int]]) -> list[Floats]:
        """What comes out for texts of at most as many tokens as a pass takes: a row for each token.

        Short texts share passes.
        """
        found: dict[int, Floats] = {}
        for together in packed([len(text) for text in texts], self.encoder.longest):
            self.before_pass()
            rows = self.encoder.run_together([texts[i] for i in together])
            found |= dict(zip(together, rows, strict=True))
        return [found[i] for i in range(len(texts))]

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
        windows: how many passes it took part in.
        exact: whether it is what the whole text in one pass would give.
    """

    spans: tuple[Span, ...]
    tokens: int
    windows: int
    exact: bool


@dataclass(frozen=True)
class Classified:
    """The share of each label for a whole text, the likeliest first, and how many tokens the text has."""

    labels: dict[str, float]
    tokens: int


def load(build: Path, precision: str) -> Reader:
    """Return the reader of a finished build folder, whose programs are in a process of their own.

    Args:
        build: the folder.
        precision: the portable engine's, "fp32" or "fp16"; Core ML has no choice.

    Raises:
        ShardmillError: where it holds no finished build of an encoder.
    """
    from shardmill.runtime.process import EncoderProcess

    encoder = EncoderProcess(build, precision)
    tokenizer = load_tokenizer(build, encoder.manifest)
    texts = encoder.manifest.get("texts", {})
    calibrated = CALIBRATION in texts.get("files", {})
    biases = read_calibration(build / texts["path"] / CALIBRATION) if calibrated else None
    return Reader(encoder, tokenizer, biases)


def label(reader: Reader, text: str) -> Labelled:
    """The spans of one text: see `label_all`."""
    (found,) = label_all(reader, [text])
    return found


def label_all(reader: Reader, texts: Sequence[str]) -> list[Labelled]:
    """The spans of texts, [start, end) in characters of each.

    With the checkpoint's calibration they are those of the best path through BIOES; without one, those that
    transformers' pipeline makes of each token's likeliest label (aggregation strategy "simple").

    Raises:
        ShardmillError: the model labels no tokens.
    """
    _check_task(reader, LABEL)
    read = [_read(reader, text) for text in texts]
    rows = iter(reader.run([tokens for one in read for tokens in one.windows.tokens]))
    return [_labelled(reader, one, [next(rows) for _ in one.windows.tokens]) for one in read]


def classify(reader: Reader, texts: Sequence[str]) -> list[Classified]:
    """The share of each label for whole texts.

    Raises:
        ShardmillError: the model classifies no texts, or a text has more tokens than a pass takes.
    """
    _check_task(reader, CLASSIFY)
    tokens = [reader.tokenizer.encode(text).ids for text in texts]
    found = []
    for text, rows in zip(tokens, _single(reader, tokens), strict=True):
        (shares,) = probabilities(rows[:1])
        named = dict(zip(reader.encoder.labels, map(float, shares), strict=True))
        found.append(Classified(dict(sorted(named.items(), key=lambda item: -item[1])), len(text)))
    return found


def embed(reader: Reader, texts: Sequence[Sequence[int]]) -> list[Floats]:
    """The embeddings [d] of texts, given as tokens, of length 1: the mean of their rows, or the first of them.

    Raises:
        ShardmillError: the model embeds no texts, or a text has more tokens than a pass takes.
    """
    _check_task(reader, EMBED)
    mean = reader.encoder.manifest["pooling"] == "mean"
    pooled = [rows.mean(0) if mean else rows[0] for rows in _single(reader, texts)]
    return [row / np.maximum(np.linalg.norm(row), 1e-12) for row in pooled]


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


@dataclass(frozen=True)
class _Read:
    """A text: its encoding, which of its tokens are its own, and the passes that these take."""

    encoding: Encoding
    inside: list[int]
    windows: Windows


def _read(reader: Reader, text: str) -> _Read:
    """A text as passes take it."""
    encoding, encoder = reader.tokenizer.encode(text), reader.encoder
    inside = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    if not inside:
        return _Read(encoding, inside, Windows((), (), True))
    around = encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
    tokens = encoding.ids[inside[0] : inside[-1] + 1]
    return _Read(encoding, inside, windows(tokens, around, encoder.longest, encoder.manifest["reach"]))


def _labelled(reader: Reader, read: _Read, rows: Sequence[Floats]) -> Labelled:
    """What was found in a text, given the rows of its passes."""
    count, found = len(read.encoding.ids), read.windows
    if not rows:
        return Labelled((), count, 0, found.exact)
    shares = probabilities(found.joined(rows))
    labels = reader.encoder.labels
    best = shares.argmax(-1).tolist()
    if reader.biases is not None:
        best = likeliest(np.log(np.maximum(shares, LEAST)), labels, reader.biases)
    places = [read.encoding.offsets[i] for i in read.inside]
    tokens = [
        Span(start, end, labels[row], float(share[row]))
        for (start, end), row, share in zip(places, best, shares, strict=True)
    ]
    spans = grouped(tokens) if reader.biases is None else bioes_spans(tokens)
    return Labelled(tuple(spans), count, len(rows), found.exact)


def _single(reader: Reader, texts: Sequence[Sequence[int]]) -> list[Floats]:
    """The rows of texts each of which one pass takes."""
    for text in texts:
        if not 0 < len(text) <= reader.encoder.longest:
            raise ShardmillError(f"the text has {len(text)} tokens: it may have 1 to {reader.encoder.longest}")
    return reader.run(texts)


def _check_task(reader: Reader, task: str) -> None:
    """Raises ShardmillError for a model that is for another task."""
    if reader.task != task:
        raise ShardmillError(f"{reader.encoder.manifest['model']} is for {reader.task}, not for {task}")
