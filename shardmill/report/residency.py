"""Where operations run, per part and per kind of operation, the findings, and the measurements on devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardmill.evidence.build import Contradiction, contradictions
from shardmill.evidence.file import Evidence
from shardmill.report.read import Json

# Predicted is never called resident: what the rules allow is "could run".
STATUS = {
    "ane": "prefers it (measured)",
    "eligible": "could run there (predicted)",
    "not_chosen": "could run there, given to another device (measured)",
    "ineligible": "not there",
    "unknown": "unknown",
    "no_device": "needs no device",
}
SEVERITIES = ("error", "warn", "info")


@dataclass(frozen=True)
class Counts:
    """The number of operations with each status, for a part or a kind of operation."""

    name: str
    evidence: str  # "measured", "predicted", or both
    by_status: tuple[int, ...]  # in the order of `Placement.statuses`
    rules: str = ""


@dataclass(frozen=True)
class ReportedFinding:
    """One rule's breaches in all parts."""

    severity: str
    rule: str
    remedy: str
    breaches: tuple[tuple[str, str], ...]  # (what, parts)


@dataclass(frozen=True)
class Placement:
    """All statements about residency."""

    evidence: tuple[str, ...]
    statuses: tuple[str, ...]  # the statuses that occur
    parts: tuple[Counts, ...]
    kinds: tuple[Counts, ...]
    findings: tuple[ReportedFinding, ...]
    operations: int  # the number of operations that need a device
    shapes: tuple[str, ...]


def placement(files: Sequence[Json]) -> Placement:
    """Return everything about residency from residency/P.json."""
    rows = [row for file in files for row in file["rows"]]
    statuses = tuple(s for s in STATUS if any(row["status"] == s for row in rows))
    kinds = sorted({row["operation"] for row in rows}, key=lambda kind: _severity_rank(kind, rows))
    return Placement(
        evidence=tuple(sorted({file["evidence"] for file in files})),
        statuses=statuses,
        parts=tuple(_counts(file["part"], file["rows"], statuses) for file in files),
        kinds=tuple(_counts(kind, (r for r in rows if r["operation"] == kind), statuses) for kind in kinds),
        findings=_findings(files),
        operations=sum(row["status"] != "no_device" for row in rows),
        shapes=tuple(sorted({row["shape"] for row in rows}, key=lambda shape: (len(shape), shape))),
    )


def _severity_rank(kind: str, rows: Iterable[Json]) -> tuple[int, int, str]:
    """Return a sort key: kinds with trouble first, then the most frequent, and kinds without a device last."""
    statuses = Counter(row["status"] for row in rows if row["operation"] == kind)
    trouble = statuses["ineligible"] + statuses["unknown"]
    return (0 if trouble else 2 if set(statuses) == {"no_device"} else 1, -statuses.total(), kind)


def _counts(name: str, rows: Iterable[Json], statuses: Sequence[str]) -> Counts:
    """Return the counts of the given rows."""
    rows = list(rows)
    counts = Counter(row["status"] for row in rows)
    return Counts(
        name=name,
        evidence=" and ".join(sorted({row["evidence"] for row in rows})) or "not run",
        by_status=tuple(counts[status] for status in statuses),
        rules=", ".join(sorted({rule for row in rows for rule in row["rules"]})),
    )


def _findings(files: Sequence[Json]) -> tuple[ReportedFinding, ...]:
    """Return findings by severity and rule; equal texts about several parts are merged."""
    folded: dict[tuple[int, str, str], dict[str, list[str]]] = {}
    for file in files:
        for finding in file["findings"]:
            key = (SEVERITIES.index(finding["severity"]), finding["rule"], finding["remedy"])
            what = f"{finding['output']}: {finding['why']}" if finding["output"] else finding["why"]
            parts = folded.setdefault(key, {}).setdefault(what, [])
            if file["part"] not in parts:
                parts.append(file["part"])
    return tuple(
        ReportedFinding(
            SEVERITIES[severity], rule, remedy, tuple((what, ", ".join(parts)) for what, parts in whys.items())
        )
        for (severity, rule, remedy), whys in sorted(folded.items())
    )


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
    """The measurements on one chip and system, and where they contradict the rules."""

    evidence: Evidence
    passes: tuple[DevicePass, ...]
    counts: Counter[str]  # operations by status, over all programs and widths of the whole context
    contradictions: tuple[Contradiction, ...]


def device_sections(all_evidence: Sequence[Evidence], verdicts: Sequence[Json]) -> list[Device]:
    """Return a block for each file of evidence; `verdicts` are the build's residency/PART.json."""
    return [
        Device(
            evidence=evidence,
            passes=tuple(_pass(one, width) for one in (evidence, *evidence.shorter) for width in one.widths),
            counts=_operation_counts(evidence),
            contradictions=tuple(contradictions(evidence, verdicts)),
        )
        for evidence in all_evidence
    ]


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


def _operation_counts(evidence: Evidence) -> Counter[str]:
    """Return the number of operations with each status in the compute plans."""
    counts: Counter[str] = Counter()
    for key, line in evidence.lines.items():
        if "/residency." in key:
            counts.update(line["value"].get("counts", {}))
    return counts
