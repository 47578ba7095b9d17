"""A finished build without the work: every file and record that the steps leave, by the library's own functions."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import shared

from shardmill.checkpoint.hashing import hash_file
from shardmill.files import read_json, sealed, write_json
from shardmill.pipeline.cache.store import Store
from shardmill.pipeline.job import read_artifact
from shardmill.pipeline.steps import manifest, provenance
from shardmill.pipeline.task import Action, paths_from
from shardmill.plan import write_part
from shardmill.records.finished import gate_statements
from shardmill.runtime import judged

from .made_forms import DECODER, ROPE, SLOTS, TOKENS, VOCAB, Form

PARTS = tuple(part.name for part in DECODER.parts)
SETTINGS: dict[str, Any] = {
    "model": "tiny",
    "source": {"path": "/nowhere/tiny", "repo": None, "revision": None},
    "context": 64,
    "topology": [[0, 2]],
    "convert": {"precision": "int8"},
    "parity": {"text": "texts/parity.txt", "positions": 16, "perplexity_positions": 48},
}
GATES = DECODER.gates
OUTPUTS = {"packages": "package", "compiled": "bundle"}
SUFFIXES = {"packages": "mlpackage", "compiled": "mlmodelc"}
# Of the receipts beside model.json, those that are attested.
ROOT = tuple(f"{name}.receipt.json" for name in ("embedding", "expected", "plan", "precision", "search"))


def plan(form: Form) -> dict[str, Any]:
    """The content of plan.json."""
    return {
        "model": "tiny",
        "context": SLOTS,
        "tokens_max": TOKENS,
        "widths": [1, 4],
        "verify": 4,
        "eos_token_ids": [0],
        "window_slots": 0,
        "buckets": [],
        "architecture": {
            "vocab": VOCAB,
            "graph": {"hidden": 96, "conv_taps": 0},
            "ropes": ROPE,
            "window": None,
        },
        "parts": form.rows(),
        **form.model,
    }


def write_parts(builds: Path, form: Form = DECODER) -> Path:
    """What the gates judge, with the mark that Snakemake puts into each folder."""
    folder = builds / "tiny"
    store = Store(builds / ".store")
    for part in form.parts:
        for step, output in OUTPUTS.items():
            path = folder / step / f"{part.name}.{SUFFIXES[step]}"
            action, engine = Action(step, {"part": part.name}), {"engine": form.engine} if step == "compiled" else {}
            store.perform(action, {output: path}, receipt(path), partial(make, part.name, output), **engine)
            (path / ".snakemake_timestamp").touch()
    table = folder / "embedding.safetensors"
    store.perform(Action("embedding"), {"table": table}, receipt(table), lambda made: make_file(made["table"]))
    expected = folder / "expected.safetensors"
    results = {"expected": expected}
    store.perform(Action("expected"), results, receipt(expected), lambda made: make_file(made["expected"]))
    (folder / "source").mkdir()
    (folder / "source/config.json").write_text("{}")
    (folder / "source/tokenizer.json").write_text("{}")
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
    """The packages or bundles, in the order of plan.json."""
    names = [row["name"] for row in read_json(folder / "plan.json")["parts"] if row["kind"] != "embedding"]
    return [folder / step / f"{name}.{SUFFIXES[step]}" for name in names]


def receipt(path: Path) -> Path:
    return path.with_name(f"{path.stem}.receipt.json")


def make(part: str, output: str, made: Mapping[str, Path]) -> None:
    (made[output] / "inner").mkdir(parents=True)
    (made[output] / "inner/data").write_text(part)


def make_file(path: Path) -> None:
    path.write_text("table")


def written(build: Path, **config: Any) -> dict[str, Any]:
    task = manifest.task(
        summary=build / "plan.json",
        record=build / "source.receipt.json",
        stack=read_artifact(build / "parity/stack.json"),
        packages=[read_artifact(path) for path in programs(build, "packages")],
        bundles=[read_artifact(path) for path in programs(build, "compiled")],
        table=read_artifact(build / "embedding.safetensors"),
        expected=read_artifact(build / "expected.safetensors"),
    )
    task.work({"manifest": build / "model.json"})
    attest(build, **config)
    content: dict[str, Any] = json.loads((build / "model.json").read_text())
    return content


def attest(build: Path, **config: Any) -> None:
    """Writes provenance.json and test-results.jsonl, whatever the build lacks."""
    receipts = sorted(path for path in build.rglob("*.receipt.json") if path.parent != build or path.name in ROOT)
    receipts = [path for path in receipts if path.name != "speed.receipt.json"]
    verdicts = [path for path in build.glob("*/*.json") if path.parent.name in judged.GATES]
    verdicts = sorted(path for path in verdicts if not path.name.endswith(".receipt.json"))
    text = build.parent / "parity.txt"
    text.write_text("fed")
    lines = [json.dumps(row, sort_keys=True, ensure_ascii=False) for row in gate_statements(build, verdicts)]
    (build / "test-results.jsonl").write_text("".join(f"{line}\n" for line in lines))
    named, record = {"parity.text": text}, build / "source.receipt.json"
    records = provenance.Records(record, build / "model.json", receipts, verdicts, named, SETTINGS | config)
    write_json(build / "provenance.json", provenance.provenance(records, build / "test-results.jsonl"))


def judge(build: Path, form: Form = DECODER) -> None:
    """The plan, the forms of matrices, and the gates' verdicts, each with its receipt."""
    store, summary = Store(build.parent / ".store"), build / "plan.json"
    pieces = {part.name: build / f"parts/{part.name}.json" for part in form.parts}

    def split(made: Mapping[str, Path]) -> None:
        write_json(made["summary"], plan(form))
        for piece in form.parts:
            write_part(made[piece.name], piece)

    store.perform(Action("plan", params=plan(form)), {"summary": summary, **pieces}, receipt(summary), split)
    for name, content in (("precision", {"schema": 1, **form.recipe}), ("search", form.search)):
        if content is not None:
            write = partial(write_verdict, content)
            store.perform(
                Action(name, params=content), {"chosen": build / f"{name}.json"}, build / f"{name}.receipt.json", write
            )
    for gate, content in form.gates.items():
        verdict = build / f"{gate}.json"
        judged = pieces if content["part"] == "stack" else [content["part"]]
        bytes_of = {
            output + (f" {name}" if content["part"] == "stack" else ""): hashes(build, step, name)
            for step, output in OUTPUTS.items()
            for name in judged
        }
        action = Action(gate, bytes_of, {"gate": content})
        write = partial(write_verdict, content)
        store.perform(action, {"verdict": verdict}, receipt(verdict), write, engine=form.engine)


def hashes(build: Path, step: str, name: str) -> str:
    """The sha256 of a part's package or bundle."""
    return read_artifact(build / step / f"{name}.{SUFFIXES[step]}").sha256


def write_verdict(content: Mapping[str, Any], made: Mapping[str, Path]) -> None:
    (path,) = made.values()
    write_json(path, content)


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
    """A whole build, which a test may change: a copy of one that is made once in a run of all tests."""
    shutil.copytree(shared.once("finished", whole), builds, symlinks=True)
    return builds / "tiny"


def whole(builds: Path, form: Form = DECODER) -> Path:
    """Makes a whole build."""
    build = write_parts(builds, form)
    judge(build, form)
    written(build, **form.config)
    report(build)
    return build
