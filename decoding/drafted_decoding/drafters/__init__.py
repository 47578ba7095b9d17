"""Drafters by name."""

from collections.abc import Callable
from typing import cast

from drafted_decoding.drafters.assistant import AssistantDrafter, AssistantEngine
from drafted_decoding.drafters.base import EMPTY, PLAIN, Draft, Drafter, NoDrafter, RequestInfo
from drafted_decoding.drafters.draft_model import DraftModelDrafter
from drafted_decoding.drafters.head import EAGLE3, MTP, HeadDrafter, HeadEngine
from drafted_decoding.drafters.learned import LearnedDrafter
from drafted_decoding.drafters.lookup import NgramDrafter, SuffixDrafter
from drafted_decoding.engine import DecodeError
from drafted_decoding.layout import ContextPolicy
from drafted_decoding.session import Session

__all__ = [
    "ASSISTANT",
    "BY_ITSELF",
    "DRAFTERS",
    "DRAFT_MODEL",
    "EAGLE3",
    "EMPTY",
    "PLAIN",
    "TRAINED",
    "Draft",
    "Drafter",
    "HeadEngine",
    "RequestInfo",
    "TrainedEngine",
    "create_drafter",
]

_BY_ITSELF: dict[str, Callable[[LearnedDrafter | None], Drafter]] = {  # drafters that need no second model
    "none": lambda _: NoDrafter(),
    "ngram": lambda _: NgramDrafter(),
    "suffix": lambda _: SuffixDrafter(),
    "learned": lambda learned: learned or LearnedDrafter(),
}
ASSISTANT, DRAFT_MODEL = AssistantDrafter.name, DraftModelDrafter.name
BY_ITSELF = tuple(_BY_ITSELF)
# Drafters whose programs are part of a build, with what the build has.
TRAINED = {EAGLE3: "EAGLE-3 head", ASSISTANT: "assistant", MTP: "MTP layer"}
DRAFTERS = (*BY_ITSELF, *TRAINED, DRAFT_MODEL)
TrainedEngine = HeadEngine | AssistantEngine


def create_drafter(
    name: str,
    *,
    draft_session: Session | None = None,
    vocab: int | None = None,
    learned: LearnedDrafter | None = None,
    head: TrainedEngine | None = None,
    context_policy: ContextPolicy = "stop",
) -> Drafter:
    """Create a drafter with its default settings.

    Args:
        name: one of `DRAFTERS`.
        draft_session: for `draft_model`: a session on the draft model's engine.
        vocab: for `draft_model`: the target's vocabulary; by default the draft model's.
        learned: for `learned`: an existing drafter with its table; by default a new one.
        head: for `eagle3`, `mtp` and `assistant`: the engine of the build's own drafter.
        context_policy: for `eagle3` and `mtp`: the policy of the model's session.

    Raises:
        DecodeError: no drafter has that name, or `draft_model` lacks its session, or another its engine.
    """
    if name in TRAINED:
        if head is None:
            raise DecodeError(f"drafter {name} needs a build that has one: give its engine")
        if name == ASSISTANT:
            return AssistantDrafter(cast(AssistantEngine, head))
        return HeadDrafter(cast(HeadEngine, head), name, context_policy=context_policy)
    if name == DRAFT_MODEL:
        if draft_session is None:
            raise DecodeError("drafter draft_model needs a draft model: give the session of one")
        return DraftModelDrafter(draft_session, vocab=vocab or draft_session.engine.vocab)
    if name not in _BY_ITSELF:
        raise DecodeError(f"no drafter is called {name!r}: use one of {', '.join(DRAFTERS)}")
    return _BY_ITSELF[name](learned)
