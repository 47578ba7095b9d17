"""What the commands share: arguments and options with their checks, texts from files, and tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardmill import files
from shardmill.errors import ShardmillError
from shardmill.printable import one_line
from shardmill.runtime.manifest import open_gates, read_manifest

if TYPE_CHECKING:
    from drafted_decoding import ContextPolicy, Drafter
    from drafted_decoding.drafters import TrainedEngine
    from rich.table import Table


def make_table(*columns: str, right: Collection[str] = (), fold: Collection[str] = ()) -> Table:
    """Return an empty table; columns of numbers are aligned to the `right`, and long texts are wrapped in `fold`."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE)
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            overflow="fold" if column in fold else "ellipsis",
        )
    return made


def check_output(file: Path) -> None:
    """Raise ShardmillError if no file can be written there, before work that takes long; its folder is made."""
    try:
        if file.is_dir():
            raise ShardmillError(f"{file}: is a folder; name the file to write")
        if file.exists() and not file.is_file():
            raise ShardmillError(f"{file}: is there already and no regular file; name another with --output")
        file.parent.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(prefix=files.SCRATCH, dir=file.parent).cleanup()
    except OSError as error:
        raise ShardmillError(f"{file}: can't be written ({error.strerror}); name another file with --output") from error


def located_build(text: str) -> Path:
    """Return the folder of a build; a published one is fetched and verified first."""
    from shardmill.release.pull import local_build

    return local_build(text)


Build = Annotated[
    Path,
    typer.Argument(
        help="A build's folder, e.g. build/demo, or a published build: hf:OWNER/NAME@REVISION or hf:OWNER/NAME.",
        metavar="BUILD",
        parser=located_build,
    ),
]

Ungated = Annotated[
    bool, typer.Option("--ungated", help="Take a build whose gates have not all passed, and mark what comes of it.")
]


def opened(build: Path, ungated: bool, context: typer.Context) -> Path:
    """Return the folder to read a build from as long as the command runs; say on stderr if its gates have not passed.

    Raises:
        ShardmillError: `ungated` is asked, but not all programs of the build are made.
    """
    if not ungated:
        return build
    from shardmill.pipeline.ungated import taken_ungated

    folder: Path = context.with_resource(taken_ungated(build))
    for line in open_gates(folder):
        typer.echo(one_line(f"shardmill: UNGATED {build}: {line}"), err=True)
    return folder


