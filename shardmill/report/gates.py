"""The numbers of all gates by question: each measure's worst number, the worst per part, and every number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.axes import Axes

from shardmill.gates.measurement import nearness
from shardmill.gates.thresholds import (
    ADAPTED,
    CALIBRATED,
    COST,
    DRAFTED,
    MIXTURE,
    PICTURED,
    PLACEMENT,
    PROGRAM,
    THRESHOLDS,
    WIDTHS,
    WITNESS,
)
from shardmill.report.read import Build, Json
from shardmill.report.speed import Plot, drawn
from shardmill.report.wording import SERIES


@dataclass(frozen=True)
class Cell:
    """A part's worst value of a measure, or the reason why the part has no value."""

    worst: Json | None
    state: str = "run"  # "n/a" or "not_run" if there is no number
    reason: str = ""


@dataclass(frozen=True)
class Measure:
    """One measure with its worst number over all parts."""

    name: str
    meaning: str
    why: str
    threshold: str
    worst: Json | None
    count: int
    alike: bool  # the same value wherever it was measured
    refused: bool  # a gate gives a reason why it could not measure
    reason: str  # why there is no number


@dataclass(frozen=True)
class Question:
    """One of the questions that the gates ask, with all numbers that answer it."""

    key: str
    title: str
    method: str
    measures: tuple[Measure, ...]
    columns: tuple[Measure, ...]  # measures with a number or a refusal in several parts
    parts: tuple[tuple[str, tuple[Cell, ...]], ...]  # a cell per column; parts without numbers are left out
    numbers: tuple[Json, ...]
    plot: Plot | None = None

    @property
    def ragged(self) -> bool:
        """Return whether a part has neither a number nor a refusal in some column."""
        return any(cell.state == "n/a" for _, cells in self.parts for cell in cells)


TITLES = {
    PROGRAM: (
        "Is the program the graph we wrote?",
        "Each program in fp32 against Hugging Face transformers with the same dequantised weights: what is left is "
        "the order of summation.",
    ),
    WIDTHS: (
        "Is every pass width the same?",
        "The same tokens cut into passes of 1, 2, 3, ... tokens, in mixtures, and with rejected drafts in between, "
        "must give the same outputs and leave the same key/value state.",
    ),
    COST: (
        "What did quantisation and fp16 cost?",
        "The programs as shipped against the original weights in fp32, on held-out text.",
    ),
    WITNESS: (
        "Does Apple's own runtime compute the same?",
        "Each part's graph with the stored weights on Core AI's runtime, which also runs on Linux: against Hugging "
        "Face transformers, and against the portable engine on the program itself. Three implementations by three "
        "parties, each in fp32.",
    ),
    PLACEMENT: (
        "Does every operation run on the Neural Engine?",
        "One operation that can't takes the graph around it with it, so the thresholds are zero, and unknown counts as "
        "failure.",
    ),
}

ENCODER_TITLES = {
    WIDTHS: (
        "Is every bucket the same?",
        "The same text in a bucket that it fills, in larger ones, and with noise where a bucket is not filled, must "
        "give the same outputs.",
    ),
}

# Measures that answer the same in the other engine's precision.
SUBSTITUTE = {
    "width_error_fp16": "width_error",
    "width_error": "width_error_fp16",
    "width_state_error": "width_error_fp16",
    "rejected_draft_error": "width_error_fp16",
    "bucket_error": "bucket_error_fp16",
    "bucket_error_fp16": "bucket_error",
    "packing_error": "packing_error_fp16",
    "packing_error_fp16": "packing_error",
}

# Measures that gates do not make on Core ML, or only for large programs; gate files then do not name them.
IN_FP32 = "Core ML computes in fp16 only; the portable engine on Linux answers it for the same package"
ON_CORE_ML = {
    "label_mismatches": IN_FP32,
    "experts_agreement": IN_FP32,
    "experts_agreement_fp16": "only the portable engine shows which experts a program takes",
    "not_chosen": "every program is so small that Core ML is expected to leave it to the CPU (rule W5)",
}


def _numbers_of(file: Json) -> Iterator[Json]:
    """Yield the rows of one gate file with part and evidence; parity files do not name it, as parity is measured."""
    for row in file["gate"]:
        more = {"part": file["part"], "evidence": file.get("evidence", "measured")}
        yield {"limit_why": ""} | row | more


def gate_questions(build: Build) -> tuple[Question, ...]:
    """Return the questions of parity and residency, in order, then any other questions in the gate files."""
    numbers = [n for file in (*build.parity, *build.witness, *build.residency) for n in _numbers_of(file)]
    known = [key for key in TITLES if key != WITNESS or build.witness]
    keys = [*known, *dict.fromkeys(n["question"] for n in numbers if n["question"] not in TITLES)]
    return tuple(_question(key, [n for n in numbers if n["question"] == key], build) for key in keys)


