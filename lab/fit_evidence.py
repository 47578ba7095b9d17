"""Fits what contexts are worth to the `learned` drafter: decoding/drafted_decoding/drafters/evidence.json.

    python lab/fit_evidence.py [--out EVIDENCE.json]

The texts are the docstrings of Python's standard library, one text per module, tokenised with mistral-common's Tekken
tokenizer: a text's first tokens stand for a prompt, the rest for the output. No recorded chat is among them, so the
chats that lab/drafters.py replays are new to the weights. A text is replayed with a table of the other texts
of its group, in tenths, and once more without a table; what was known of each drafted token, up to the first wrong
one of a pass, is a sample. The weights maximise the likelihood of the right tokens: first those of contexts and
bonuses alone, then, on samples of a replay with these, the trust by situation too. Takes some minutes.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, log1p
from pathlib import Path
from typing import Any

import torch
from drafted_decoding.drafters.follow import Followers, only
from drafted_decoding.drafters.learned import FILE, OFTEN, FollowerCounts, LearnedDrafter, situation
from drafted_decoding.drafters.learned import parse_weights as parse_evidence
from drafted_decoding.generate import agreement
from drafters import Recorded, tekken
from torch import Tensor
from torch.nn.functional import cross_entropy

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}
PROMPT, OUTPUT = 30, 470  # tokens of a text
TEXTS, GROUP, FOLDS = 200, 100, 10
DRAFTS = 3
OWN, TABLE = (0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 5)  # kinds of context that are kept
KINDS = len(OWN) + len(TABLE)
CANDIDATES = 28  # of a sample, at most
Row = list[float]  # per kind share, presence, log(1 + count); then the two of the bonus


@dataclass(frozen=True)
class Sample:
    """What was known of the candidates, [n, 3 KINDS + 2], which of them was right (or none), and the situation."""

    rows: list[Row]
    right: int | None
    situation: int


@dataclass(frozen=True)
class Batch:
    """Samples as tensors: rows [n, C, 3 KINDS + 2], known [n, C + 1], right [n] (C: none), situation [n]."""

    rows: Tensor
    known: Tensor
    right: Tensor
    situation: Tensor


class Recording(LearnedDrafter):
    """A learned drafter that notes what it knew of each token it drafted: tokens, rows and situation."""

    def __init__(self, evidence: FollowerCounts) -> None:
        super().__init__(evidence=evidence)
        self.noted: list[tuple[list[int], list[Row], int]] = []

    def _likeliest(self, keys: Sequence[int], *, hasty: bool) -> tuple[int, float]:
        text, table = self._known(keys, hasty=hasty)
        rows: dict[int, Row] = {}
        for kind, entry in enumerate([*text, *table[: len(TABLE)]]):
            for token, share, count in followers(entry):
                row = rows.setdefault(token, [0.0] * (3 * KINDS) + bonus(self._held.get(token, 0)))
                row[3 * kind : 3 * kind + 3] = [share, 1.0, log1p(count)]
        self.noted.append(([*rows], [*rows.values()], situation(text, table)))
        return super()._likeliest(keys, hasty=hasty)


def followers(entry: int | Followers | None) -> list[tuple[int, float, int]]:
    """Return top followers of a context, their shares and counts."""
    if entry is None:
        return []
    if isinstance(entry, int):
        entry = Followers(*only(entry))
    return [(token, entry.share(token), entry.counts[token]) for token in entry.top]


def bonus(count: int) -> Row:
    """Return the features of a token that the text holds `count` times."""
    return [min(count, OFTEN) / OFTEN, float(count > 0)]


def texts() -> list[Recorded]:
    """Return docstrings of the standard library, a text per module, in a shuffled order."""
    encode = tekken()
    root = Path(sysconfig.get_paths()["stdlib"])
    recorded = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        tokens = encode(docstrings(path.read_text(encoding="utf-8", errors="replace")), bos=False, eos=False)
        if len(tokens) >= OUTPUT // 2:
            recorded.append(Recorded(tokens[:PROMPT], tokens[PROMPT : PROMPT + OUTPUT]))
    random.Random(0).shuffle(recorded)
    return recorded[:TEXTS]


def docstrings(source: str) -> str:
    """Return all docstrings of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nodes = ast.walk(ast.parse(source))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return "\n\n".join(doc for node in nodes if isinstance(node, kinds) if (doc := ast.get_docstring(node)))


def collect(texts: Sequence[Recorded], evidence: FollowerCounts) -> Iterator[Sample]:
    """Return samples of every text, with a table of the other texts of its group and without."""
    for start in range(0, len(texts), GROUP):
        group = texts[start : start + GROUP]
        for fold in range(FOLDS):
            drafter = Recording(evidence)
            for i, text in enumerate(group):
                if i % FOLDS != fold:
                    drafter.reset([*text.prompt, *text.output])
                    drafter.finish()
            for text in group[fold::FOLDS]:
                yield from replay(drafter, text)
                yield from replay(Recording(evidence), text)


