"""A built encoder with its tokenizer: spans, labels, embeddings or scores of texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill import files
from shardmill.checkpoint.modules import BIAS, WEIGHT
from shardmill.checkpoint.tokenizer import read_tokenizer
from shardmill.errors import ProgramError, ShardmillError
from shardmill.models.architecture import CLASSIFY, EMBED, LABEL, RANK
from shardmill.runtime.kv import Floats
from shardmill.runtime.pack import packed_texts
from shardmill.runtime.spans import CALIBRATION, Span, bioes_spans, grouped_spans, likeliest, read_calibration
from shardmill.runtime.windows import TextPasses, text_windows

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from shardmill.runtime.process import Remote

LEAST = 1e-30  # lower bound of a share, so that it has a logarithm


@dataclass(frozen=True)
class Projection:
    """A projection of the pooled row: weight [out, in], bias [out] or 0, and whether tanh follows."""

    weight: Floats
    bias: Floats
    tanh: bool

    def __call__(self, row: Floats) -> Floats:
        """Return the projection of a row [in]."""
        projected: Floats = self.weight @ row + self.bias
        return np.tanh(projected) if self.tanh else projected


@dataclass(frozen=True)
class Reader:
    """An encoder and its tokenizer, ready to read texts.

    Attributes:
        encoder: the programs.
        tokenizer: the checkpoint's tokenizer.
        biases: the checkpoint's calibration of transitions between labels; None if it has none.
        dense: projections of an embedding, in order.
        checked: what `shardmill check` found of the build on this machine; empty: nothing was compared.
        before_pass: called before every pass; an exception that it raises stops the work.
    """

    encoder: Remote
    tokenizer: Tokenizer
    biases: Mapping[str, float] | None = None
    dense: tuple[Projection, ...] = ()
    checked: str = ""
    before_pass: Callable[[], object] = bool

    @property
    def task(self) -> str:
        """Return the model's task by the hub's name."""
        return str(self.encoder.manifest["task"])

    def run(self, texts: Sequence[Sequence[int]]) -> list[Floats]:
        """Return one row for each token of texts that each fit into a pass.

        Short texts share passes.

        Raises:
            ProgramError: a number is not finite. Of NaN, the likeliest label would be the first.
        """
        by_text: dict[int, Floats] = {}
        for together in packed_texts([len(text) for text in texts], self.encoder.longest):
            self.before_pass()
            rows = self.encoder.run_together([texts[i] for i in together])
            if not all(np.isfinite(each).all() for each in rows):
                raise ProgramError(
                    f"{self.encoder.manifest['model']} has computed a number that is not finite, so the text has no "
                    "answer; build the model again: the gates refuse such programs"
                )
            by_text |= dict(zip(together, rows, strict=True))
        return [by_text[i] for i in range(len(texts))]

    @property
    def embeds(self) -> bool:
        """Return whether the model gives embeddings, rather than labels."""
        return self.task == EMBED

    @property
    def classifies(self) -> bool:
        """Return whether the labels apply to whole texts, rather than to spans."""
        return self.task == CLASSIFY

    @property
    def ranks(self) -> bool:
        """Return whether the model says how well documents meet a query."""
        return self.task == RANK

    @property
    def width(self) -> int:
        """Return the numbers of an embedding."""
        manifest = self.encoder.manifest
        hidden: int = manifest.get("width", manifest["parts"][0]["inputs"]["x"][1])
        return len(self.dense[-1].weight) if self.dense else hidden

    @property
    def prompts(self) -> Mapping[str, str]:
        """Return the texts that may be put before a text, by name."""
        prompts: Mapping[str, str] = self.encoder.manifest.get("prompts", {})
        return prompts


@dataclass(frozen=True)
class Labelled:
    """The result of labelling a text.

    Attributes:
        spans: the spans in the order of the text.
        tokens: number of the text's tokens, including the special tokens around it.
        windows: number of passes that the text took part in.
        exact: True if the result equals the result of a single pass over the whole text.
    """

    spans: tuple[Span, ...]
    tokens: int
    windows: int
    exact: bool


@dataclass(frozen=True)
class Classified:
    """The share of each label for a whole text, the likeliest first, and the number of the text's tokens."""

    labels: dict[str, float]
    tokens: int


