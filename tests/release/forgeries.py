"""Builds that prove nothing, each forged in one way, by somebody who has a key and writes every record anew.

Verdicts, receipts, provenance.json, test-results.jsonl, bundle.json and signatures agree with each other. So only the
rule that a forgery breaks can refuse it.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import made
from pipeline.made_forms import FORMS

from shardmill.checkpoint.hashing import hash_file
from shardmill.files import read_json, sealed, write_json
from shardmill.gates.by_bits import COSTS
from shardmill.gates.thresholds import FOUR, SIX, THRESHOLDS
from shardmill.release.sign import sign_build

LAYERS, HEAD, STACK = "parity/layers_00_02", "parity/head_0", "parity/stack"


@dataclass(frozen=True)
class Forgery:
    """A forged build.

    Attributes:
        name: what was done to it.
        form: the kind of build, a key of FORMS.
        change: does it, given the build's folder.
        told: the file that is refused, and a part of each line about it.
        config: what the config has instead.
    """

    name: str
    form: str
    change: Callable[[Path], None]
    told: tuple[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)


def forge(forgery: Forgery, build: Path, key: Path) -> None:
    """Changes a build and writes all of its records anew."""
    forgery.change(build)
    for receipt in sorted(build.glob("*/*.receipt.json")):
        content, verdict = read_json(receipt), receipt.with_name(receipt.name.replace(".receipt", ""))
        if "verdict" in content["outputs"]:
            content["outputs"]["verdict"] = hash_file(verdict)
            write_json(receipt, sealed(content))
    made.attest(build, **FORMS[forgery.form].config, **forgery.config)
    sign_build(build, key)


def change(path: Path, by: Callable[[dict[str, Any]], object]) -> None:
    """Changes the content of a file."""
    content = read_json(path)
    by(content)
    path.unlink()  # it may be a link into the store
    path.write_text(json.dumps(content), encoding="utf-8")  # NaN too
    if "NaN" not in path.read_text() and "Infinity" not in path.read_text():
        write_json(path, sealed(content) if path.name.endswith(".receipt.json") else content)


def in_verdict(step: str, by: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda build: change(build / f"{step}.json", by)


def in_row(step: str, name: str, **new: Any) -> Callable[[Path], None]:
    """Changes the first row of a number, which still says that it passed."""

    def by(verdict: dict[str, Any]) -> None:
        next(row for row in verdict["gate"] if row["name"] == name).update(new, passed=True)

    return in_verdict(step, by)


def without(*steps: str) -> Callable[[Path], None]:
    """Removes verdicts."""

    def by(build: Path) -> None:
        for step in steps:
            for suffix in (".json", ".receipt.json"):
                (build / f"{step}{suffix}").unlink()

    return by


def without_row(step: str, told: str, reason: str = "") -> Callable[[Path], None]:
    """Removes a number from a verdict, for a reason that it gives."""
    name, _, detail = told.partition(": ")

    def by(verdict: dict[str, Any]) -> None:
        gone = [row for row in verdict["gate"] if row["name"] == name and row["detail"] == detail]
        verdict["gate"] = [row for row in verdict["gate"] if row not in gone]
        assert len(gone) == 1
        if reason:
            verdict["not_run"] = {**verdict.get("not_run", {}), name: reason}

    return in_verdict(step, by)


def both(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    def by(build: Path) -> None:
        for one in changes:
            one(build)

    return by


def removed() -> Iterator[Forgery]:
    """Verdicts that are not there, and numbers that are not in them."""
    for form, steps in {
        "decoder": FORMS["decoder"].verdicts,
        "encoder": ["parity/encoder_16"],
        "experts": ["parity/experts_00_0", "residency/experts_00_1"],
        "adapted": ["parity/labels"],
        "drafting": ["parity/draft_head"],
        "witnessed": ["witness/head_0"],
    }.items():
        for step in steps:
            yield Forgery(
                f"{form} without {step}", form, without(step), ("provenance.json", f"has no receipt of {step}")
            )
    both_gates = without(HEAD, "residency/head_0")
    yield Forgery("a part without gates", "decoder", both_gates, ("provenance.json", "head_0"))
    for form, step, number in (
        ("decoder", LAYERS, "psnr"),
        ("decoder", HEAD, "width_error: T=3"),
        ("hosted", LAYERS, "rejected_draft_error: moving between contexts"),
        ("experts", "parity/layers_00_01", "experts_agreement"),
        ("adapted", LAYERS, "adapter_error: T=1"),
        ("encoder", STACK, "span_agreement: bucket 16"),
        ("measured", "residency/head_0", "not_chosen"),
        ("witnessed", "witness/head_0", "witness_agreement"),
    ):
        name = number.split(":")[0]
        yield Forgery(f"{step} without {number}", form, without_row(step, number), (f"{step}.json", f"has no {name}"))
    for step, number, told in (
        (LAYERS, "psnr", "has no psnr: it must not be skipped"),
        (STACK, "kl", "has no kl: it must not be skipped"),
        (LAYERS, "program_error", "has no program_error: it must not be skipped"),
        (STACK, "perplexity_ratio", "has top1_agreement and no perplexity_ratio"),
    ):
        skipped = without_row(step, number, "could not be run")
        yield Forgery(f"{number} of {step} not run", "decoder", skipped, (f"{step}.json", told))


def worsened() -> Iterator[Forgery]:
    """Numbers beyond their limits, and limits to suit them."""
    for form, step, name, value in (
        ("decoder", LAYERS, "psnr", -50.0),
        ("decoder", STACK, "kl", 1.0),
        ("decoder", STACK, "top1_agreement", 0.5),
        ("decoder", HEAD, "program_error", 0.1),
        ("decoder", HEAD, "weight_steps", 1.0),
        ("decoder", "residency/head_0", "unknown", 3),
        ("experts", "parity/layers_00_01", "experts_agreement_fp16", 0.1),
        ("encoder", STACK, "label_mismatches", 2),
        ("witnessed", "witness/head_0", "witness_error", 0.5),
        ("decoder", LAYERS, "psnr", math.nan),
        ("decoder", LAYERS, "psnr", math.inf),
        ("decoder", STACK, "kl", -math.inf),
        ("decoder", STACK, "kl", "0.001"),
        ("decoder", "residency/head_0", "unknown", False),
    ):
        told = f"{name} is {value}, must be {THRESHOLDS[name].told}"
        yield Forgery(f"{name} of {form} {value!r}", form, in_row(step, name, value=value), (f"{step}.json", told))
    own = {"limit_why": "follows from the model"}
    for step, name, value, threshold, new in (
        (LAYERS, "psnr", -50.0, ">= -1e9", own),
        (LAYERS, "psnr", -50.0, ">= -1e9", {}),
        (LAYERS, "psnr", -50.0, ">= nan", own),
        (LAYERS, "width_error", 0.5, "<= 1", own),
        (STACK, "perplexity_ratio", 8.0, "<= 9", own),
        (STACK, "top1_agreement", 0.1, ">= 0", own),
        (STACK, "kl", 0.001, "<= 5", {}),
        (LAYERS, "psnr", -50.0, "<= 30", own),
        (HEAD, "program_error", 0.5, ">= 0", {}),
    ):
        changed = in_row(step, name, value=value, threshold=threshold, **new)
        told = f"{name} must be {THRESHOLDS[name].told}, and its verdict says {threshold}"
        yield Forgery(f"{name} {value} {threshold} {bool(new)}", "decoder", changed, (f"{step}.json", told))


def misjudged() -> Iterator[Forgery]:
    """Limits of other builds, or none."""
    for form, step, limits, told in (
        ("decoder", LAYERS, {"limits": FOUR}, "is judged by limits 4 bits, its records give None"),
        ("decoder", STACK, {"limits": SIX}, "is judged by limits 6 bits, its records give None"),
        ("mixed", LAYERS, {"limits": FOUR, "shares": {FOUR: 1.0}}, "is judged by shares"),
        ("decoder", LAYERS, {"budget": {"psnr": -1e9, "top1_agreement": 0}}, "is judged by budget"),
        ("decoder", STACK, {"budget": {"kl": 0.2, "perplexity_ratio": 1.2}}, "is judged by budget"),
        ("searched", STACK, {"limits": FOUR, "budget": {"kl": 0.2, "perplexity_ratio": 1.2}}, "by budget"),
        ("searched", STACK, {"limits": FOUR, "budget": {"kl": math.nan}}, "is judged by budget"),
    ):
        yield Forgery(f"{form} {step} by {limits}", form, in_verdict(step, lambda v, new=limits: v.update(new)),
                      (f"{step}.json", told))  # fmt: skip
    limit, _ = COSTS[FOUR]["psnr"]
    low = in_row(LAYERS, "psnr", value=limit, threshold=f">= {limit:g}")
    four = [in_verdict(step, lambda verdict: verdict.update(limits=FOUR)) for step in (LAYERS, STACK)]
    table = both(low, *four, lambda build: rewritten(build, "precision", FORMS["int4"].recipe))
    yield Forgery(
        "INT4's limits and recipe", "decoder", table, ("precision.json", "is not what convert.precision: int8")
    )
    loose = {**(FORMS["searched"].search or {}), "estimate": {"perplexity": 1.2}}
    search = both(
        lambda build: rewritten(build, "search", loose),
        in_verdict(STACK, lambda verdict: verdict.update(budget={"perplexity_ratio": 1.2, "kl": 0.2})),
    )
    yield Forgery("an estimate for a budget", "searched", search, ("search.json", "estimates 1.2, and its costs"))


def mixed_up() -> Iterator[Forgery]:
    """Engines, parts and bytes that do not belong together."""
    mac = in_verdict(HEAD, lambda verdict: verdict.update(engine=FORMS["measured"].engine))
    yield Forgery("judged by Core ML, it says", "decoder", mac, (f"{HEAD}.json", "its engine is coreml"))
    claimed = in_verdict("residency/head_0", lambda verdict: verdict.update(evidence="measured"))
    told = ("residency/head_0.json", "its evidence is measured, which portable does not give")
    yield Forgery("measured, it says", "decoder", claimed, told)
    told = ("model.json", "head_0 was compiled by coreml, by its receipt by portable")
    yield Forgery("compiled by Core ML, it says", "decoder", in_model(compiled_by_core_ml), told)
    yield Forgery("a part more in model.json", "decoder", more_parts, ("provenance.json", "has no receipt of"))
    told = ("provenance.json", "belongs to no part of model.json")
    yield Forgery("a part less in model.json", "adapted", in_model(less_parts), told)
    told = (f"{HEAD}.json", "judged other bytes than packages/head_0 and compiled/head_0")
    yield Forgery("another package judged", "decoder", other_bytes_judged, told)
    told = ("model.json", "packages/head_0.mlpackage is not what the receipt of packages/head_0 names")
    yield Forgery("another package shipped", "decoder", other_bytes_shipped, told)


def rewritten(build: Path, name: str, content: Mapping[str, Any]) -> None:
    """Writes precision.json or search.json, and its receipt."""
    change(build / f"{name}.json", lambda known: known.update(content))
    sha = hash_file(build / f"{name}.json")
    change(build / f"{name}.receipt.json", lambda receipt: receipt["outputs"].update(chosen=sha))


def in_model(by: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    return lambda build: change(build / "model.json", by)


def compiled_by_core_ml(model: dict[str, Any]) -> None:
    model["parts"][1]["program"]["compiler"] = {"name": "coreml", "macos": "26.1", "build": "25B78"}


def less_parts(model: dict[str, Any]) -> None:
    """Only the records know the labels' part."""
    model["parts"] = [part for part in model["parts"] if part["kind"] != "labels"]
    del model["packages"]["labels"]


def more_parts(build: Path) -> None:
    """Another slice of the head that nothing judged."""
    for path in ("packages/head_{}.mlpackage", "compiled/head_{}.mlmodelc"):
        shutil.copytree(build / path.format(0), build / path.format(1))

    def by(model: dict[str, Any]) -> None:
        program = {**model["parts"][1]["program"], "path": "compiled/head_1.mlmodelc"}
        model["parts"].append({**model["parts"][1], "name": "head_1", "program": program})
        model["packages"]["head_1"] = {**model["packages"]["head_0"], "path": "packages/head_1.mlpackage"}

    change(build / "model.json", by)


def other_bytes_judged(build: Path) -> None:
    change(build / f"{HEAD}.receipt.json", lambda receipt: receipt["inputs"].update(package="0" * 64))


def other_bytes_shipped(build: Path) -> None:
    file = build / "packages/head_0.mlpackage/inner/data"
    file.unlink()
    file.write_text("other")
    sha = hash_file(file)
    change(build / "model.json", lambda model: model["packages"]["head_0"]["files"].update({"inner/data": sha}))


FORGERIES = [*removed(), *worsened(), *misjudged(), *mixed_up()]
