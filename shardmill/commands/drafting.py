"""Options that generate, chat and serve share: what drafts, how much, and what the context and the engine do.

What is wrong with them is said before a model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardmill.commands.build import located_build
from shardmill.errors import ShardmillError
from shardmill.runtime import load
from shardmill.runtime.manifest import read_manifest

if TYPE_CHECKING:
    from shardmill.decode import ContextPolicy, Drafter

# Written out, as --help must not wait for the imports of decode; a test compares them with the names there.
DRAFTERS = "none, ngram, suffix, learned or draft_model"
POLICIES = "cost_model or always"
EFFECT = "Affects the speed only, except that draft_model at a temperature also changes what a seed gives."

DrafterName = Annotated[str, typer.Option(help=f"What drafts tokens: {DRAFTERS}. {EFFECT}")]
DraftBuild = Annotated[
    Path | None,
    typer.Option(help="For draft_model: the draft model's build, a folder or hf:OWNER/NAME.", parser=located_build),
]
PolicyName = Annotated[str, typer.Option(help=f"What decides how much is drafted: {POLICIES}.")]
ContextOption = Annotated[
    Literal["stop", "slide"],
    typer.Option(help="When the context is full: stop, or slide on and forget the oldest, except the first four."),
]
TemplateFile = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File with a chat template to use instead of the checkpoint's."),
]
Lossy = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="LOSSY, off by default: also accept a drafted token that is not the model's "
                 "choice, if it is among the most likely ones that make up this share of the probability, e.g. 0.9."),
]  # fmt: skip
Precision = Annotated[
    Literal["fp32", "fp16"],
    typer.Option(help="Of the portable engine; Core ML has no choice. fp16 rounds as the Neural Engine does, so a near "
                 "tie may fall differently in a wide pass than in a narrow one."),
]  # fmt: skip


def check_drafter(name: str, draft_build: Path | None, *, may_change: bool = False) -> None:
    """Refuses a drafter that does not exist, and a second build that is missing or would not be used.

    Args:
        name: as --drafter gives it.
        draft_build: as --draft-build gives it.
        may_change: requests may name another drafter, so a second build is never useless.

    Raises:
        ShardmillError: no drafter has that name, or it needs a second build.
        typer.BadParameter: a second build is named that the drafter does not need.
    """
    from shardmill.decode.drafters import DRAFT_MODEL
    from shardmill.decode.drafters import DRAFTERS as KNOWN

    if name not in KNOWN:
        raise ShardmillError(f"no drafter is called {name!r}: use one of {', '.join(KNOWN)}")
    if name == DRAFT_MODEL and draft_build is None:
        raise ShardmillError("drafter draft_model needs a draft model: name a second build with --draft-build")
    if name != DRAFT_MODEL and draft_build is not None and not may_change:
        raise typer.BadParameter("--draft-build goes with --drafter draft_model")


def check_draft_build(draft_build: Path, manifest: Mapping[str, Any]) -> None:
    """Refuses a draft model that is not built, or that has another vocabulary than the model of `manifest`.

    Raises:
        ShardmillError: it cannot draft for this model.
    """
    ours, theirs = manifest["vocab"], read_manifest(draft_build)["vocab"]
    if ours != theirs:
        raise ShardmillError(
            f"{draft_build}: the draft model has {theirs} tokens, the model {ours}: they must share a tokenizer"
        )


def check_policy(name: str) -> None:
    """Refuses a policy that does not exist.

    Raises:
        ShardmillError: no policy has that name.
    """
    from shardmill.decode import POLICIES as KNOWN

    if name not in KNOWN:
        raise ShardmillError(f"no draft policy is called {name!r}: use one of {', '.join(KNOWN)}")


def check_context(policy: ContextPolicy, manifest: Mapping[str, Any]) -> None:
    """Refuses to slide where the context is too small for it.

    Raises:
        DecodeError: it is.
    """
    from shardmill.decode import choose_layout
    from shardmill.runtime.manifest import verify_width

    choose_layout(policy, manifest["context"], verify_width(manifest))


def make_drafter(
    name: str, draft_build: Path | None, vocab: int, precision: str, context_policy: ContextPolicy
) -> Drafter:
    """Makes the drafter of that name; a draft model is loaded as the target is.

    Args:
        name: a drafter that `check_drafter` let through.
        draft_build: the draft model's build folder, if it has one.
        vocab: the target's vocabulary size.
        precision: see `load_engine`.
        context_policy: what the draft model does once its context is full.
    """
    from shardmill.decode import Session, create_drafter

    session = (
        None
        if draft_build is None
        else Session(load.load_engine(draft_build, precision), context_policy=context_policy)
    )
    return create_drafter(name, draft_session=session, vocab=vocab)
