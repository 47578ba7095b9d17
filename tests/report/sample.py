"""A small build by hand: two programs, one layer each kind of file, numbers that are told apart on the page."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from pipeline import workflows

from shardmill.config import Benchmark, Budget, Calibration, Config, Convert
from shardmill.pipeline.snakefile import listed_steps
from shardmill.report.read import Build, PartRow

PARTS = ("layers_00_02", "head_0")
PORTABLE = {"name": "portable"}
COREML = {"name": "coreml", "macos": "26.1", "build": "25B78", "chip": "Apple M4 Max"}


def number(name: str, value: float, threshold: str, question: str, **more: Any) -> dict[str, Any]:
    """A row of a gate file."""
    row = {"name": name, "value": value, "threshold": threshold, "question": question, "passed": True}
    return {**row, "detail": "", "meaning": f"the meaning of {name}", **more}


def parity(part: str) -> dict[str, Any]:
    """parity/P.json."""
    gate = [
        number("program_error", 2.5e-7, "<= 0.0001", "1 program"),
        number("width_error", 1.25e-7, "<= 1e-05", "2 widths", detail="T=2"),
        number("width_error", 4.75e-6, "<= 1e-05", "2 widths", detail="mixed"),
        number("psnr", 43.25, ">= 30", "3 cost"),
    ]
    return {"part": part, "engine": PORTABLE, "gate": gate, "not_run": {}}


def witness(part: str) -> dict[str, Any]:
    """witness/P.json."""
    gate = [
        number("witness_error", 3.5e-7, "<= 0.0001", "witness"),
        number("witness_width_error", 0.0, "<= 0.0001", "witness", detail="T=2"),
        number("witness_agreement", 4.5e-7, "<= 0.0001", "witness"),
    ]
    runtime = {"name": "coreai", "version": "coreai-core 1.0.0b3, coreai-torch 0.4.3", "machine": "x86_64"}
    return {"part": part, "engine": PORTABLE, "witness": runtime, "gate": gate, "not_run": {}}


def row(operation: str, status: str, evidence: str = "predicted") -> dict[str, Any]:
    """A row of residency/P.json."""
    where = {"shape": "T=1..4", "function": "main", "output": f"{operation}_0", "operation": operation, "device": ""}
    return {**where, "status": status, "evidence": evidence, "rules": ["O15"] if status == "no_device" else []}


def residency(part: str) -> dict[str, Any]:
    """residency/P.json."""
    finding = {"severity": "warn", "rule": "S7", "function": "main", "output": ""}
    return {
        "part": part,
        "engine": PORTABLE,
        "evidence": "predicted",
        "counts": {"eligible": 2, "no_device": 1},
        "gate": [number("ineligible", 0, "<= 0", "residency"), number("unknown", 0, "<= 0", "residency")],
        "findings": [{**finding, "why": "'x' is padded", "remedy": "put a wide axis last"}],
        "rows": [row("conv", "eligible"), row("matmul", "eligible"), row("const", "no_device")],
    }


def receipt(step: str, **outputs: str) -> dict[str, Any]:
    """Any receipt."""
    identity = {"step": step, "key": f"{step:a<64}", "code": "c" * 64, "packages": {"coremltools": "9.0"}}
    return {**identity, "outputs": outputs, "inputs": {}, "params": {}}


def accepted(tokens_per_pass: float, *by_position: list[int]) -> dict[str, Any]:
    """What became of drafts."""
    accepted, drafted = (sum(position[i] for position in by_position) for i in (0, 1))
    rate = accepted / drafted if drafted else None
    sums = {"accepted": accepted, "drafted": drafted, "rate": rate}
    return {"tokens_per_pass": tokens_per_pass, **sums, "by_position": list(by_position)}


def drafter(name: str, speedup: float, tokens_per_pass: float, **group: Any) -> dict[str, Any]:
    """A row of the benchmark; its replay accepted one draft more at the second position."""
    drafts = () if name == "none" else ([30, 60], [10, 20])
    return {
        **group,
        "drafter": name,
        "requests": 6,
        "new_tokens": 40,
        "ended": {"length": 6},
        "ms_per_token": 24.75,
        "plain_ms_per_token": 36.25,
        "speedup": speedup,
        "speedup_range": [speedup - 0.25, speedup + 0.25],
        "drafter_us_per_token": 17.5,
        "exact": 1.0,
        "differs": [],
        "verified_again": 0,
        "mj_per_token": None,
        "plain_mj_per_token": None,
        "live": accepted(tokens_per_pass, *drafts),
        "oracle": accepted(tokens_per_pass + 0.5, *((*drafts[:1], [11, 20]) if drafts else ())),
    }


def conditions(engine: dict[str, str]) -> dict[str, Any]:
    """What speed.json begins with. Core ML decides on threads and precision by itself, so there they are not named."""
    machine = {"system": "Linux x86_64", "processor": "Quiet CPU", "cores": 8, "python": "3.12.1"}
    computed = {"threads": 4, "precision": "fp32"} if engine == PORTABLE else {}
    return {"engine": engine, "machine": machine | computed, "versions": {"torch": "2.13.0"}}


def sentences(engine: dict[str, str]) -> dict[str, Any]:
    """benchmark/speed.json of an encoder."""
    return {
        **conditions(engine),
        "settings": {"text": "some/lines.txt", "repetitions": 3},
        "ready_seconds": 4.6,
        "passes": [{"bucket": 32, "ms": 12.5, "tokens_per_second": 2560.0}],
        "sentences": {
            "count": 50,
            "tokens": 400,
            "passes": 13,
            "per_second": 320.5,
            "range": [310.0, 330.0],
            "mj_per_sentence": None,
            "alone": {"per_second": 80.25, "range": [79.0, 81.0], "by_bucket": {"32": 50}},
        },
        "not_run": [{"kind": "energy", "what": "energy per sentence", "reason": "there is no meter"}],
    }


def speed(engine: dict[str, str] = PORTABLE) -> dict[str, Any]:
    """benchmark/speed.json of a decoder."""
    return {
        **conditions(engine),
        "settings": {
            "text": "some/code.txt",
            "repetitions": 3,
            "new_tokens": 40,
            "drafters": ["none", "ngram", "learned"],
            "widths": [1, 4],
        },
        "start": {
            "ready_seconds": 4.6,
            "first_request_seconds": 0.75,
            "later_request_seconds": 0.25,
            "prompt_tokens": 100,
            "new_tokens": 16,
        },
        "prefill": [{"prompt_tokens": 100, "tokens_per_second": 71.75, "over_decode": 3.543}],
        "pass_seconds": {"1": 0.0125, "4": 0.0155},
        "break_even": 1.24,
        "sweep": [
            drafter("none", 1.01, 1.0, prompt_tokens=100, prompts=1),
            drafter("ngram", 1.457, 1.83, prompt_tokens=100, prompts=1),
            drafter("learned", 1.56, 1.84, prompt_tokens=100, prompts=1),
            drafter("ngram", 1.62, 1.85, prompt_tokens=372, prompts=1),
            drafter("learned", 1.59, 1.86, prompt_tokens=372, prompts=1),
        ],
        "tasks": [
            drafter("ngram", 1.17, 1.47, task="code_edit", prompts=2),
            drafter("learned", 1.18, 1.48, task="code_edit", prompts=2),
            drafter("ngram", 0.98, 1.09, task="free_text", prompts=2),
        ],
        "not_run": [
            {"kind": "prompt", "what": "800", "reason": "context has room for 400 prompt tokens"},
            {"kind": "drafter", "what": "draft_model", "reason": "it needs a second build"},
            {"kind": "energy", "what": "energy per token", "reason": "there is no meter"},
        ],
    }


def plan() -> dict[str, Any]:
    """plan.json."""
    graph = {"hidden": 96, "ffn": 256, "heads": 3, "kv_heads": 1, "head_dim": 32, "rope_dim": 24}
    rope = {"factors": "short", "scale": 1.19, "inv_freq": [1.0]}
    states = {f"{state}_{layer}": [1, 1, 1024, 32] for state in "kv" for layer in (0, 1)}
    return {
        "kind": "decoder",
        "context": 1024,
        "tokens_max": 4,
        "widths": [1, 4],
        "weight_file_limit": 2**30,
        "systems": ["macOS 15", "macOS 26", "macOS 27"],
        "passes": [],
        "window": None,
        "parts": [{"name": PARTS[0], "states": states}, {"name": PARTS[1]}, {"name": "embedding"}],
        "architecture": {
            "model_type": "phi3",
            "graph": graph,
            "layers": 2,
            "ropes": {"rope": rope},
            "tied": True,
            "vocab": 1024,
        },
    }


def receipts() -> dict[str, Any]:
    """All receipts that the page knows of."""
    found = {name: receipt(name) for name in ("plan", "embedding", "reference")}
    found |= {f"measured/{name}": receipt(name) for name in ("original", "chosen")}
    for part in PARTS:
        found[f"packages/{part}"] = receipt("convert", package=f"{part:0<64}")
        found[f"compiled/{part}"] = receipt("compile") | {"note": "Compared with nothing."}
        found[f"residency/{part}"] = receipt("residency") | {"engine": PORTABLE}
    return found


def build(**changes: Any) -> Build:
    """The build, with some of its files replaced."""
    files: dict[str, Any] = {
        "model": {"model": "small", "parts": [{"name": part} for part in PARTS]},
        "plan": plan(),
        "source": {"repo": "who/what", "commit": "f" * 40, "files": {"config.json": {"sha256": "e" * 64, "size": 998}}},
        "pieces": (
            PartRow("layers_00_02", "layers", 0, 2, 12, 196992, 201728, 248832),
            PartRow("head_0", "head", 0, 1024, 2, 98400, 3 * 2**29, 2**31),
            PartRow("embedding", "embedding", 0, 1024, 1, 98304, None, None),
        ),
        "speed": speed(),
        "receipts": receipts(),
        "settings": {
            "model": "small",
            "source": {"path": None, "repo": "who/what", "revision": "f" * 40},
            "convert": {"precision": "int8"},
        },
    }
    verdicts = {
        "residency": changes.pop("residency", tuple(residency(part) for part in PARTS)),
        "parity": changes.pop("parity", tuple(parity(part) for part in (*PARTS, "stack"))),
        "witness": changes.pop("witness", tuple(witness(part) for part in PARTS)),
    }
    return Build(**copy.deepcopy({"verdicts": verdicts, "pipeline": pipeline()} | files | changes))


BENCHMARK = Benchmark()
SEARCH = Convert(precision="search", calibration=Calibration("text.txt"), budget=Budget(perplexity=1.03))


@cache
def workflow() -> Any:
    """The workflow that has read the rules."""
    return workflows.read(Path("configs/demo.yaml"))


def pipeline(convert: Convert = SEARCH) -> list[dict[str, Any]]:
    """The steps of a model of these parts; every one that there is unless a config is given that lacks some."""
    return listed_steps(
        workflow(),
        cast(
            Config,
            SimpleNamespace(
                parts=PARTS, points=("chosen",), convert=convert, benchmark=BENCHMARK, witness=True, predict=("ane",)
            ),
        ),
    )
