"""What the next `all` would work on, and why, found out without working.

The steps' action keys are computed from what is on disk and looked up in the store, in the order of the pipeline. After
a step that would work, what it would make is not known, so the steps that read it are reported as depending on it: they
may turn out to be unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.checkpoint.fetch import described, hash_local
from shardmill.config import Config
from shardmill.files import read_json
from shardmill.pipeline.snakefile import task_files
from shardmill.pipeline.steps import (
    benchmark,
    convert,
    embedding,
    manifest,
    parity,
    parity_stack,
    reference,
    residency,
    split,
)
from shardmill.pipeline.steps import compile as compiling
from shardmill.pipeline.steptable import source_folder
from shardmill.pipeline.store import Action, Store, intact, read_entry, read_receipt, stored
from shardmill.plan import Part, load_part
from shardmill.quiet import quiet, quiet_transformers


@dataclass(frozen=True)
class Verdict:
    """One step: "unchanged", "works" (for a reason), or "depends" (on another's result)."""

    step: str
    status: str
    reason: str = ""


class Forecast:
    """Looks actions up in the store and collects verdicts."""

    def __init__(self, build: Path, store: Store) -> None:
        self.build, self.store = build, store
        self.verdicts: list[Verdict] = []
        self.recorded: dict[str, dict[str, dict[str, Any]]] = {}  # what the store has of the steps that are unchanged

    def expect(self, receipt: str, action: Action | None, waits_for: str = "") -> dict[str, str] | None:
        """Hashes of the outputs by name if the action is in the store; None, with a verdict, if not."""
        if action is None:
            self.verdicts.append(Verdict(receipt, "depends", waits_for))
            return None
        entry = self.store.root / action.key
        if not intact(entry):
            reason = self.store.reason(action, self.build / f"{receipt}.receipt.json")
            self.verdicts.append(Verdict(receipt, "works", reason))
            return None
        self.verdicts.append(Verdict(receipt, "unchanged"))
        self.recorded[receipt] = read_entry(entry)
        return {name: made["sha256"] for name, made in self.recorded[receipt].items()}


def forecast(config: Config, settings: dict[str, Any], build: Path, store: Store) -> list[Verdict]:
    """Verdicts on every cached step of a build, in the order of the pipeline.

    Args: settings the config as plain data; build the model's folder.
    """
    found = Forecast(build, store)
    files = source_files(config, build, store)
    if files is None:
        return [Verdict("source", "works", "not fetched as the config has it; all else depends on what it brings")]
    todo = split.action(files, settings)
    if found.expect("plan", todo):
        parts, plan = planned(store.root / todo.key, config)
    else:
        source = Path(config.source.path) if config.source.path else source_folder(build / "source.receipt.json")
        with quiet_transformers(), quiet("shardmill"):
            parts, plan = split.split(source, config, store.hashes, files)
    by_name = {part.name: part for part in parts}
    compared = reference.action(plan, Path(config.parity.text), settings["parity"])
    known = found.expect("reference", compared)
    states = store.root / compared.key / stored("states", Path("reference.safetensors")) if known else None
    table = found.expect("embedding", embedding.action(by_name["embedding"]))
    programs = [list(program(found, by_name[name], settings, plan, states)) for name in config.parts]
    stack(found, plan, programs, known, table, by_name["embedding"])
    speed(found, plan, config, settings, files)
    return found.verdicts


def source_files(config: Config, build: Path, store: Store) -> Any:
    """source.json's `files` as the next fetch would write them; None where only a download can tell."""
    if config.source.path is None:
        receipt = build / "source.receipt.json"
        record = read_receipt(receipt) if receipt.is_file() else None
        return record["files"] if record and record["commit"] == config.source.revision else None
    folder = Path(config.source.path)
    return described(folder, hash_local(folder, store.hashes))


def planned(entry: Path, config: Config) -> tuple[Sequence[Part], dict[str, Any]]:
    """The parts and the plan that a store entry of the split step holds."""
    files = {name: entry / made["file"] for name, made in read_entry(entry).items()}
    parts = [load_part(files[name]) for name in (*config.parts, "embedding")]
    return parts, read_json(files["plan"])


def program(
    found: Forecast, part: Part, settings: dict[str, Any], plan: dict[str, Any], states: Path | None
) -> Iterator[str | None]:
    """Verdicts on one part; yields the hashes of package and bundle, None where unknown.

    Args: states what the reference step wrote, None where that is not known.
    """
    made = found.expect(f"packages/{part.name}", convert.action(part, settings["convert"]))
    package = made["package"] if made else None
    yield package
    waits = f"packages/{part.name}"
    made = found.expect(f"compiled/{part.name}", compiling.action(package) if package else None, waits)
    bundle = made["bundle"] if made else None
    yield bundle
    waits = f"compiled/{part.name}" if package else waits
    judged = residency.action(part, package, bundle) if package and bundle else None
    found.expect(f"residency/{part.name}", judged, waits)
    compared = None
    if package and bundle and states:
        compared = parity.part_action(plan, part, package, bundle, reference.seen(states, part))
    found.expect(f"parity/{part.name}", compared, waits if judged is None else "reference")


def stack(
    found: Forecast,
    plan: dict[str, Any],
    programs: Sequence[Sequence[str | None]],
    known: dict[str, str] | None,
    table: dict[str, str] | None,
    embedding: Part,
) -> None:
    """Verdict on the whole stack."""
    packages, bundles = ([p[i] for p in programs if p[i]] for i in (0, 1))
    complete = known and table and len(bundles) == len(programs)
    hashes = [str(p) for p in packages], [str(b) for b in bundles]
    action = None
    if complete and known and table:
        action = parity_stack.action(plan, *hashes, known["states"], table["table"], embedding)
    found.expect("parity/stack", action, "a part, the reference or the embedding")


def speed(found: Forecast, plan: dict[str, Any], config: Config, settings: dict[str, Any], files: Any) -> None:
    """Verdict on the benchmark, which measures what has passed every gate. Args: files source.json's."""
    if any(verdict.status != "unchanged" for verdict in found.verdicts):
        found.expect("benchmark/speed", None, "the gates")
        return

    def described(path: str, receipt: str, output: str) -> dict[str, Any]:
        made = found.recorded[receipt][output]
        return {"path": path} | ({"files": made["files"]} if made["files"] else {"sha256": made["sha256"]})

    bundles, packages = (
        {name: described(f"{folder}/{name}.{suffix}", f"{folder}/{name}", output) for name in config.parts}
        for folder, suffix, output in (("compiled", "mlmodelc", "bundle"), ("packages", "mlpackage", "package"))
    )
    source = {"repo": config.source.repo, "commit": config.source.revision, "files": files}
    table = described("embedding.safetensors", "embedding", "table")
    model = manifest.model(plan, source, bundles, packages, table)
    prompts = [Path(file) for file in (config.benchmark.text, *task_files(config))]
    found.expect("benchmark/speed", benchmark.action(model, prompts, settings["benchmark"]))
