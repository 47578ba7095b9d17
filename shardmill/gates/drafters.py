"""What gates compare a build's drafter with, by the drafter's kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from shardmill.gates import assistant, eagle3, mtp
from shardmill.gates.case import Case
from shardmill.gates.naming import Weights
from shardmill.gates.reference import ReferenceDrafter
from shardmill.gates.stored import StoredWeights
from shardmill.models.eagle3 import EAGLE3
from shardmill.models.interface import ASSISTANT, MTP
from shardmill.plan import Part


def drafter_case(
    part: Part, plan: Mapping[str, Any], known: Mapping[str, Tensor], source: Path, stored: StoredWeights
) -> Case:
    """Return the case of a drafter's part, by the drafter's kind.

    Args:
        part: the part.
        plan: plan.json's content.
        known: the reference step's output.
        source: the model's checkpoint, with the drafter's in a folder inside it if it has one of its own.
        stored: the package's weights.
    """
    cases = {EAGLE3: eagle3.head_case, ASSISTANT: assistant.assistant_case, MTP: mtp.mtp_case}
    return cases[plan["drafter"]["kind"]](part, plan, known, source, stored)


def reference_drafter(
    plan: Mapping[str, Any],
    source: Path,
    all_stored: Iterable[StoredWeights],
    embed: Callable[[Sequence[int]], Tensor],
    weights: Weights,
) -> ReferenceDrafter:
    """Return the drafter of a build out of transformers' modules, by its kind.

    Args:
        plan: plan.json's content.
        source: the model's checkpoint, with the drafter's in a folder inside it if it has one of its own.
        all_stored: the weights of the drafter's packages.
        embed: returns the model's embeddings of tokens, [n, d].
        weights: the weights of the model's packages.
    """
    if plan["drafter"]["kind"] == ASSISTANT:  # which reads the model's caches
        return assistant.reference_assistant(plan, source, all_stored, embed, weights)
    make = {EAGLE3: eagle3.reference_head, MTP: mtp.reference_mtp}[plan["drafter"]["kind"]]
    return make(plan, source, all_stored, embed)
