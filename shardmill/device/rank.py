"""Which build wins on which chip, by what was imported: builds of one checkpoint on one system, the fastest first."""

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
    """A build on a system.

    Attributes:
        system: chip and system.
        source: the checkpoint; only builds of the same are compared.
        build: the folder.
        place: 1 for the winner; None for what has no place, since it fails, or its narrowest pass was not measured.
        form: shapes, widths, programs, state and precision, as the kit described them.
        ms: of a pass by width.
        tokens_per_second: by width, as far as every token of a pass counts.
        shorter: `ms` of each shorter context, by its slots.
        first_load_seconds, warm_load_seconds: of all programs, their first passes left out.
        peak_bytes: most memory of the process that held all programs.
        trouble: what went wrong first, or "".
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


def rank(builds: Sequence[Path]) -> list[dict[str, Any]]:
    """A row for each build on each system that it was measured on.

    A build's place is that of its narrowest pass, which decoding one token takes. What fails anywhere has none.

    Raises:
        ShardmillError: a folder holds no finished build, or a file of evidence was changed.
    """
    found = [standing for build in builds for standing in _standings(build)]
    rows: list[dict[str, Any]] = []
    for group in sorted({(standing.system, standing.source) for standing in found}):
        own = [standing for standing in found if (standing.system, standing.source) == group]
        running = [s for s in own if not s.trouble and _narrowest(s) in s.ms]
        running.sort(key=lambda s: (s.ms[_narrowest(s)] / _narrowest(s), s.build))
        rows += [asdict(s) | {"place": place} for place, s in enumerate(running, 1)]
        rows += [asdict(s) for s in own if s not in running]
    return rows


def _narrowest(standing: Standing) -> int:
    """The width of the passes that decide a place, measured or not."""
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
    """Milliseconds of a pass by width, as far as they were measured."""
    taken = {width: evidence.timing(f"pass.T={width}", "ms") for width in evidence.widths}
    return {width: value for width, value in taken.items() if value}
