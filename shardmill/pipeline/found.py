"""What a job found, in a few words for the line that says that it has ended; and a finished build's last lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from shardmill.files import load_json
from shardmill.pipeline.batch import BUILDS, Batch
from shardmill.pipeline.words import size

KEY_FIGURES = ("kl", "top1_agreement", "perplexity_ratio", "psnr", "label_agreement", "span_agreement", "cosine")


def found(step: str, outputs: Any) -> str:
    """Return what a job has found, from its outputs by name, or what they weigh; empty if they can't be read here."""
    files = {name: Path(str(path)) for name, path in outputs.items() if isinstance(path, str)}
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # in a storage, or damaged
        if "verdict" in files:
            return _numbers(load_json(files["verdict"]))
        match step:
            case "fetch":
                listed = load_json(files["record"])["files"].values()
                return f"{len(listed)} files, {size(sum(file['size'] for file in listed))}"
            case "split":
                return f"{len(load_json(files['summary'])['parts']) - 1} programs"
            case "benchmark":
                return _speed(load_json(files["speed"]))
            case "report":
                return str(files["page"])
            case "convert" | "compile" | "embedding":
                made = next(path for name, path in files.items() if name != "receipt")
                return size(sum(file.stat().st_size for file in (made.rglob("*") if made.is_dir() else [made])))
    return ""


def _numbers(verdict: Mapping[str, Any]) -> str:
    """Return how many numbers of a gate hold, and the numbers by which one compares builds."""
    rows = verdict["gate"]
    missed = sum(not row["passed"] for row in rows)
    by = ", by prediction" if verdict.get("evidence") == "predicted" else ""
    shown = {row["name"]: row["value"] for row in rows if row["name"] in KEY_FIGURES and isfinite(row["value"])}
    figures = [f"{name} {shown[name]:.3g}" for name in KEY_FIGURES if name in shown]
    hold = "1 number holds" if len(rows) == 1 else f"{len(rows)} numbers hold"
    told = f"{missed} of {len(rows)} numbers missed" if missed else hold
    return f"{told}{by}{': ' * bool(figures)}{', '.join(figures)}"


def _speed(speed: Mapping[str, Any]) -> str:
    """Return how long the narrowest pass took, on which engine."""
    width, seconds = min((int(width), seconds) for width, seconds in speed["pass_seconds"].items())
    return f"{1000 * seconds:.3g} ms for a pass of {width} token{'s' * (width > 1)}, {speed['engine']['name']} engine"


def closing(batch: Batch) -> Iterator[str]:
    """Yield the last lines of a run: what a finished build's report says first, where that is, and what comes next.

    A run for several models has a page about all of them, see `batch.sum_up`.
    """
    if batch.listed:
        return
    for model in batch.models:
        build = BUILDS / model
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            manifest = load_json(build / "model.json")
            if (build / "report.html").is_file():
                said = (build / "logs/report.log").read_text(encoding="utf-8").splitlines()
                yield from (f"shardmill: {line.removeprefix('INFO ')}" for line in said if line.startswith("INFO "))
                yield f"shardmill: report: {build / 'report.html'}"
                yield f"shardmill: next: {_next(build, manifest)}"


def _next(build: Path, manifest: Mapping[str, Any]) -> str:
    """Return the command with which one tries a finished build."""
    if "buckets" in manifest:
        labels = bool(manifest.get("labels"))
        return f'shardmill label {build} --text "..."' if labels else f"shardmill serve {build}"
    return f"shardmill chat {build}" if "chat" in manifest else f'shardmill generate {build} --prompt "..."'
