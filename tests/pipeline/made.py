"""A finished build without the work: every file and record that the steps leave, by the library's own functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.checkpoint.hashing import hash_file
from shardmill.files import sealed, write_json
from shardmill.gates.measurement import Measurement, compare
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import read_artifact
from shardmill.pipeline.steps import manifest, provenance
from shardmill.pipeline.task import Action, paths_from

PLAN: dict[str, Any] = {
    "model": "tiny",
    "context": 64,
    "tokens_max": 4,
    "widths": [1, 4],
    "verify": 4,
    "eos_token_ids": [0],
    "window_slots": 0,
    "buckets": [],
    "architecture": {
        "vocab": 256,
        "graph": {"hidden": 96, "conv_taps": 0},
        "ropes": {"rope": {"inv_freq": [1.0], "scale": 1.2, "factors": "short"}},
        "window": None,
    },
    "parts": [
        {"name": "layers_00_02", "kind": "layers", "start": 0, "end": 2}
        | {"inputs": {"x": [1, 96, "T", 1]}, "states": {"k_0": [1, 1, 64, 32]}, "output": "hidden"},
        {"name": "head_0", "kind": "head", "start": 0, "end": 256}
        | {"inputs": {"hidden": [1, 96, "T", 1]}, "states": {}, "output": "logits"},
        {"name": "embedding", "kind": "embedding", "start": 0, "end": 256},
    ],
}
PARTS = ("layers_00_02", "head_0")
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "source": {"path": "/nowhere/tiny", "repo": None, "revision": None},
    "context": 64,
    "topology": [[0, 2]],
    "convert": {"precision": "int8"},
    "parity": {"text": "texts/parity.txt", "positions": 16, "perplexity_positions": 48},
}
PORTABLE = {"engine": {"name": "portable"}}
GATES: dict[str, dict[str, Any]] = {
    "parity/stack": {"part": "stack", "gate": compare([Measurement("kl", 0.001)]), "not_run": {}, **PORTABLE},
    "parity/head_0": {"part": "head_0", "gate": compare([Measurement("psnr", 50.0)]), **PORTABLE}
    | {"not_run": {"width_error": "no fp32 here"}},
    "residency/head_0": {"part": "head_0", "gate": compare([Measurement("ineligible", 0)]), "evidence": "predicted"}
    | PORTABLE,
}
ROOT = ("embedding.receipt.json", "plan.receipt.json")  # of the receipts beside model.json, those that are attested


def write_parts(builds: Path) -> Path:
    """What the gates judge, with the mark that Snakemake puts into each folder."""
    folder = builds / "tiny"
    store = Store(builds / ".store")
    for part in PARTS:
        for step, output in (("packages", "package"), ("compiled", "bundle")):
            path = programs(folder, step)[PARTS.index(part)]
            action, engine = Action(step, {"part": part}), PORTABLE if step == "compiled" else {}
            store.perform(action, {output: path}, receipt(path), partial(make, part, output), **engine)
            (path / ".snakemake_timestamp").touch()
    table = folder / "embedding.safetensors"
    store.perform(Action("embedding"), {"table": table}, receipt(table), lambda made: make_file(made["table"]))
    (folder / "source").mkdir()
    (folder / "source/config.json").write_text("{}")
    (folder / "source/tokenizer.json").write_text("{}")
    write_json(folder / "plan.json", PLAN)
    (folder / "source/tokenizer_config.json").write_text("[]")
    files = {
        "config.json": {"sha256": hashlib.sha256(b"{}").hexdigest(), "size": 2},
        "tokenizer.json": {"sha256": hashlib.sha256(b"{}").hexdigest(), "size": 2},
        "tokenizer_config.json": {"sha256": hashlib.sha256(b"[]").hexdigest(), "size": 2},
        "model.safetensors": {"sha256": hashlib.sha256(b"ww").hexdigest(), "size": 2},
    }
    (folder / "source/model.safetensors").write_text("ww")
    record = {"repo": None, "commit": "local", "files": files}
    write_json(folder / "source.receipt.json", record)
    write_json(folder / "source/source.json", record)
    return folder


def programs(folder: Path, step: str) -> list[Path]:
    suffix = {"packages": "mlpackage", "compiled": "mlmodelc"}[step]
    return [folder / step / f"{part}.{suffix}" for part in PARTS]


def receipt(path: Path) -> Path:
    return path.with_name(f"{path.stem}.receipt.json")


def make(part: str, output: str, made: Mapping[str, Path]) -> None:
    (made[output] / "inner").mkdir(parents=True)
    (made[output] / "inner/data").write_text(part)


def make_file(path: Path) -> None:
    path.write_text("table")


def written(build: Path) -> dict[str, Any]:
    task = manifest.task(
        summary=build / "plan.json",
        record=build / "source.receipt.json",
        stack=read_artifact(build / "parity/stack.json"),
        packages=[read_artifact(path) for path in programs(build, "packages")],
        bundles=[read_artifact(path) for path in programs(build, "compiled")],
        table=read_artifact(build / "embedding.safetensors"),
    )
    task.work({"manifest": build / "model.json"})
    attest(build)
    content: dict[str, Any] = json.loads((build / "model.json").read_text())
    return content


def attest(build: Path) -> None:
    """Writes provenance.json."""
    receipts = sorted(path for path in build.rglob("*.receipt.json") if path.parent != build or path.name in ROOT)
    verdicts = [build / f"{gate}.json" for gate in GATES if (build / f"{gate}.json").exists()]
    text = build.parent / "parity.txt"
    text.write_text("fed")
    task = provenance.task(
        build / "source.receipt.json", build / "model.json", receipts, verdicts, text, [], [], SETTINGS
    )
    task.work({"provenance": build / "provenance.json", "results": build / "test-results.jsonl"})


def judge(build: Path) -> None:
    """The gates' verdicts, and the plan's receipt."""
    store, plan = Store(build.parent / ".store"), build / "plan.json"
    store.perform(Action("plan"), {"plan": plan}, receipt(plan), lambda made: write_json(made["plan"], PLAN))
    for gate, content in GATES.items():
        verdict = build / f"{gate}.json"
        store.perform(Action(gate), {"verdict": verdict}, receipt(verdict), partial(write_verdict, content))


def write_verdict(content: dict[str, Any], made: Mapping[str, Path]) -> None:
    write_json(made["verdict"], content)


def report(build: Path) -> None:
    """The benchmark and the report, after all else."""
    store, speed, page = Store(build.parent / ".store"), build / "benchmark/speed.json", build / "report.html"
    store.perform(Action("benchmark"), {"speed": speed}, receipt(speed), lambda made: make_file(made["speed"]))
    page.write_text("<p>quick</p>")
    files = {"page": page, "speed": speed}
    hashes = {name: hash_file(path) for name, path in files.items()}
    write_json(receipt(page), sealed({"outputs": hashes, "paths": paths_from(receipt(page), files)}))
    (build / "logs").mkdir()
    (build / "logs/report.log").write_text("drawn")


def finish(builds: Path) -> Path:
    """A whole build."""
    build = write_parts(builds)
    judge(build)
    written(build)
    report(build)
    return build