# Written out, because --help must not wait for the imports of decode; a test compares them with decode's names.
DRAFTERS = "none, ngram, suffix, learned, eagle3, mtp, assistant or draft_model"
POLICIES = "cost_model or always"
EFFECT = "Affects the speed only, but eagle3, mtp and draft_model at a temperature also change what a seed gives."

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
AdapterName = Annotated[
    str | None, typer.Option(help="An adapter of the build, see `shardmill adapter`; by default the bare model.")
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


def _precision(text: str) -> str:
    """Return a precision of the portable engine. Raises typer.BadParameter for any other word."""
    if text in ("fp32", "fp16"):
        return text
    from portable_coreml.run.ane import options_of

    try:
        options_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return text


Precision = Annotated[
    str,
    typer.Option(help="Of the portable engine; Core ML has no choice. fp16 rounds as the Neural Engine does, so a near "
                 "tie may fall differently in a wide pass than in a narrow one. ane also deviates as the Neural Engine "
                 "is reported to: a prediction, never a measurement.", metavar="[fp32|fp16|ane]", parser=_precision),
]  # fmt: skip


def check_drafter(name: str, draft_build: Path | None, *, may_change: bool = False) -> None:
    """Refuse a drafter that does not exist, and a second build that is missing or would not be used.

    If `may_change`, requests may name another drafter, so a second build is never useless.

    Raises:
        ShardmillError: no drafter has that name, or the drafter needs a second build.
        typer.BadParameter: a second build is given, but the drafter does not need it.
    """
    from drafted_decoding.drafters import DRAFT_MODEL
    from drafted_decoding.drafters import DRAFTERS as KNOWN

    if name not in KNOWN:
        raise ShardmillError(f"no drafter is called {name!r}: use one of {', '.join(KNOWN)}")
    if name == DRAFT_MODEL and draft_build is None:
        raise ShardmillError("drafter draft_model needs a draft model: name a second build with --draft-build")
    if name != DRAFT_MODEL and draft_build is not None and not may_change:
        raise typer.BadParameter("--draft-build goes with --drafter draft_model")


def check_head(name: str, build: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ShardmillError for a drafter that would be part of the build of `manifest`, if the build lacks it."""
    from drafted_decoding.drafters import TRAINED

    if name in TRAINED and manifest.get("drafter", {}).get("kind") != name:
        raise ShardmillError(
            f"{build}: has no {TRAINED[name]}; name one under `drafter` in its config, and build again"
        )


def check_draft_build(draft_build: Path, manifest: Mapping[str, Any]) -> None:
    """Raise ShardmillError if a draft model is not built, or has another vocabulary than the model of `manifest`."""
    ours, theirs = manifest["vocab"], read_manifest(draft_build)["vocab"]
    if ours != theirs:
        raise ShardmillError(
            f"{draft_build}: the draft model has {theirs} tokens, the model {ours}: they must share a tokenizer"
        )


def check_policy(name: str) -> None:
    """Raise ShardmillError if no policy has that name."""
    from drafted_decoding import POLICIES as KNOWN

    if name not in KNOWN:
        raise ShardmillError(f"no draft policy is called {name!r}: use one of {', '.join(KNOWN)}")


def _check_sliding(policy: ContextPolicy, manifest: Mapping[str, Any]) -> None:
    """Raise DecodeError if a sliding context is too small."""
    from drafted_decoding import choose_layout

    from shardmill.runtime.manifest import verify_width

    choose_layout(policy, manifest["context"], verify_width(manifest))


def read_checked(
    build: Path, drafter: str, draft_build: Path | None, policy: ContextPolicy, adapter: str | None
) -> dict[str, Any]:
    """Return the manifest of a build that can do what a command was asked; see the checks above for the errors.

    Args:
        build: the build's folder.
        drafter: a drafter that `check_drafter` has accepted.
        draft_build: the draft model's build, if there is one.
        policy: what happens at the end of the context.
        adapter: the name of an adapter of the build, if one is to be used.
    """
    from shardmill.runtime.adapters import check_adapter

    manifest = read_manifest(build)
    check_head(drafter, build, manifest)
    if draft_build is not None:
        check_draft_build(draft_build, manifest)
    _check_sliding(policy, manifest)
    if adapter is not None:
        check_adapter(build, manifest, adapter)
    return manifest


def make_drafter(
    name: str,
    draft_build: Path | None,
    vocab: int,
    precision: str,
    context_policy: ContextPolicy,
    head: TrainedEngine | None = None,
) -> Drafter:
    """Return a drafter that `check_drafter` and `check_head` have accepted; a draft model is loaded like the model.

    Args:
        name: the drafter's name.
        draft_build: the draft model's build.
        vocab: the model's vocabulary size.
        precision: the portable engine's precision.
        context_policy: what the model, the draft model and a head do when the context is full.
        head: the engine of the build's own drafter, for eagle3, mtp and assistant.
    """
    from drafted_decoding import Session, create_drafter

    from shardmill.runtime import process

    session = None
    if draft_build is not None:
        session = Session(process.load_engine(draft_build, precision), context_policy=context_policy)
    return create_drafter(name, draft_session=session, vocab=vocab, head=head, context_policy=context_policy)


def checked_text(text: str, what: str) -> str:
    """Return `text` from the command line. Raises ShardmillError if its bytes were not UTF-8.

    Python stores bytes that are not UTF-8 as halves of surrogate pairs.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ShardmillError(f"{what} is not UTF-8 text: check its bytes or the terminal's encoding") from error
    return text
