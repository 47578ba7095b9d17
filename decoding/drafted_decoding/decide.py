"""The probabilities of labels: how likely a model is to write each label next.

A label is a sequence of tokens, and its probability is the product of its tokens' probabilities. Labels are known in
advance, so nothing is generated: the prompt runs once, and then each label's tokens but the last, which needs no pass.
Labels that begin alike share these passes, and a label of a single token takes none.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from drafted_decoding.engine import DecodeError, Logits
from drafted_decoding.generate import agreement
from drafted_decoding.request import PrefillEvent
from drafted_decoding.sampler import log_softmax
from drafted_decoding.session import Session

Label = tuple[int, ...]  # the tokens of a label
Logs = dict[Label, dict[int, float]]  # after the first tokens of a label, the log-probabilities of the next ones


@dataclass(frozen=True)
class LabelCalibration:
    """What turns log-probabilities of labels into calibrated probabilities: softmax(log p / temperature + bias).

    Temperature scaling is from Guo et al., "On Calibration of Modern Neural Networks" (arXiv:1706.04599). A bias of
    each label corrects what a model prefers without reading the text, as in Zhao et al., "Calibrate Before Use"
    (arXiv:2102.09690).

    Attributes:
        temperature: above 1 for a model that is too sure of itself.
        biases: by label; 0 for a label that is not named.
    """

    temperature: float = 1.0
    biases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelScores:
    """How likely labels are after a prompt.

    Attributes:
        logprobs: the log-probability of each label's tokens; empty if nobody needs it.
        exclusive: the log-probability of writing each label and no longer label that begins with its tokens. It differs
            from the label's log-probability only if there is such a label, and may be -inf. If nobody needs
            log-probabilities, all may be off by the same amount.
        prompt_tokens: length of the prompt.
        reused_tokens: prompt tokens that were reused from earlier requests.
        passes: engine calls for the prompt and the labels.
    """

    logprobs: tuple[float, ...]
    exclusive: tuple[float, ...]
    prompt_tokens: int
    reused_tokens: int
    passes: int


def score_labels(
    session: Session, prompt: Sequence[int], labels: Sequence[Label], *, logprobs: bool = True
) -> Generator[PrefillEvent | LabelScores, None, None]:
    """Yield a `PrefillEvent` after each pass, where the caller may stop, and then the `LabelScores`.

    Args:
        session: the engine's slots; a prefix of the prompt that they hold is not run again.
        prompt: the tokens before the labels.
        labels: the labels, all different, with at least one token each.
        logprobs: False for probabilities among the labels alone. Labels that are tokens of the engine's `labels` then
            need no logits of other tokens.

    Raises:
        DecodeError: labels are empty or equal, or the prompt is empty or does not fit into the context with a label.
    """
    if not labels or not all(labels) or len(set(labels)) < len(labels):
        raise DecodeError("labels must have one token or more each, and no two may have the same tokens")
    wanted: dict[Label, set[int]] = {}
    for label in labels:
        for i, token in enumerate(label):
            wanted.setdefault(label[:i], set()).add(token)
    session.check_prompt([*prompt, *max(wanted, key=len)])
    if not all(0 <= token < session.engine.vocab for label in labels for token in label):
        raise DecodeError(f"a label holds a token outside the vocabulary of {session.engine.vocab}")
    logs: Logs = {}
    known = {token: row for row, token in enumerate(session.engine.labels)}
    few = not logprobs and {*wanted} == {()} and wanted[()] <= known.keys()
    for prefill in session.prefill_passes(prompt, labels=few):
        yield PrefillEvent(prefill.held, len(prompt))
    if few:
        logs[()] = {token: float(prefill.row[known[token]]) for token in wanted[()]}
    else:
        _note(logs, wanted, (), prefill.row)
    passes, paths = prefill.passes, sorted(wanted)
    for path in (one for one, after in pairwise([*paths, ()]) if one and after[: len(one)] != one):  # the whole paths
        text = [*prompt, *path]
        if session.truncate(agreement(text, session.tokens)) < len(prompt):  # a ring no longer holds the prompt's end
            for again in session.prefill_passes(prompt):
                yield PrefillEvent(again.held, len(prompt))
            passes += again.passes
        while (filled := len(session.tokens)) < len(text):
            count = min(session.room(), len(text) - filled)
            rows = session.feed(text[filled : filled + count])
            session.commit(count)
            passes += 1
            for at, row in enumerate(rows, filled + 1 - len(prompt)):
                _note(logs, wanted, path[:at], row)
            yield PrefillEvent(len(prompt), len(prompt))
    scores = {label: sum(logs[label[:i]][token] for i, token in enumerate(label)) for label in labels}
    yield LabelScores(
        tuple(scores.values()) if logprobs else (),
        tuple(_exclusive(label, scores) for label in labels),
        len(prompt),
        prefill.reused,
        passes,
    )


def _note(logs: Logs, wanted: Mapping[Label, set[int]], path: Label, row: Logits) -> None:
    """Record the log-probabilities of the tokens that labels have after `path`, given the logits [V] there."""
    logprobs = log_softmax(row)
    logs[path] = {token: float(logprobs[token]) for token in wanted[path]}


def _exclusive(label: Label, scores: Mapping[Label, float]) -> float:
    """Return the log-probability of a label without the longer labels that begin with it."""
    longer = [one for one in scores if len(one) > len(label) and one[: len(label)] == label]
    next_longer = [one for one in longer if not any(one != other and one[: len(other)] == other for other in longer)]
    share = sum(np.exp(scores[one] - scores[label]) for one in next_longer)
    return scores[label] + float(np.log1p(-share)) if share < 1 else -np.inf


def label_probabilities(
    scores: LabelScores, names: Sequence[str], calibration: LabelCalibration | None = None
) -> NDArray[np.float64]:
    """Return the probabilities of labels [labels], whose sum is 1; a calibration knows them by their `names`."""
    calibration = calibration or LabelCalibration()
    biases = [calibration.biases.get(name, 0.0) for name in names]
    logits = np.asarray(scores.exclusive) / calibration.temperature + biases
    return np.exp(log_softmax(logits))