def load_reader(build: Path, precision: str) -> Reader:
    """Return the reader of a build folder, whose programs run in a separate process; see `process.Process`.

    Raises:
        ShardmillError: if the folder is not a finished build of an encoder.
    """
    from shardmill.runtime.process import start_encoder

    encoder = start_encoder(build, precision)
    tokenizer = read_tokenizer(build / encoder.manifest["tokenizer"]["path"])
    texts = encoder.manifest.get("texts", {})
    calibrated = CALIBRATION in texts.get("files", {})
    biases = read_calibration(build / texts["path"] / CALIBRATION) if calibrated else None
    dense = tuple(read_projection(build / one["path"], one["activation"]) for one in encoder.manifest.get("dense", ()))
    return Reader(encoder, tokenizer, biases, dense)


def read_projection(file: Path, activation: str) -> Projection:
    """Return the projection in a safetensors file of sentence-transformers.

    Raises:
        ShardmillError: if the file can't be read as a projection.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        files.check(file)
        tensors = {name: tensor.float().numpy() for name, tensor in load_file(file).items()}
        return Projection(tensors[WEIGHT], tensors.get(BIAS, np.zeros(1, np.float32)), activation == "tanh")
    except (OSError, SafetensorError, KeyError) as error:
        raise ShardmillError(f"{file} can't be read as a projection: {error}; build again") from error


def label(reader: Reader, text: str) -> Labelled:
    """Return the spans of one text: see `label_all`."""
    (labelled,) = label_all(reader, [text])
    return labelled


def label_all(reader: Reader, texts: Sequence[str]) -> list[Labelled]:
    """Return the spans of texts, [start, end) in characters of each text.

    With the checkpoint's calibration, the spans follow the best path through BIOES. Without one, they are the spans
    that transformers' pipeline builds from each token's likeliest label (aggregation strategy "simple").

    Raises:
        ShardmillError: the model labels no tokens.
    """
    _check_task(reader, LABEL)
    read = [_read(reader, text) for text in texts]
    rows = iter(reader.run([tokens for one in read for tokens in one.windows.tokens]))
    return [_labelled(reader, one, [next(rows) for _ in one.windows.tokens]) for one in read]


def classify(reader: Reader, texts: Sequence[str]) -> list[Classified]:
    """Return the share of each label for whole texts.

    Raises:
        ShardmillError: the model classifies no texts, or a text does not fit into a pass.
    """
    _check_task(reader, CLASSIFY)
    tokens = [reader.tokenizer.encode(text).ids for text in texts]
    classified = []
    for text, rows in zip(tokens, _single(reader, tokens), strict=True):
        (shares,) = _label_probabilities(rows[:1])
        named = dict(zip(reader.encoder.labels, map(float, shares), strict=True))
        classified.append(Classified(dict(sorted(named.items(), key=lambda item: -item[1])), len(text)))
    return classified


def embed(reader: Reader, texts: Sequence[Sequence[int]], dimensions: int | None = None) -> list[Floats]:
    """Return the embeddings [d] of texts, given as tokens, each of length 1.

    An embedding is the mean, the first or the last of a text's rows, and is projected if the checkpoint says so.

    Args:
        reader: a model that embeds.
        texts: the texts' tokens.
        dimensions: how many of an embedding's first numbers to keep, as `truncate_dim` of sentence-transformers does;
            what is kept gets the length 1. By default all are kept.

    Raises:
        ShardmillError: the model embeds no texts, or a text does not fit into a pass.
    """
    _check_task(reader, EMBED)
    pooling = reader.encoder.manifest["pooling"]
    embeddings = []
    for rows in _single(reader, texts):
        row = rows.mean(0) if pooling == "mean" else rows[-1 if pooling == "last" else 0]
        for project in reader.dense:
            row = project(row)
        row = row[:dimensions]
        embeddings.append(row / np.maximum(np.linalg.norm(row), 1e-12))
    return embeddings


@dataclass(frozen=True)
class Scored:
    """How well a document meets a query, from 0 to 1, and the number of tokens that were read."""

    score: float
    tokens: int


def rank(reader: Reader, query: str, documents: Sequence[str], instruction: str | None = None) -> list[Scored]:
    """Return how well each document meets a query: the probability of the model's last answer.

    Args:
        reader: a model that ranks.
        query: the query.
        documents: the documents.
        instruction: what makes a document meet a query; if left out, the checkpoint's authors' instruction.

    Raises:
        ShardmillError: the model ranks nothing, or a query and a document do not fit into a pass.
    """
    _check_task(reader, RANK)
    said = {"query": query, "instruction": instruction or reader.encoder.manifest["instruction"]}
    asked = [_filled(reader.encoder.manifest["template"], said | {"document": one}) for one in documents]
    tokens = [reader.tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
    rows = _single(reader, tokens)
    return [Scored(float(_label_probabilities(r[-1])[-1]), len(t)) for r, t in zip(rows, tokens, strict=True)]


def _filled(template: str, texts: Mapping[str, str]) -> str:
    """Return a template with texts in the places of their names; what a text holds is no place."""
    return re.sub(r"\{(instruction|query|document)\}", lambda place: texts[place[1]], template)


def redacted(text: str, spans: Iterable[Span]) -> str:
    """Return the text with every span replaced by its type.

    Spans may share a character: tokens that are bytes all have the offsets of their character.
    """
    pieces, at = [], 0
    for span in spans:
        pieces += [text[at : span.start], f"[{span.type}]"]
        at = max(at, span.end)
    return "".join([*pieces, text[at:]])


def as_object(text: str, labelled: Labelled) -> dict[str, Any]:
    """Return the result for a text as plain data."""
    spans = [
        {"start": s.start, "end": s.end, "type": s.type, "score": s.score, "text": text[s.start : s.end]}
        for s in labelled.spans
    ]
    return {"spans": spans, "tokens": labelled.tokens, "windows": labelled.windows, "exact": labelled.exact}


def _label_probabilities(logits: Floats) -> Floats:
    """Return the softmax of logits [n, labels]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    shares: Floats = powers / powers.sum(-1, keepdims=True)
    return shares


