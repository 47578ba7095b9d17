"""Ranks builds of one checkpoint on each system by imported measurements, the fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardmill.evidence.build import read_evidence
from shardmill.evidence.file import Evidence
from shardmill.evidence.folder import evidence_files
from shardmill.runtime.manifest import COMPLETE, read_manifest


@dataclass(frozen=True)
class Standing:
    """A build's rank on a system.

    Attributes:
        system: chip and system.
        source: the checkpoint; only builds of the same checkpoint are compared.
        build: the folder.
        place: 1 for the winner; None for a build that fails, or whose narrowest pass was not measured.
        form: shapes, widths, programs, state and precision, from the kit's description.
        ms: milliseconds of a pass by width.
        tokens_per_second: by width, if every token of a pass counts.
        shorter: `ms` of each shorter context, by its slots.
        first_load_seconds, warm_load_seconds: of all programs, without their first passes.
        peak_bytes: peak memory of the process with all programs.
        trouble: the first failure, or "".
    """

    system: str
    source: str
    build: str
    place: int | None
    form: dict[str, Any]
    ms: dict[int, float]
    tokens_per_second: dict[int, float]
    shorter: dict[int, dict[int, float]]
    first_load_seconds: float | None
    warm_load_seconds: float | None
    peak_bytes: float | None
    trouble: str


def rank_builds(builds: Sequence[Path]) -> list[dict[str, Any]]:
    """Return a row for each build on each system on which it was measured.

    A build's place depends on its narrowest pass, which decodes one token. A build with any failure has no place.

    Raises:
        ShardmillError: a folder is not a finished build, or a file of evidence was changed.
    """
    standings = [standing for build in builds for standing in _standings(build)]
    rows: list[dict[str, Any]] = []
    for group in sorted({(standing.system, standing.source) for standing in standings}):
        compared = [standing for standing in standings if (standing.system, standing.source) == group]
        running = [s for s in compared if not s.trouble and _narrowest(s) in s.ms]
        running.sort(key=lambda s: (s.ms[_narrowest(s)] / _narrowest(s), s.build))
        rows += [asdict(s) | {"place": place} for place, s in enumerate(running, 1)]
        rows += [asdict(s) for s in compared if s not in running]
    return rows


def _narrowest(standing: Standing) -> int:
    """Return the width of the passes that decide a place, measured or not."""
    width: int = min(standing.form["widths"])
    return width


def _standings(build: Path) -> Iterator[Standing]:
    manifest = read_manifest(build, COMPLETE)
    source = manifest.get("source", {})
    name = source.get("repo") or manifest["model"]
    for evidence in read_evidence(evidence_files(build), manifest)[0]:
        yield _standing(build, f"{name}@{source.get('commit', '')}", evidence)


def _standing(build: Path, source: str, evidence: Evidence) -> Standing:
    ms, troubles = _ms(evidence), evidence.troubles
    return Standing(
        system=evidence.system,
        source=source,
        build=str(build),
        place=None,
        form=dict(evidence.variant["described"]),
        ms=ms,
        tokens_per_second={width: 1e3 * width / value for width, value in ms.items()},
        shorter={one.context: _ms(one) for one in evidence.shorter},
        first_load_seconds=evidence.total("load.first", "load_seconds"),
        warm_load_seconds=evidence.total("load.warm", "load_seconds"),
        peak_bytes=evidence.timing("load.whole", "peak_bytes"),
        trouble=" ".join(troubles[0][:2]) if troubles else "",
    )


def _ms(evidence: Evidence) -> dict[int, float]:
    """Return the milliseconds of a pass by width, for the measured widths."""
    taken = {width: evidence.timing(f"pass.T={width}", "ms") for width in evidence.widths}
    return {width: value for width, value in taken.items() if value}