def replay(drafter: Recording, text: Recorded) -> Iterator[Sample]:
    """Return samples of a text; the drafter learns nothing from the text."""
    drafter.reset(text.prompt)
    drafter.observe(text.output[:1], 0)
    done = 1
    while done < len(text.output):
        drafter.noted.clear()
        draft = drafter.propose([], min(DRAFTS, len(text.output) - done)).tokens
        right = agreement(draft, text.output[done:])
        for (tokens, rows, where), token in zip(drafter.noted[: right + 1], text.output[done:], strict=False):
            yield Sample(rows, tokens.index(token) if token in tokens else None, where)
        emitted = text.output[done : done + right + 1]
        drafter.observe(emitted, right)
        done += len(emitted)


def batch(samples: Sequence[Sample]) -> Batch:
    """Return samples as tensors."""
    n = len(samples)
    rows, known = torch.zeros(n, CANDIDATES, 3 * KINDS + 2), torch.zeros(n, CANDIDATES + 1, dtype=torch.bool)
    right = torch.full((n,), CANDIDATES)
    known[:, CANDIDATES] = True
    for i, sample in enumerate(samples):
        count = min(CANDIDATES, len(sample.rows))
        if count:
            rows[i, :count] = torch.tensor(sample.rows[:count])
        known[i, :count] = True
        if sample.right is not None and sample.right < count:
            right[i] = sample.right
    return Batch(rows, known, right, torch.tensor([sample.situation for sample in samples]))


@dataclass(frozen=True)
class Parameters:
    """What is fitted: weights [3 KINDS + 2], trust [16, KINDS], the score of no candidate []."""

    weights: Tensor
    trust: Tensor
    none: Tensor

    def scores(self, rows: Tensor, where: Tensor) -> Tensor:
        """Return [n, C + 1]."""
        each = (rows[:, :, :-2] * self.weights[:-2]).unflatten(2, (KINDS, 3)).sum(3)  # [n, C, KINDS]
        points = (each * self.trust[where].unsqueeze(1)).sum(2) + rows[:, :, -2:] @ self.weights[-2:]
        return torch.cat([points, self.none.expand(len(rows), 1)], 1)


def fit(data: Batch, start: Parameters, *, trust: bool, epochs: int = 16, rate: float = 0.01) -> Parameters:
    """Fit the likelihood by Adam; `trust` stays 1 unless it is to be fitted, and is drawn towards 1 then."""
    torch.manual_seed(0)
    fitted = Parameters(*(value.clone().requires_grad_() for value in (start.weights, start.trust, start.none)))
    free = [fitted.weights, fitted.none, *([fitted.trust] if trust else [])]
    optimiser = torch.optim.Adam(free, rate)
    for epoch in range(epochs):
        for group in optimiser.param_groups:
            group["lr"] = rate * (1 - epoch / epochs)
        for chosen in torch.randperm(len(data.right)).split(512):
            points = fitted.scores(data.rows[chosen], data.situation[chosen])
            points = points.masked_fill(~data.known[chosen], -1e9)
            loss = cross_entropy(points, data.right[chosen])
            loss = loss + 1e-5 * fitted.weights.square().sum() + 3e-4 * (fitted.trust - 1).square().sum()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return Parameters(fitted.weights.detach(), fitted.trust.detach(), fitted.none.detach())


def content(fitted: Parameters) -> dict[str, Any]:
    """Return evidence.json."""
    weights = [[round(x, 3) for x in row] for row in fitted.weights[:-2].reshape(KINDS, 3).tolist()]
    trust = [[round(x, 3) for x in row] for row in fitted.trust.tolist()]
    text, table = (dict(zip(kinds, rows, strict=True)) for kinds, rows in
                  ((OWN, weights[: len(OWN)]), (TABLE, weights[len(OWN) :])))  # fmt: skip
    return {
        "own": [text.get(kind) for kind in range(len(OWN))],
        "table": [table.get(kind) for kind in range(len(OWN))],
        "own_trust": [row[: len(OWN)] for row in trust],
        "table_trust": [row[len(OWN) :] for row in trust],
        "held": [round(x, 3) for x in fitted.weights[-2:].tolist()],
        "none": round(float(fitted.none), 3),
    }


def evidence(fitted: Parameters) -> FollowerCounts:
    """Return fitted weights as the drafter takes them."""
    return parse_evidence(content(fitted))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args(arguments)
    recorded = texts()
    print(f"{len(recorded)} texts, {sum(len(text.output) for text in recorded)} tokens", flush=True)
    start = Parameters(torch.full((3 * KINDS + 2,), 0.5), torch.ones(16, KINDS), torch.tensor(log(30.0)))
    plain = fit(batch([*collect(recorded, evidence(start))]), start, trust=False)
    print("weights fitted, now the trust", flush=True)
    best = fit(batch([*collect(recorded, evidence(plain))]), plain, trust=True)
    lines = [f'  "{key}": {json.dumps(value)}' for key, value in content(best).items()]
    args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    print(f"{args.out}: odds against all candidates of {exp(float(best.none)):.0f} to one token without evidence")
    return 0


if __name__ == "__main__":
    sys.exit(main())