def _asked(key: str, build: Build) -> list[str]:
    """Return the measures in the table of thresholds that belong to a question and to this kind of build."""
    kinds = {"", build.plan["kind"]}
    kinds |= {CALIBRATED} if build.settings["convert"].get("calibration") else set()
    kinds |= {ADAPTED} if build.plan.get("adapters") else set()
    kinds |= {DRAFTED} if "drafter" in build.plan else set()
    kinds |= {PICTURED} if "tower" in build.plan else set()
    kinds |= {MIXTURE} if build.plan["architecture"]["graph"].get("experts") else set()
    return [name for name, known in THRESHOLDS.items() if known.question == key and known.of in kinds]


def _question(key: str, numbers: Sequence[Json], build: Build) -> Question:
    """Return one question; a measure of the table of thresholds that nothing reports is listed as not run."""
    files = {PLACEMENT: build.residency, WITNESS: build.witness}.get(key, build.parity)
    names = _asked(key, build)
    names += [name for name in dict.fromkeys(n["name"] for n in numbers) if name not in names]
    title, method = (ENCODER_TITLES if build.encodes else {}).get(key) or TITLES.get(key, (key, ""))
    measures = tuple(_gate_measure(name, numbers, files) for name in names)
    columns = tuple(m for m in measures if sum(_answers(file, m.name) for file in files) > 1)
    return Question(
        key=key,
        title=title,
        method=method,
        measures=measures,
        columns=columns,
        parts=tuple(
            (file["part"], tuple(_cell(file, m.name) for m in columns))
            for file in files
            if any(_answers(file, m.name) for m in columns)
        ),
        numbers=tuple(numbers),
        plot=_along_text(files) if key == COST else None,
    )


def _along_text(files: Sequence[Json]) -> Plot | None:
    """Return a figure of the divergence along a long text, which is measured if the model has a recurrence."""
    stretches = [one for file in files for one in file.get("along", ())]
    if not stretches:
        return None
    words = f"mean of {stretches[0]['stop'] - stretches[0]['start']} positions; no threshold limits its growth"
    return drawn("along", "KL divergence along a long text", words, partial(_draw_along, stretches=stretches))


def _draw_along(axes: Axes, stretches: Sequence[Json]) -> None:
    """Draw the divergence over the position."""
    values = [one["kl"] for one in stretches]
    axes.plot([one["stop"] for one in stretches], values, "o-", ms=5, lw=1.8, color=SERIES[0])
    axes.set_xlim(0, None)
    axes.set_ylim(0, 1.15 * max(values) or 1)
    axes.set_xlabel("position")
    axes.set_ylabel("nat")


def _gate_measure(name: str, numbers: Iterable[Json], files: Sequence[Json]) -> Measure:
    """Return one measure with its worst number, or with the reason why it has no number."""
    same = [n for n in numbers if n["name"] == name]
    worst = max(same, key=nearness, default=None)
    known = THRESHOLDS.get(name)
    sign = ">=" if known and known.at_least else "<="
    return Measure(
        name=name,
        meaning=same[0]["meaning"] if same else known.meaning if known else "",
        why=worst["limit_why"] if worst and worst["limit_why"] else known.why if known else "",
        threshold=worst["threshold"] if worst else f"{sign} {known.limit:g}" if known else "",
        worst=worst,
        count=len(same),
        alike=len({n["value"] for n in same}) == 1,
        refused=any(name in _refusals(file) for file in files),
        reason="" if same else _why_not(name, files),
    )


def _why_not(name: str, files: Sequence[Json]) -> str:
    """Return why nothing reports a measure: a gate file's reason, or the measure that replaces it here."""
    for file in files:
        if name in _refusals(file):
            return str(_refusals(file)[name])
    if name in ON_CORE_ML and any(file["engine"]["name"] != "portable" for file in files):
        return ON_CORE_ML[name]
    other = SUBSTITUTE.get(name)
    if other and any(row["name"] == other for file in files for row in file["gate"]):
        return f"`{other}` answers the same question in the precision of this engine"
    return "no gate file of this build reports it"


def _cell(file: Json, name: str) -> Cell:
    """Return a part's worst value of one measure."""
    same = [n for n in _numbers_of(file) if n["name"] == name]
    if same:
        return Cell(max(same, key=nearness))
    if name in _refusals(file):
        return Cell(None, state="not_run", reason=str(_refusals(file)[name]))
    return Cell(None, state="n/a")


def _answers(file: Json, name: str) -> bool:
    """Return whether a gate file has a number of this name, or says why not."""
    return name in _refusals(file) or any(row["name"] == name for row in file["gate"])


def _refusals(file: Json) -> Json:
    """Return the measures that the gate could not make, each with the reason."""
    refused: Json = file.get("not_run", {})
    return refused
