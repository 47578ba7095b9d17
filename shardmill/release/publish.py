"""Publishes a build as a repository on a hub, with a card that the hub indexes and a person reads first."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from shardmill import __version__, interrupt
from shardmill.checkpoint.hashing import hash_file
from shardmill.errors import ShardmillError
from shardmill.files import SCRATCH, read_json, sealed, write_json, write_text
from shardmill.forms.recipe import called
from shardmill.gates.measurement import nearness
from shardmill.records.attest import HOME, PARITY_TEXT, read_provenance
from shardmill.records.audit import BUNDLE, CARD_RECORD, added
from shardmill.records.finished import ATTESTATION, steps_of, verdict_hashes
from shardmill.release.bundle import CARD, Include, assemble, bundle_files
from shardmill.release.publishable import License, check_leaks, check_license, license_of
from shardmill.release.sign import (
    PROVENANCE,
    SIGNATURE,
    read_envelopes,
    read_private,
    sign_build,
    sign_bundle,
    signed_files,
)
from shardmill.release.verify import prove
from shardmill.runtime.manifest import COMPLETE, read_manifest

if TYPE_CHECKING:
    from shardmill.checkpoint.hub_listing import HubAccess

MARKS = (BUNDLE, "model.json")  # a repository with one of these files holds a build
OF_ANY = (".gitattributes",)  # files that a hub adds to every new repository

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
TEXT = "text-generation"
TAGS = ["coreml", "apple-neural-engine", "shardmill"]
METRICS = {"kl": "kl_divergence", "top1_agreement": "accuracy", "perplexity_ratio": "perplexity_ratio"}


@dataclass(frozen=True)
class PublishOptions:
    """The options for publishing a build."""

    repo: str  # owner/name
    private: bool = False
    include: Include | None = None  # which programs; None for the programs that were signed, or for both kinds
    license: str | None = None  # an identifier that replaces the checkpoint's license
    may: bool = False  # whether the user takes responsibility for the license
    key: Path | None = None  # a private key for signing; None to publish with earlier signatures, or unsigned


def prepare_upload(build: Path, wish: PublishOptions) -> list[str]:
    """Add the bundle's files and the card to a build, sign it if a key is given, and return the files to upload.

    Raises:
        ShardmillError: the build, its gates or its license is not in order, or a file would reveal this machine.
    """
    _check_repository(wish.repo)
    wrong = prove(build, []).wrong
    if wrong:
        (name, what), *others = wrong
        raise ShardmillError(f"{build / name}: {what} ({len(others)} more); build again before you publish")
    license = check_license(License(wish.license) if wish.license else _license(build), wish.may)
    include = wish.include or added(build)["include"]
    signed = (build / SIGNATURE).exists()
    if wish.key is not None:
        sign_build(build, wish.key, include, license)
    elif not signed or not (build / BUNDLE).exists():
        assemble(build, include, license)
    elif include != added(build)["include"]:
        raise ShardmillError(f"{build}: was signed with other programs in it; give --key to sign it anew")
    key = read_private(wish.key).public_key.keyid[:16] if wish.key else _signer(build) if signed else ""
    card = _card_text(build, wish.repo, license, key)
    if wish.key is None and signed and CARD in signed_files(build):
        if (build / CARD).read_text(encoding="utf-8") != card:
            raise ShardmillError(
                f"{build / CARD}: was signed for another repository or license, or changed since; "
                "give --key to sign it anew"
            )
    else:
        write_text(build / CARD, card)
        write_json(build / CARD_RECORD, sealed({"files": {CARD: hash_file(build / CARD)}}))
    if wish.key is not None:
        sign_bundle(build, wish.key)
    files = bundle_files(build)
    check_leaks(build, files)
    return files


@contextmanager
def on_trial(build: Path) -> Iterator[Path]:
    """Yield a copy of a build to prepare instead of the build, which stays as it is. Its files are hard links.

    Every file that is added or changed gets another inode: files are written beside their place, and renamed.
    """
    whole = build.resolve()
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=whole.parent))
    with interrupt.scratch(scratch):
        copy = scratch / whole.name
        try:
            shutil.copytree(whole, copy, symlinks=True, copy_function=_place)
            yield copy
        except ShardmillError as error:
            raise ShardmillError(str(error).replace(str(copy), str(build))) from error


def _place(source: str, target: str) -> None:
    """Link to a file, or copy it where there are no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _check_repository(name: str) -> None:
    """Raise ShardmillError if a name is not valid for a repository on a hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented there

    try:
        validate_repo_id(name)
        fine = "/" in name
    except HFValidationError:
        fine = False
    if not fine:
        raise ShardmillError(f"{name}: not a name for a repository; write OWNER/NAME")


def upload(build: Path, files: list[str], wish: PublishOptions) -> str:
    """Make the repository hold exactly these files, and return its commit. Unchanged files are not sent again.

    Raises:
        CheckpointError: no access, no network, or no hub.
        ShardmillError: the repository exists, and is public although `private` is set, or does not hold a build.
    """
    from shardmill.checkpoint.hub_limits import explain_http
    from shardmill.checkpoint.hub_listing import HubAccess

    access = HubAccess()
    with explain_http(wish.repo, None, access.endpoint), _writing(wish.repo, access.endpoint):
        _check_there(access, files, wish)
        access.api.create_repo(wish.repo, private=wish.private or None, exist_ok=True)
        done = access.api.upload_folder(
            repo_id=wish.repo,
            folder_path=build,
            allow_patterns=[glob.escape(name) for name in files],
            delete_patterns="*",
            commit_message=f"Publish {build.resolve().name}",
        )
        commit: str = done.oid
        return commit


def _check_there(access: HubAccess, files: list[str], wish: PublishOptions) -> None:
    """Raise ShardmillError if the repository exists, and is public against the options or not a build."""
    if not access.api.repo_exists(wish.repo):
        return
    repository = access.api.model_info(wish.repo)
    if wish.private and not repository.private:  # the hub would leave it public
        raise ShardmillError(f"{wish.repo}: exists already and is public; make it private there, or name another")
    names = {file.rfilename for file in repository.siblings or ()}
    others = sorted(names - {*files, *OF_ANY})  # this build's files may come from an interrupted upload
    if others and not names & {*MARKS}:
        raise ShardmillError(
            f"{wish.repo}: exists already and is not a build (it has no {' and no '.join(MARKS)}); publishing "
            f"would remove its {others[0]}; name another repository, or empty it"
        )


@contextmanager
def _writing(repo: str, endpoint: str) -> Iterator[None]:
    """Turn errors that only a change of a repository raises into one-line errors."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code == 403:
            raise ShardmillError(
                f"{repo}: {endpoint} forbids it (403); give the token rights to write there"
            ) from error
        raise
    except RuntimeError as error:  # a large file did not arrive
        raise ShardmillError(
            f"{repo}: {error} What was uploaded stays; run the same command again to continue"
        ) from error


