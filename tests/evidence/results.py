"""A result of measure.py by hand: two programs, measured on a Mac that does not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardmill.evidence.file import Evidence, of_build
from shardmill.files import sealed, write_json

PARTS = ("layers_00_02", "head_0")
MANIFEST: dict[str, Any] = {
    "packages": {part: {"path": f"packages/{part}.mlpackage", "files": {"a": f"{place}" * 64}}
                 for place, part in enumerate(PARTS)},
    "parts": [{"name": part, "program": {"path": f"compiled/{part}.mlmodelc"}} for part in PARTS],
    "widths": [1, 4],
}  # fmt: skip
MACHINE: dict[str, Any] = {
    "chip": "Apple M4 Max",
    "os": "macOS",
    "system": "26.1",
    "build": "25B78",
    "memory_bytes": 1 << 36,
    "python": "3.12.1",
    "packages": {"coremltools": "9.0", "numpy": "2.4.6"},
}


def line(status: str = "ok", detail: str = "", **values: Any) -> dict[str, Any]:
    """A measurement. Args: values those of `value`, and as `timing` what it took."""
    return {"status": status, "timing": values.pop("timing", {}), "value": values, "detail": detail}


def planned(*rows: tuple[str, str, str]) -> dict[str, Any]:
    """A compute plan's line. Args: rows of operation, output and status."""
    found = [
        {"function": "main", "operation": operation, "output": output, "status": status, "device": "CPU"}
        for operation, output, status in rows
    ]
    counts = {status: sum(row["status"] == status for row in found) for status in {row["status"] for row in found}}
    return line(evidence="measured", counts=counts, rows=found)


def measurements(ms: float = 20.0) -> dict[str, Any]:
    """Everything went well; a pass of four takes a half more than one of one."""
    whole = {f"pass.T={w}": line(timing={"ms": ms * f}, tokens=8, agree=7, programs=2) for w, f in ((1, 1), (4, 1.5))}
    for place, part in enumerate(PARTS):
        for kind, seconds in (("first", 50.0), ("warm", 2.0)):
            whole[f"{part}/load.{kind}"] = line(timing={"load_seconds": seconds + place})
    return {**whole, "load.whole": line(timing={"peak_bytes": 1 << 30})}


def result(lines: dict[str, Any] | None = None, engine: str = "coreml", **machine: Any) -> dict[str, Any]:
    """A whole file's content."""
    variant = {
        "model": "small",
        "source": {"repo": "who/what", "commit": "f" * 40},
        "described": {
            "kind": "decoder", "context": 64, "verify": 4, "widths": [1, 4], "shapes": "range", "state": "graph",
            "programs": 2, "weights_bytes": 5, "state_bytes": 4, "parameters": 3, "precision": "int8",
        },
        "artifacts": {part: entry["files"] for part, entry in MANIFEST["packages"].items()},
        "measurements": measurements() if lines is None else lines,
    }  # fmt: skip
    content = {"format": 1, "kind": "shardmill device measurements", "kit": "c" * 64, "machine": MACHINE | machine}
    return sealed({**content, "engine": {"name": engine}, "variants": {"small": variant}})


def evidence(lines: dict[str, Any] | None = None, engine: str = "coreml", **machine: Any) -> Evidence:
    """What it says of the build."""
    found = of_build(Path("evidence/device.json"), result(lines, engine, **machine), MANIFEST)
    assert found is not None
    return found


def write(path: Path, content: dict[str, Any]) -> Path:
    """A file of it."""
    write_json(path, content)
    return path
