"""Forecast of a pass' time from the bytes it reads, its operations and its dispatches.

The three costs of a chip are fitted to measured passes:

    ms = bytes / bandwidth + operations / throughput + dispatches * cost

A forecast is never called measured. The fit minimises relative errors and allows no negative cost; a cost that the
samples do not determine comes out as zero.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.device.kit import described
from shardmill.errors import ShardmillError
from shardmill.evidence.build import evidence_files, read_evidence
from shardmill.evidence.file import Evidence
from shardmill.runtime.manifest import COMPLETE, read_manifest

log = logging.getLogger(__name__)

LEAST = 3  # samples: one for each cost to be fitted


@dataclass(frozen=True)
class Work:
    """Work of a pass: bytes of weights and states read, additions and multiplications, programs called."""

    bytes: float
    operations: float
    dispatches: float


@dataclass(frozen=True)
class Costs:
    """Costs on a chip, in milliseconds per byte, per operation and per dispatch."""

    byte: float
    operation: float
    dispatch: float

    def ms(self, work: Work) -> float:
        """Return the forecast of a pass."""
        return self.byte * work.bytes + self.operation * work.operations + self.dispatch * work.dispatches


def work_of(described: Mapping[str, Any], width: int) -> Work:
    """Return the work of a pass, from a kit's description of a variant. Every weight and every state is read once.

    Args:
        described: `weights_bytes`, `state_bytes`, `parameters` and `programs`.
        width: tokens of the pass. A program of an encoder is for one width, so a pass calls only one.
    """
    share = 1 / described["programs"] if described["kind"] == "encoder" else 1.0
    read = share * (described["weights_bytes"] + described["state_bytes"])
    positions = described["state_bytes"] / 2  # elements of keys and values, each multiplied once with a query
    operations = 2.0 * width * (share * described["parameters"] + positions)
    return Work(read, operations, share * described["programs"])


def fitted(samples: Sequence[tuple[Work, float]]) -> Costs:
    """Return the costs that explain measured passes best.

    Args:
        samples: work of passes, with the measured milliseconds.

    Raises:
        ShardmillError: there are fewer samples than costs.
    """
    from scipy.optimize import nnls

    if len(samples) < LEAST:
        raise ShardmillError(_too_few(len(samples)))
    rows = np.array([[work.bytes, work.operations, work.dispatches] for work, _ in samples])
    scale = np.maximum(rows.max(axis=0), 1e-30)  # bytes and dispatches are many orders apart
    relative = rows / scale / np.array([[ms] for _, ms in samples])
    found, _ = nnls(relative, np.ones(len(samples)))
    return Costs(*(float(value) for value in found / scale))


def forecast(builds: Sequence[Path]) -> list[dict[str, Any]]:
    """Forecast the passes of builds on each system that measured at least one of the builds.

    Args:
        builds: folders of finished builds, measured or not.

    Returns:
        A row for each system, build and width: `forecast_ms`, None if routed experts decide which programs a pass
            calls,
        and `measured_ms`, None if it was not measured.

    Raises:
        ShardmillError: a folder is not a finished build, or every system has too few measurements.
    """
    forms = {build: read_manifest(build, COMPLETE) for build in builds}
    known = {build: _measured(build, manifest) for build, manifest in forms.items()}
    rows: list[dict[str, Any]] = []
    for system, costs in _costs(known).items():
        for build, manifest in forms.items():
            form, routed = described(build, manifest), any(part["kind"] == "experts" for part in manifest["parts"])
            here = [one for one in known[build] if one.system == system and one.context == (form["context"] or 0)]
            for width in form["widths"]:
                taken = [found for one in here if (found := one.timing(f"pass.T={width}", "ms"))]
                row = {"system": system, "build": str(build), "width": width, "costs": asdict(costs)}
                ms = None if routed else costs.ms(work_of(form, width))
                row |= {"forecast_ms": ms, "measured_ms": taken[0] if taken else None}
                rows.append(row)
    return rows


def costs_by_system(builds: Sequence[Path]) -> dict[str, Costs]:
    """Return the costs on each system on which some of the builds were measured.

    Args:
        builds: folders of finished builds.

    Raises:
        ShardmillError: a folder is not a finished build, or every system has too few measurements.
    """
    return _costs({build: _measured(build, read_manifest(build, COMPLETE)) for build in builds})


def _measured(build: Path, manifest: Mapping[str, Any]) -> list[Evidence]:
    """Return the measured evidence of a build, including shorter contexts."""
    found = [one for one in read_evidence(evidence_files(build), manifest)[0] if one.is_measured]
    return [each for one in found for each in (one, *one.shorter)]


def _costs(known: Mapping[Path, Sequence[Evidence]]) -> dict[str, Costs]:
    """Return the costs by system; a system with too few measurements is left out, with a warning."""
    every = [one for found in known.values() for one in found]
    systems = sorted({one.system for one in every})
    samples = {system: _samples([one for one in every if one.system == system]) for system in systems}
    few = [f"{system}: {_too_few(len(found))}" for system, found in samples.items() if len(found) < LEAST]
    if few and len(few) == len(samples):
        raise ShardmillError("; ".join(few))
    for one in few:
        log.warning("left out: %s", one)
    return {system: fitted(found) for system, found in samples.items() if len(found) >= LEAST}


def _too_few(passes: int) -> str:
    return f"a forecast needs {LEAST} measured passes of a chip at least, there are {passes}"


def _samples(evidence: Sequence[Evidence]) -> list[tuple[Work, float]]:
    """Return the measured passes in evidence whose kit describes the work of a pass."""
    found = []
    for one in evidence:
        described = one.variant["described"]
        for width in one.widths:
            ms = one.timing(f"pass.T={width}", "ms")
            if ms and described.get("parameters"):
                found.append((work_of(described, width), ms))
    return found
