"""The devices' measurements of the build: a block for each chip and system, with contradictions to the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmill.evidence.build import Contradiction, contradictions
from shardmill.evidence.file import Evidence
from shardmill.report.read import Json


@dataclass(frozen=True)
class DevicePass:
    """Passes of one width through all programs."""

    slots: int  # slots of the context; 0 for an encoder
    width: int
    ms: float | None
    tokens_per_second: float | None
    agree: int | None  # number of tokens that are chosen as in fp32
    tokens: int | None
    mj: float | None  # millijoules of energy for a pass
    status: str


@dataclass(frozen=True)
class Device:
    """One chip and system."""

    system: str
    is_measured: bool
    passes: tuple[DevicePass, ...]
    first_load: float | None  # seconds for all programs, loaded one after the other
    warm_load: float | None
    peak_bytes: float | None
    troubles: tuple[tuple[str, str, str], ...]
    counts: tuple[tuple[str, int], ...]  # operations by status, over all programs and widths of the whole context
    contradictions: tuple[Contradiction, ...]

    @property
    def several(self) -> bool:
        """Return whether more than one length of the context was measured."""
        return len({one.slots for one in self.passes}) > 1


def device_sections(found: Sequence[Evidence], verdicts: Sequence[Json]) -> list[Device]:
    """Return a block for each file of evidence; `verdicts` are the build's residency/PART.json."""
    return [_device(evidence, verdicts) for evidence in found]


def _device(evidence: Evidence, verdicts: Sequence[Json]) -> Device:
    return Device(
        system=evidence.system,
        is_measured=evidence.is_measured,
        passes=tuple(_pass(one, width) for one in (evidence, *evidence.shorter) for width in one.widths),
        first_load=evidence.total("load.first", "load_seconds"),
        warm_load=evidence.total("load.warm", "load_seconds"),
        peak_bytes=evidence.timing("load.whole", "peak_bytes"),
        troubles=tuple(evidence.troubles),
        counts=tuple(sorted(_counts(evidence).items())),
        contradictions=tuple(contradictions(evidence, verdicts)),
    )


def _pass(evidence: Evidence, width: int) -> DevicePass:
    key = f"pass.T={width}"
    line = evidence.lines.get(key, {"status": "not_run", "value": {}})
    ms = evidence.timing(key, "ms")
    return DevicePass(
        slots=evidence.context,
        width=width,
        ms=ms,
        tokens_per_second=1e3 * width / ms if ms else None,
        agree=line["value"].get("agree"),
        tokens=line["value"].get("tokens"),
        mj=evidence.timing(f"energy.T={width}", "mj_per_pass"),
        status=line["status"],
    )


def _counts(evidence: Evidence) -> dict[str, int]:
    """Return the number of operations with each status in the compute plans."""
    found: dict[str, int] = {}
    for key, line in evidence.lines.items():
        if "/residency." in key:
            for status, count in line["value"].get("counts", {}).items():
                found[status] = found.get(status, 0) + count
    return found
