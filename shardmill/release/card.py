"""The card of a published build: what a hub indexes, and what a person wants to know before using a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill import __version__
from shardmill.attest import HOME, read_provenance
from shardmill.checkpoint.hashing import hash_file
from shardmill.files import read_json, sealed, write_json, write_text
from shardmill.forms.recipe import called
from shardmill.gates.measurement import nearness
from shardmill.pipeline.audit import ATTESTATION, CARD_RECORD, added
from shardmill.pipeline.provenance import PARITY_TEXT, verdict_hashes
from shardmill.release.bundle import CARD
from shardmill.release.publishable import License
from shardmill.runtime.manifest import COMPLETE, read_manifest

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
TEXT = "text-generation"
TAGS = ["coreml", "apple-neural-engine", "shardmill"]
METRICS = {"kl": "kl_divergence", "top1_agreement": "accuracy", "perplexity_ratio": "perplexity_ratio"}


@dataclass(frozen=True)
class Published:
    """The facts in a card that a build does not record.

    Attributes:
        repo: owner/name of the repository.
        license: the checkpoint's license.
        key: identity of the signing key; empty if the build is not signed.
    """

    repo: str
    license: License
    key: str


def write_card(build: Path, published: Published) -> None:
    """Write README.md and the record that names it."""
    write_text(build / CARD, card_text(build, published))
    write_json(build / CARD_RECORD, sealed({"files": {CARD: hash_file(build / CARD)}}))


def card_text(build: Path, published: Published) -> str:
    """Return the card's text; the hub client's own classes write its metadata."""
    from huggingface_hub import ModelCardData
    from jinja2 import Environment, StrictUndefined

    statement = read_provenance(build / ATTESTATION)
    definition = statement["predicate"]["buildDefinition"]
    dependencies = {row["name"]: row for row in definition["resolvedDependencies"]}
    config, model = definition["externalParameters"]["config"], read_manifest(build, COMPLETE)
    steps = definition["internalParameters"]["steps"]
    found = [read_json(build / name) for name, _ in sorted(verdict_hashes(steps))]
    base = config["source"].get("repo")
    text = dependencies[PARITY_TEXT]["digest"]["sha256"]
    body = Environment(undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    rows = list(_worst(found))
    data = ModelCardData(
        license=published.license.id,
        license_name=published.license.name,
        license_link=published.license.link,
        base_model=base,
        base_model_relation="quantized" if base else None,
        pipeline_tag=_task(model),
        tags=[*TAGS, called(config["convert"]).lower()],
        model_name=model["model"],
        eval_results=list(_results(found, text)),
    )
    told = body.render(
        model=model,
        encodes=_task(model) != TEXT,
        base=base,
        commit=config["source"].get("revision"),
        weights=called(config["convert"]),
        home=HOME,
        version=__version__,
        engine=_engine(found),
        predicted=any(row["evidence"] == "predicted" for row in rows),
        rows=rows,
        text=text,
        missing=sorted({name for verdict in found for name in verdict.get("not_run", {})}),
        left_out=_left_out(added(build)["left_out"]),
        **asdict(published) | {"license": published.license},
    )
    return f"---\n{data.to_yaml()}\n---\n\n{told.strip()}\n"


def _task(model: Mapping[str, Any]) -> str:
    """Return the hubs' name for the model's task."""
    if all(part["kind"] != "encoder" for part in model["parts"]):
        return TEXT
    return "token-classification" if model.get("labels") else "feature-extraction"


def _engine(found: list[Mapping[str, Any]]) -> str:
    engines = {" ".join(verdict["engine"].values()) for verdict in found if "engine" in verdict}
    return ", ".join(sorted(engines)) or "not recorded"


def _worst(found: list[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each number the row that is nearest to its threshold or furthest beyond it."""
    worst: dict[str, dict[str, Any]] = {}
    for verdict in found:
        for row in verdict["gate"]:
            if row["name"] not in worst or nearness(row) > nearness(worst[row["name"]]):
                evidence = verdict.get("evidence", "measured")
                worst[row["name"]] = {**row, "gate": verdict["part"], "evidence": evidence}
    yield from (worst[name] for name in sorted(worst))


def _results(found: list[Mapping[str, Any]], text: str) -> Iterator[Any]:
    """Yield the measurements of the stack's gate in the form of a model index."""
    from huggingface_hub import EvalResult

    for verdict in found:
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
