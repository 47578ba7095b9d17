"""Conversion of one label for each token to spans of text.

Labels are O, or a prefix and a type: "B-person" begins a span, "I-person" continues it and, in the scheme BIOES,
"E-person" ends it and "S-person" is a span of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardmill.errors import ShardmillError
from shardmill.files import load_json
from shardmill.runtime.kv import Floats

OUTSIDE = "O"
CALIBRATION = "viterbi_calibration.json"
IMPOSSIBLE = -1e12
STARTS, ENDS = "OBS", "OES"  # prefixes with which a path may begin and end
# The allowed transitions between prefixes, each with the name of its number in the calibration.
TRANSITIONS = {
    ("O", "O"): "background_stay",
    **{("O", after): "background_to_start" for after in "BS"},
    **{(before, "O"): "end_to_background" for before in "ES"},
    **{(before, after): "end_to_start" for before in "ES" for after in "BS"},
    **{(before, "I"): "inside_to_continue" for before in "BI"},
    **{(before, "E"): "inside_to_end" for before in "BI"},
}
WITHIN = "IE"  # prefixes that only a label of the same type may precede


@dataclass(frozen=True)
class Span:
    """A piece of text, [start, end) in characters, and its type; the score is the mean over its tokens."""

    start: int
    end: int
    type: str
    score: float


def grouped_spans(tokens: Iterable[Span]) -> Iterator[Span]:
    """Yield spans of labelled tokens, as transformers' pipeline does with the aggregation strategy "simple".

    A token continues the previous span if its label has the same type and does not begin a span. As in transformers,
    labels with neither B- nor I- are types themselves.
    """
    group: list[Span] = []
    for token in tokens:
        begins, kind = _tag(token.type)
        if group and (begins or kind != _tag(group[-1].type)[1]):
            yield from _merged(group)
            group = []
        group.append(token)
    yield from _merged(group)


def _tag(label: str) -> tuple[bool, str]:
    """Return whether a label begins a span, and its type."""
    return (label.startswith("B-"), label[2:]) if label[:2] in ("B-", "I-") else (False, label)


def _merged(group: Sequence[Span]) -> Iterator[Span]:
    """Yield the span of tokens that belong together, unless they are outside of all spans."""
    kind = group[0].type.split("-", 1)[-1] if group else OUTSIDE
    if kind != OUTSIDE:
        yield Span(group[0].start, group[-1].end, kind, float(np.mean([token.score for token in group])))


def read_calibration(file: Path) -> Mapping[str, float]:
    """Return the numbers that a checkpoint adds to transitions, by the names of TRANSITIONS.

    Raises:
        ShardmillError: if the file contains no calibration.
    """
    try:
        biases = load_json(file)["operating_points"]["default"]["biases"]
        return {name: float(biases.get(f"transition_bias_{name}", 0.0)) for name in set(TRANSITIONS.values())}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ShardmillError(f"{file}: no calibration of transitions: {error}; fetch the checkpoint again") from error


def transitions(labels: Sequence[str], biases: Mapping[str, float]) -> NDArray[np.float64]:
    """Return the matrix [from, to] of the scores that steps from one label to another add to a path."""
    scores = np.full((len(labels), len(labels)), IMPOSSIBLE)
    for i, before in enumerate(labels):
        for j, after in enumerate(labels):
            name = TRANSITIONS.get((before[0], after[0]))
            if name is not None and (after[0] not in WITHIN or before[2:] == after[2:]):
                scores[i, j] = biases[name]
    return scores


def likeliest(scores: Floats, labels: Sequence[str], biases: Mapping[str, float]) -> list[int]:
    """Return the labels of the best path through BIOES, by Viterbi's algorithm.

    Args:
        scores: [n, labels], the logarithms of probabilities.
        labels: the names of the labels.
        biases: the scores of transitions, see `read_calibration`.
    """
    if not len(scores):
        return []
    steps = transitions(labels, biases)
    allowed = {place: [0.0 if label[0] in place else IMPOSSIBLE for label in labels] for place in (STARTS, ENDS)}
    best, came = np.asarray(scores[0], np.float64) + allowed[STARTS], []
    for row in scores[1:]:
        paths = best[:, None] + steps  # [from, to]
        came.append(paths.argmax(0))
        best = paths.max(0) + row
    path = [int((best + allowed[ENDS]).argmax())]
    for before in reversed(came):
        path.append(int(before[path[-1]]))
    return path[::-1]


def bioes_spans(tokens: Iterable[Span]) -> Iterator[Span]:
    """Yield the spans of labelled tokens on a path through BIOES."""
    group: list[Span] = []
    for token in tokens:
        group.append(token)
        if token.type[0] in ENDS:
            yield from _merged(group)
            group = []
