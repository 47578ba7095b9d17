"""The pipeline's cached steps, run in this process in the order of the DAG, with what each did on record.

Snakemake decides which jobs may have to run; whether a job works is the step's own decision, and that is what this
driver lets tests count, in a fraction of the time of forty processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shardmill import config
from shardmill.pipeline import snakefile, store
from shardmill.pipeline.steps import (
    benchmark,
    convert,
    embedding,
    fetch,
    manifest,
    parity,
    parity_stack,
    reference,
    residency,
    split,
)
from shardmill.pipeline.steps import compile as compiling


def run(root: Path, content: dict[str, Any]) -> list[str]:
    """Builds a config under `root`/build up to the gates; names of the steps that worked, in order."""
    settings = config.parse(content)
    plain = snakefile.settings(settings)
    build, shop = root / "build" / settings.model, str(root / "build/.store")
    record, summary = build / "source.receipt.json", build / "plan.json"
    with recording(build) as worked:
        fetch.run(record=record, store=shop, source=plain["source"])
        parts = [build / f"parts/{name}.json" for name in (*settings.parts, "embedding")]
        split.run(record, summary, parts, receipt(summary), shop, plain)
        states, table = build / "reference.safetensors", build / "embedding.safetensors"
        text = Path(settings.parity.text)
        reference.run(summary, record, text, states, receipt(states), shop, plain["parity"])
        embedding.run(build / "parts/embedding.json", record, table, receipt(table), shop)
        for name in settings.parts:
            programs(build, name, record, summary, states, shop, plain)
        packages = [build / f"packages/{name}.mlpackage" for name in settings.parts]
        bundles = [build / f"compiled/{name}.mlmodelc" for name in settings.parts]
        made, compiled = [receipt(p) for p in packages], [receipt(b) for b in bundles]
        verdict = build / "parity/stack.json"
        stack = (summary, parts, record, states, receipt(states), packages, bundles, made, compiled, table)
        parity_stack.run(*stack, verdict, receipt(verdict), shop)
    return worked


def programs(build: Path, name: str, record: Path, summary: Path, states: Path, shop: str, plain: Any) -> None:
    """convert, compile, residency and parity of one part."""
    part = build / f"parts/{name}.json"
    package, bundle = build / f"packages/{name}.mlpackage", build / f"compiled/{name}.mlmodelc"
    convert.run(part, record, package, receipt(package), shop, plain["convert"])
    compiling.run(package, receipt(package), bundle, receipt(bundle), shop)
    placed, compared = build / f"residency/{name}.json", build / f"parity/{name}.json"
    pair = receipt(package), receipt(bundle)
    residency.run(part, package, bundle, *pair, placed, receipt(placed), shop)
    known = summary, part, record, states, receipt(states)
    parity.run_part(*known, package, bundle, *pair, compared, receipt(compared), shop)


def receipt(artifact: Path) -> Path:
    """Where an artifact's receipt stands."""
    return artifact.with_name(f"{artifact.stem}.receipt.json")


def measure(root: Path, content: dict[str, Any]) -> None:
    """model.json and the benchmark of a build that `run` has finished."""
    settings = config.parse(content)
    build, made = root / "build" / settings.model, root / "build" / settings.model / "model.json"
    packages, bundles = (
        [build / folder / f"{name}.{suffix}" for name in settings.parts]
        for folder, suffix in (("packages", "mlpackage"), ("compiled", "mlmodelc"))
    )
    receipts = [receipt(p) for p in packages], [receipt(b) for b in bundles]
    summary, record, table = build / "plan.json", build / "source.receipt.json", build / "embedding.safetensors"
    manifest.run(summary, record, packages, receipts[0], bundles, receipts[1], table, receipt(table), made, [])
    speed = build / "benchmark/speed.json"
    asked = snakefile.settings(settings)["benchmark"]
    benchmark.run(made, Path(asked["text"]), [], speed, receipt(speed), str(root / "build/.store"), asked)


@contextmanager
def recording(build: Path) -> Iterator[list[str]]:
    """Inside, the names of steps that work are collected: `packages/head_0` and the like."""
    worked: list[str] = []
    perform = store.Store.perform

    def watched(self: store.Store, action: Any, outputs: Any, where: Path, *rest: Any, **notes: Any) -> bool:
        did = perform(self, action, outputs, where, *rest, **notes)
        if did:
            worked.append(where.relative_to(build).as_posix().removesuffix(".receipt.json"))
        return did

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store.Store, "perform", watched)
        yield worked
