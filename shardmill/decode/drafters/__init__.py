"""Drafters by name."""

from collections.abc import Callable

from shardmill.decode.drafters.base import EMPTY, PLAIN, Draft, Drafter, NoDrafter, RequestInfo
from shardmill.decode.drafters.draft_model import DraftModelDrafter
from shardmill.decode.drafters.eagle3 import Eagle3Drafter, HeadEngine
from shardmill.decode.drafters.learned import LearnedDrafter
from shardmill.decode.drafters.lookup import NgramDrafter, SuffixDrafter
from shardmill.decode.engine import DecodeError
from shardmill.decode.session import ContextPolicy, Session

__all__ = [
    "BY_ITSELF",
    "DRAFTERS",
    "DRAFT_MODEL",
    "EAGLE3",
    "EMPTY",
    "PLAIN",
    "Draft",
    "Drafter",
    "HeadEngine",
    "RequestInfo",
    "create_drafter",
]

_BY_ITSELF: dict[str, Callable[[LearnedDrafter | None], Drafter]] = {  # drafters that need no second model
    "none": lambda _: NoDrafter(),
    "ngram": lambda _: NgramDrafter(),
    "suffix": lambda _: SuffixDrafter(),
    "learned": lambda learned: learned or LearnedDrafter(),
}
EAGLE3, DRAFT_MODEL = Eagle3Drafter.name, DraftModelDrafter.name
BY_ITSELF = tuple(_BY_ITSELF)
DRAFTERS = (*BY_ITSELF, EAGLE3, DRAFT_MODEL)


def create_drafter(
    name: str,
    *,
    draft_session: Session | None = None,
    vocab: int | None = None,
    learned: LearnedDrafter | None = None,
    head: HeadEngine | None = None,
    context_policy: ContextPolicy = "stop",
) -> Drafter:
    """Create a drafter with its default settings.

    Args:
        name: one of `DRAFTERS`.
        draft_session: for `draft_model`: a session on the draft model's engine.
        vocab: for `draft_model`: the target's vocabulary; by default the draft model's.
        learned: for `learned`: an existing drafter with its table; by default a new one.
        head: for `eagle3`: the engine of the build's head.
        context_policy: for `eagle3`: the policy of the model's session.

    Raises:
        DecodeError: no drafter has that name, or `draft_model` lacks its session, or `eagle3` its head.
    """
    if name == EAGLE3:
        if head is None:
            raise DecodeError("drafter eagle3 needs a build with a head: give the head's engine")
        return Eagle3Drafter(head, context_policy=context_policy)
    if name == DRAFT_MODEL:
        if draft_session is None:
            raise DecodeError("drafter draft_model needs a draft model: give the session of one")
        return DraftModelDrafter(draft_session, vocab=vocab or draft_session.engine.vocab)
    if name not in _BY_ITSELF:
        raise DecodeError(f"no drafter is called {name!r}: use one of {', '.join(DRAFTERS)}")
    return _BY_ITSELF[name](learned)