def _license(build: Path) -> License | None:
    definition = read_provenance(build / ATTESTATION)["predicate"]["buildDefinition"]
    source = definition["externalParameters"]["config"]["source"]
    return license_of(source["repo"], source["revision"]) if "repo" in source else None


def _signer(build: Path) -> str:
    """Return the identity of the key that signed a build's provenance."""
    return str(next(iter(read_envelopes(build / PROVENANCE)[0].signatures)))[:16]


def _card_text(build: Path, repo: str, license: License, key: str) -> str:
    """Return the card's text; the hub client's own classes write its metadata.

    `license` is the checkpoint's, and `key` the identity of the signing key, empty if the build is not signed.
    """
    from huggingface_hub import ModelCardData
    from jinja2 import Environment, StrictUndefined

    statement = read_provenance(build / ATTESTATION)
    definition = statement["predicate"]["buildDefinition"]
    dependencies = {row["name"]: row for row in definition["resolvedDependencies"]}
    config, model = definition["externalParameters"]["config"], read_manifest(build, COMPLETE)
    verdicts = [read_json(build / name) for name, _ in sorted(verdict_hashes(steps_of(statement)))]
    base = config["source"].get("repo")
    text = dependencies[PARITY_TEXT]["digest"]["sha256"]
    body = Environment(undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    rows = list(_worst(verdicts))
    data = ModelCardData(
        license=license.id,
        license_name=license.name,
        license_link=license.link,
        base_model=base,
        base_model_relation=("finetune" if "adapter" in config["source"] else "quantized") if base else None,
        pipeline_tag=_task(model),
        tags=[*TAGS, called(config["convert"]).lower()],
        model_name=model["model"],
        eval_results=list(_results(verdicts, text)),
    )
    told = body.render(
        model=model,
        encodes=_task(model) != TEXT,
        base=base,
        commit=config["source"].get("revision"),
        adapter=PurePosixPath(config["source"].get("adapter", "")).name,
        weights=called(config["convert"]),
        home=HOME,
        version=__version__,
        engine=_engine(verdicts),
        predicted=any(row["evidence"] == "predicted" for row in rows),
        rows=rows,
        text=text,
        missing=sorted({name for verdict in verdicts for name in verdict.get("not_run", {})}),
        left_out=_left_out(added(build)["left_out"]),
        repo=repo,
        license=license,
        key=key,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{told.strip()}\n"


def _task(model: Mapping[str, Any]) -> str:
    """Return the hubs' name for the model's task."""
    if all(part["kind"] != "encoder" for part in model["parts"]):
        return TEXT
    return str(model["task"])


def _engine(verdicts: list[Mapping[str, Any]]) -> str:
    engines = {" ".join(verdict["engine"].values()) for verdict in verdicts if "engine" in verdict}
    return ", ".join(sorted(engines)) or "not recorded"


def _worst(verdicts: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each number the row that is nearest to its threshold or furthest beyond it."""
    worst: dict[str, dict[str, Any]] = {}
    for verdict in verdicts:
        for row in verdict["gate"]:
            if row["name"] not in worst or nearness(row) > nearness(worst[row["name"]]):
                evidence = verdict.get("evidence", "measured")
                worst[row["name"]] = {**row, "gate": verdict["part"], "evidence": evidence}
    yield from (worst[name] for name in sorted(worst))


def _results(verdicts: list[Mapping[str, Any]], text: str) -> Iterator[Any]:
    """Yield the measurements of the stack's gate in the form of a model index."""
    from huggingface_hub import EvalResult

    for verdict in verdicts:
        for row in verdict["gate"]:
            if row["name"] in METRICS and verdict["part"] == "stack":
                yield EvalResult(
                    task_type="text-generation",
                    dataset_type="shardmill-parity-text",
                    dataset_name="the text that the parity gates are fed with",
                    dataset_revision=text,
                    metric_type=METRICS[row["name"]],
                    metric_name=row["meaning"],
                    metric_value=row["value"],
                )


def _left_out(names: list[str]) -> str:
    """Describe the kinds of files that were left out."""
    kinds = {"source/": "the checkpoint's weights", "reference": "the reference's states"}
    kinds |= {"packages/": "the packages", "compiled/": "the compiled programs"}
    return ", ".join(what for start, what in kinds.items() if any(name.startswith(start) for name in names))
