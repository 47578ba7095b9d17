"""Labels to spans: grouping is transformers' own, and the best path through BIOES is the best of all paths."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import TokenClassificationPipeline

from shardmill.errors import ShardmillError
from shardmill.runtime.spans import TRANSITIONS, Span, bioes_spans, grouped_spans, likeliest, read_calibration

LABELS = ["O", *(f"{place}-{name}" for name in ("a", "b") for place in "BIES")]
FOLLOWS = {"O": "OBS", "B": "IE", "I": "IE", "E": "OBS", "S": "OBS"}  # from the scheme's definition


class Judge(TokenClassificationPipeline):
    """transformers' pipeline without a model: of it, only the grouping is asked."""

    def __init__(self) -> None:
        self.tokenizer: Any = type(
            "Tokenizer", (), {"convert_tokens_to_string": lambda self, tokens: "".join(tokens)}
        )()


@pytest.mark.parametrize("seed", range(20))
def test_grouping_is_that_of_transformers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [LABELS[i] for i in rng.integers(0, len(LABELS), 60)]
    scores = rng.random(60)
    tokens = [Span(i, i + 1, name, float(score)) for i, (name, score) in enumerate(zip(names, scores, strict=True))]
    entities = [
        {"entity": t.type, "score": t.score, "index": t.start, "word": "w", "start": t.start, "end": t.end}
        for t in tokens
    ]
    theirs = [row for row in Judge().group_entities(entities) if row["entity_group"] != "O"]
    expected = [(row["start"], row["end"], row["entity_group"], pytest.approx(row["score"])) for row in theirs]
    assert [(s.start, s.end, s.type, s.score) for s in grouped_spans(tokens)] == expected


def allowed(path: tuple[str, ...]) -> bool:
    """Whether labels are a path through BIOES."""
    if path[0][0] not in "OBS" or path[-1][0] not in "OES":
        return False
    for before, after in zip(path, path[1:], strict=False):
        if after[0] not in FOLLOWS[before[0]] or (after[0] in "IE" and before[2:] != after[2:]):
            return False
    return True


@pytest.mark.parametrize("seed", range(5))
def test_the_best_path_is_the_best_of_all_paths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    biases = {name: float(rng.normal()) for name in sorted(set(TRANSITIONS.values()))}
    scores = rng.normal(size=(4, len(LABELS))).astype(np.float32)

    def worth(path: tuple[int, ...]) -> float:
        names = [LABELS[i] for i in path]
        steps = sum(biases[TRANSITIONS[a[0], b[0]]] for a, b in zip(names, names[1:], strict=False))
        return float(sum(scores[i, row] for i, row in enumerate(path))) + steps

    paths = [p for p in product(range(len(LABELS)), repeat=4) if allowed(tuple(LABELS[i] for i in p))]
    assert tuple(likeliest(scores, LABELS, biases)) == max(paths, key=worth)


def test_a_text_without_tokens_has_no_path() -> None:
    assert likeliest(np.zeros((0, 9), np.float32), LABELS, dict.fromkeys(TRANSITIONS.values(), 0.0)) == []


def test_spans_of_a_path() -> None:
    names = ["O", "B-a", "I-a", "E-a", "S-b", "O", "S-a"]
    found = bioes_spans(Span(i, i + 1, name, 0.5 + i / 100) for i, name in enumerate(names))
    expected = [(1, 4, "a", pytest.approx(0.52)), (4, 5, "b", 0.54), (6, 7, "a", 0.56)]
    assert [(s.start, s.end, s.type, s.score) for s in found] == expected


def test_a_calibration_is_read_as_openai_writes_it(tmp_path: Path) -> None:
    """All six numbers of the default operating point; one that is left out is 0; another file is refused."""
    file = tmp_path / "viterbi_calibration.json"
    biases = {f"transition_bias_{name}": i / 4 for i, name in enumerate(sorted(set(TRANSITIONS.values())))}
    del biases["transition_bias_inside_to_end"]
    file.write_text(json.dumps({"operating_points": {"default": {"biases": biases}}}))
    found = read_calibration(file)
    assert len(found) == 6 and found["inside_to_end"] == 0
    assert all(found[name.removeprefix("transition_bias_")] == value for name, value in biases.items())
    file.write_text('{"operating_points": {}}')
    with pytest.raises(ShardmillError, match="no calibration"):
        read_calibration(file)