@dataclass(frozen=True)
class _Read:
    """A text: its encoding, the indices of its tokens that are not special, and its passes."""

    encoding: Encoding
    inside: list[int]
    windows: TextPasses


def _read(reader: Reader, text: str) -> _Read:
    """Encode a text and split it into passes."""
    encoding, encoder = reader.tokenizer.encode(text), reader.encoder
    inside = [i for i, special in enumerate(encoding.special_tokens_mask) if not special]
    if not inside:
        return _Read(encoding, inside, TextPasses((), (), True))
    around = encoding.ids[: inside[0]], encoding.ids[inside[-1] + 1 :]
    tokens = encoding.ids[inside[0] : inside[-1] + 1]
    return _Read(encoding, inside, text_windows(tokens, around, encoder.longest, encoder.manifest["reach"]))


def _labelled(reader: Reader, read: _Read, rows: Sequence[Floats]) -> Labelled:
    """Return the result for a text, given the rows of its passes."""
    count, windows = len(read.encoding.ids), read.windows
    if not rows:
        return Labelled((), count, 0, windows.exact)
    shares = _label_probabilities(windows.joined(rows))
    labels = reader.encoder.labels
    best = shares.argmax(-1).tolist()
    if reader.biases is not None:
        best = likeliest(np.log(np.maximum(shares, LEAST)), labels, reader.biases)
    places = [read.encoding.offsets[i] for i in read.inside]
    tokens = [
        Span(start, end, labels[row], float(share[row]))
        for (start, end), row, share in zip(places, best, shares, strict=True)
    ]
    spans = grouped_spans(tokens) if reader.biases is None else bioes_spans(tokens)
    return Labelled(tuple(spans), count, len(rows), windows.exact)


def _single(reader: Reader, texts: Sequence[Sequence[int]]) -> list[Floats]:
    """Return the rows of texts that each fit into one pass."""
    what = "query and document have" if reader.ranks else "the text has"
    for text in texts:
        if not 0 < len(text) <= reader.encoder.longest:
            raise ShardmillError(f"{what} {len(text)} tokens: it may have 1 to {reader.encoder.longest}")
    return reader.run(texts)


def _check_task(reader: Reader, task: str) -> None:
    """Raise ShardmillError if the model is for another task."""
    if reader.task != task:
        raise ShardmillError(f"{reader.encoder.manifest['model']} is for {reader.task}, not for {task}")
