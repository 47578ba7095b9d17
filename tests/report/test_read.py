"""From files on disk to the page, as the pipeline's step does it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from report import sample
from shardmill.checkpoint.hashing import hash_file, tree_hash
from shardmill.files import read_sealed
from shardmill.pipeline.steps import report
from shardmill.report.read import read_pieces

TENSORS = [{"shape": [96]}, {"shape": [1024, 96]}]


def write(path: Path, content: Any) -> Path:
    """JSON at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def package(path: Path, **files: int) -> Path:
    """An .mlpackage with files of given sizes, by name in its weights folder."""
    weights = path / "Data" / "com.apple.CoreML" / "weights"
    weights.mkdir(parents=True)
    for name, size in files.items():
        (weights / f"{name}.bin").write_bytes(b"w" * size)
    (path / "Manifest.json").write_bytes(b"m" * 1000)
    return path


def plan_with(*names: str) -> dict[str, Any]:
    rows = [{"name": name, "kind": "head", "start": 0, "end": 8, "parameters": 98400} for name in names]
    return sample.plan() | {"parts": rows}


def test_a_piece_weighs_what_its_files_weigh(tmp_path: Path) -> None:
    """Rule W1 limits a single file, so the largest counts, not their sum."""
    part = write(tmp_path / "parts" / "head_0.json", {"tensors": TENSORS})
    made = package(tmp_path / "head_0.mlpackage", first=3000, second=5000)
    (piece,) = read_pieces(plan_with("head_0"), [part], [made, tmp_path / "embedding.safetensors"])
    assert (piece.weight_file, piece.total) == (5000, 9000)
    assert (piece.tensors, piece.parameters) == (2, 98400)


def test_what_is_not_there_has_no_size(tmp_path: Path) -> None:
    part = write(tmp_path / "parts" / "head_0.json", {"tensors": TENSORS})
    gone = tmp_path / "head_0.mlpackage"
    (piece,) = read_pieces(plan_with("head_0"), [part], [gone])
    assert (piece.weight_file, piece.total) == (None, None)


def build_folder(root: Path) -> dict[str, Any]:
    """The sample as files under `root`; the arguments of the step."""
    build = sample.build()
    names = (*sample.PARTS, "embedding")
    (root / "embedding.safetensors").parent.mkdir(parents=True)
    (root / "embedding.safetensors").write_bytes(b"t" * 2048)
    shown = ("name", "kind", "start", "end", "parameters")
    rows = [{key: asdict(piece)[key] for key in shown} for piece in build.pieces]
    return {
        "manifest": write(root / "model.json", build.model),
        "summary": write(root / "plan.json", {**build.plan, "parts": rows}),
        "record": write(root / "source.receipt.json", build.source),
        "parts": [write(root / "parts" / f"{name}.json", {"tensors": TENSORS}) for name in names],
        "artifacts": [
            *(package(root / "packages" / f"{part}.mlpackage", weight=4096) for part in sample.PARTS),
            root / "embedding.safetensors",
        ],
        "verdicts": [
            write(root / folder / f"{file['part']}.json", file)
            for folder, files in build.verdicts.items()
            for file in files
        ],
        "speed": [write(root / "benchmark" / "speed.json", build.speed)],
        "search": [],
        "evidence": [],
        "points": [],
        "predicted": [],
        "receipts": [write(root / f"{name}.receipt.json", content) for name, content in build.receipts.items()],
        "settings": build.settings,
        "pipeline": build.pipeline,
    }


def test_the_step_writes_the_same_page_from_the_same_files_anywhere(tmp_path: Path) -> None:
    """No path of the machine may get onto the page."""
    pages = []
    for name in ("here", "there"):
        arguments, root = build_folder(tmp_path / name), tmp_path / name
        made = {"page": root / "report.html", "plots": root / "plots"}
        made["hashes"] = root / "report.receipt.json"
        report.task(**arguments).work(made)
        pages.append(made["page"].read_text(encoding="utf-8"))
        drawn = read_sealed(made["hashes"])
        assert drawn["paths"] == {"page": "report.html", "plots": "plots", "speed": "benchmark/speed.json"}
        hashes = {"page": hash_file(made["page"]), "speed": hash_file(arguments["speed"][0])}
        assert drawn["outputs"] == hashes | {"plots": tree_hash(made["plots"])}
        assert drawn["files"]["plots"] == {path.name: hash_file(path) for path in made["plots"].iterdir()}
        assert len(drawn["files"]["plots"]) == pages[-1].count('<svg class="plot"') > 0
    assert pages[0] == pages[1]
    report.task(**(arguments | {"speed": []})).work(made)
    assert read_sealed(made["hashes"])["paths"] == {"page": "report.html", "plots": "plots"}
    assert str(tmp_path) not in pages[0]
    assert "packages/head_0" in pages[0] and "2\u00a0KiB" in pages[0]
