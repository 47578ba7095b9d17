"""Judges a package or bundle, whoever made it: what it is, what leaves the Neural Engine, how large fp16's errors are.

What the rules say is a prediction. Numbers are computed, in fp32 and with fp16's rounding emulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from portable_coreml.errors import InputError, PortableError, ProgramError
from portable_coreml.files.arrays import SUFFIXES, read_arrays
from portable_coreml.files.blob import WeightLoader, resolve
from portable_coreml.files.bundle import load_model
from portable_coreml.files.compare import ShownFunction, features
from portable_coreml.files.model import LoadedModel, pick_function
from portable_coreml.judge.against import Against, Parting, compare
from portable_coreml.judge.asked import Asked
from portable_coreml.judge.drift import Case, OpDrift, States, percent
from portable_coreml.judge.feed import Domain, arrays, domains, probes
from portable_coreml.judge.limits import SYSTEMS, taking
from portable_coreml.judge.loadable import check_loadable, default_shapes
from portable_coreml.judge.placement import OpVerdict, Work, op_verdicts, work
from portable_coreml.judge.rule import SEVERITIES, Finding, Subject, subjects
from portable_coreml.judge.rules import RULES
from portable_coreml.judge.shapes import infer_shapes
from portable_coreml.judge.traces import trace_of, trace_other
from portable_coreml.program import blobs

FIT_FP16 = "scale what goes in, or reorder the arithmetic so that fp16 holds every step; divide before a sum of squares"


@dataclass(frozen=True)
class Group:
    """All that one rule found.

    Attributes:
        level: "error", "warn" or "info".
        rule: the rule's identity: of a placement rule (docs/ane-rules.md) or a check of numbers ("fp16-error").
        title: what the rule is about.
        why: what was found at the first place.
        remedy: what to do instead.
        places: operations by their first output, with "FUNCTION: " if there are several functions; "(program)".
        count: how often it was found.
        operations: the share of the program's arithmetic that these operations do; None if it is not known.
        bytes: the share of the bytes that they move.
        evidence: "predicted" or "computed".
        confidence: A to D, of a placement rule.
    """

    level: str
    rule: str
    title: str
    why: str
    remedy: str
    places: tuple[str, ...]
    count: int = 1
    operations: float | None = None
    bytes: float | None = None
    evidence: str = "predicted"
    confidence: str = ""


@dataclass(frozen=True)
class StoredPart:
    """A weight file: its path in the package, its bytes, and the systems whose limit it keeps."""

    file: str
    bytes: int
    systems: tuple[str, ...]


@dataclass(frozen=True)
class JudgedFunction:
    """One function.

    Attributes:
        shown: its inputs, outputs, states and operations.
        placed: how many operations have each status (placement.OpVerdict).
        off_operations: the share of its arithmetic that is predicted off the Neural Engine; None if it is not known.
        off_bytes: the share of the bytes that it moves.
        domains: what its inputs were fed with; empty if it was not run.
        rows: each floating-point result's error in fp16, in program order; empty if it was not run.
        outputs: the names of the results that it returns.
        not_run: why it was not run.
    """

    shown: ShownFunction
    placed: Mapping[str, int]
    off_operations: float | None
    off_bytes: float | None
    domains: tuple[Domain, ...] = ()
    rows: tuple[OpDrift, ...] = ()
    outputs: tuple[str, ...] = ()
    not_run: str = ""


@dataclass(frozen=True)
class Report:
    """The judgement of one file; `findings` are in order of level and of cost."""

    path: str
    specification: int
    bytes: int
    parts: tuple[StoredPart, ...]
    functions: tuple[JudgedFunction, ...]
    findings: tuple[Group, ...]
    against: Against | None = None

    @property
    def errors(self) -> int:
        return sum(group.level == "error" for group in self.findings)


def judge(path: Path, asked: Asked | None = None) -> Report:
    """Judge a package or a compiled bundle.

    Raises:
        ProgramError: it can't be read.
        InputError: recorded inputs, ranges or what it is compared with don't fit it.
    """
    asked = asked or Asked()
    model = load_model(path)
    of_model = list(subjects(model, asked.target))
    if asked.function:
        of_model = [s for s in of_model if s.function is pick_function(model, asked.function)[0]]
    findings: list[tuple[Finding, str]] = []  # each with its place
    verdicts: list[tuple[OpVerdict, str]] = []
    done: dict[str, Work] = {}  # by place; without functions whose work is not known
    functions, computed = [], list[Group]()
    against = None
    for subject in of_model:
        lead = f"{subject.function.name}: " if len(of_model) > 1 else ""
        breaches = [finding for rule in RULES.values() for finding in rule.findings(subject)]
        rows = list(op_verdicts(subject, breaches))
        findings += [(finding, lead + finding.output) for finding in breaches]
        verdicts += [(row, lead + row.output) for row in rows]
        worked = _worked(model, subject)
        done |= {lead + name: amount for name, amount in worked.items()}
        function = _function(model, subject, rows, worked)
        if asked.runs:
            function, groups = _run(model, subject, function, asked, lead)
            computed += groups
        functions.append(function)
    if asked.against is not None:
        against = against_of(path, asked)
        computed += _partings(against)
    groups = [*_grouped(findings, verdicts, done, functions, asked), *computed]
    groups = [replace(g, level="info") if g.rule in asked.accept and g.level == "error" else g for g in groups]
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    return Report(
        str(path),
        model.spec_version,
        sum(file.stat().st_size for file in files),
        tuple(_parts(model, of_model, asked)),
        tuple(functions),
        tuple(sorted(groups, key=_order)),
        against,
    )


def _order(group: Group) -> tuple[int, float, str]:
    """Return the key that sorts findings: errors first, and within a level the most costly first."""
    costs = [share for share in (group.operations, group.bytes) if share is not None]
    return SEVERITIES.index(group.level), -max(costs, default=1.0), group.rule


def _worked(model: LoadedModel, subject: Subject) -> dict[str, Work]:
    """Return what each operation does at the default shapes; empty if that can't be told."""
    try:
        shapes = default_shapes(*pick_function(model, subject.function.name))
        return work(subject, infer_shapes(subject.function, shapes))
    except ProgramError:
        return {}


def _function(
    model: LoadedModel, subject: Subject, rows: Iterable[OpVerdict], worked: Mapping[str, Work]
) -> JudgedFunction:
    name = subject.function.name
    description = pick_function(model, name)[1]
    counts = Counter(op.kind for op in subject.ops)
    shown = ShownFunction(
        name,
        subject.function.opset,
        features(description.input),
        features(description.output),
        features(description.state),
        tuple(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
    )
    off = {row.output for row in rows if row.status == "ineligible"}
    return JudgedFunction(shown, dict(Counter(row.status for row in rows)), *_share(off, worked))


def _share(names: Iterable[str], worked: Mapping[str, Work]) -> tuple[float | None, float | None]:
    """Return the shares of arithmetic and of bytes that some operations have; None if the work is not known."""
    total = sum(worked.values(), Work())
    if not total.operations or not total.bytes:
        return None, None
    part = sum((worked.get(name, Work()) for name in set(names)), Work())
    return part.operations / total.operations, part.bytes / total.bytes


def _parts(model: LoadedModel, of_model: list[Subject], asked: Asked) -> Iterator[StoredPart]:
    paths = {resolve(blob.path, model.model_dir) for subject in of_model for blob in blobs(subject.function)}
    for path in sorted(paths):
        size = path.stat().st_size if path.is_file() else 0
        yield StoredPart(str(path.relative_to(model.model_dir)), size, taking(size, asked.target.named or SYSTEMS))


def _grouped(
    findings: list[tuple[Finding, str]],
    verdicts: list[tuple[OpVerdict, str]],
    done: Mapping[str, Work],
    functions: list[JudgedFunction],
    asked: Asked,
) -> Iterator[Group]:
    """Yield what the placement rules found, by rule and level."""
    shares = [share for f in functions for share in (f.off_operations, f.off_bytes)]
    much = any(share is None or share > asked.off for share in shares)
    groups: dict[tuple[str, str], list[tuple[Finding, str]]] = {}
    for finding, place in findings:
        groups.setdefault((finding.rule, finding.severity), []).append((finding, place))
    for (identity, severity), members in groups.items():
        first, rule = members[0][0], RULES[identity]
        places = [place if finding.output else f"{place}(program)" for finding, place in members]
        costly = [place for finding, place in members if finding.output]
        if severity == "error":  # an error on a constant takes the operation that uses the constant off the engine
            costly = [place for row, place in verdicts if identity in row.rules and row.status == "ineligible"]
        operations, moved = _share(costly, done) if costly else (None, None)
        whole = any(not finding.output for finding, _ in members)
        level = "warn" if severity == "error" and not whole and not much else severity
        yield Group(
            level,
            identity,
            rule.title,
            first.why,
            rule.remedy,
            tuple(dict.fromkeys(places)),
            len(members),
            operations,
            moved,
            confidence=rule.confidence,
        )


def _run(
    model: LoadedModel, subject: Subject, function: JudgedFunction, asked: Asked, lead: str
) -> tuple[JudgedFunction, list[Group]]:
    """Return a function with the numbers of a run, and what was found in them."""
    _, description = pick_function(model, subject.function.name)
    recorded = _given(asked, subject)
    fed = domains(subject, description, asked.ranges, recorded)
    data = {**arrays(fed, asked.seed), **recorded}
    try:
        check_loadable(model, subject.function, description)
        case = Case(model, subject.function.name, asked.precision)
        before = case.filled_states(data)
        rows = case.drift(data, before)
        groups = list(_numbers(case, rows, data, before, asked))
        known = {group.places for group in groups if group.level == "error"}  # at an edge, too, as a matter of course
        edges = _at_the_edges(case, fed, recorded, before, asked)
        groups += [group for group in edges if group.places not in known]
    except InputError:
        raise
    except PortableError as error:
        title, remedy = "it can't be run here", "judge it by rules alone, if that is enough"
        group = Group("error", "run", title, str(error), remedy, (f"{lead}(program)",), evidence="computed")
        return replace(function, not_run=str(error)), [group]
    run = replace(function, domains=fed, rows=tuple(rows), outputs=case.outputs())
    return run, [replace(group, places=tuple(lead + place for place in group.places)) for group in groups]


def _given(asked: Asked, subject: Subject) -> dict[str, Any]:
    """Return the recorded inputs of a function, from the file of inputs and the recorded arrays to compare with."""
    recorded: dict[str, Any] = {}
    names = {feature.name for feature in subject.inputs}
    for path in (asked.against, asked.inputs):
        if path is not None and (path is asked.inputs or path.suffix in SUFFIXES):
            recorded |= {name: array for name, array in read_arrays(path).items() if name in names}
    if asked.inputs is not None and not recorded:
        raise InputError(f"{asked.inputs}: it has none of the inputs {', '.join(sorted(names))}")
    return recorded


def _numbers(case: Case, rows: list[OpDrift], data: Mapping[str, Any], before: States, asked: Asked) -> Iterator[Group]:
    """Yield what was found in one run within the domain."""
    outputs = [row for row in rows if row.output in case.outputs()]
    spoilt = case.not_finite(data, before, half=False)
    if spoilt is not None:
        yield Group(
            "error",
            "domain",
            "an output is not finite in fp32 already",
            f"{spoilt.kind} '{spoilt.name}' is the first: {spoilt.what}; the program may not be for such inputs",
            "state each input's domain with --range NAME=LEAST:LARGEST, or give arrays with --inputs",
            (spoilt.name,),
            evidence="computed",
        )
        return
    worst = max(outputs, key=lambda row: row.total, default=None)
    bad = worst is not None and worst.total > asked.error
    level = "error" if bad else "warn"
    end = "" if worst is None else f"; output '{worst.output}' is off by {percent(worst.total)}"
    first = next((row for row in rows if row.total > asked.error), None)
    if first is not None and first.state:
        why = (
            f"{first.kind} '{first.output}' is the first: {first.state} in fp16; fp32 reaches {first.largest:.3g}{end}"
        )
        yield _computed(level, "fp16-overflow", "a result leaves fp16's range", why, FIT_FP16, first)
    elif first is not None:
        why = (
            f"{first.kind} '{first.output}' is the first over {asked.error:.2%}: off by {percent(first.total)}; with "
            f"inputs as good as fp16 can hold them, by {percent(first.own)}{end}"
        )
        yield _computed(level, "fp16-error", "fp16 loses more than the bound", why, FIT_FP16, first)
    small = next((row for row in rows if row.subnormal > asked.error), None)
    if small is not None:
        why = (
            f"{small.kind} '{small.output}' loses {small.subnormal:.2%} if numbers below 2^-14, the least "
            "normal one of fp16, are taken for zero"
        )
        yield _computed("warn", "fp16-subnormal", "results are below fp16's normal numbers", why, FIT_FP16, small)


def _computed(level: str, rule: str, title: str, why: str, remedy: str, row: OpDrift) -> Group:
    return Group(level, rule, title, why, remedy, (row.output,), evidence="computed")


def _at_the_edges(
    case: Case, fed: tuple[Domain, ...], recorded: Mapping[str, Any], before: States, asked: Asked
) -> Iterator[Group]:
    """Yield what is not finite at the edges of the inputs' domains."""
    for probe in probes(fed, asked.seed):
        data = {**probe.arrays, **recorded}
        spoilt = case.not_finite(data, before, half=True)
        if spoilt is None:
            continue
        also = case.not_finite(data, before, half=False) is not None
        what = f"{spoilt.what} in fp16{', and in fp32 too' if also else ''}"
        yield Group(
            "error" if probe.inside and not also else "warn",
            probe.name,
            f"an output is not finite for {probe.words}",
            f"{spoilt.kind} '{spoilt.name}' is the first: {what}; with {probe.words}",
            FIT_FP16 if probe.inside else f"say with --range whether such inputs occur; if they do, {FIT_FP16}",
            (spoilt.name,),
            evidence="computed",
        )


def against_of(path: Path, asked: Asked) -> Against:
    """Return where a package or bundle and `asked.against` part: `judge`'s part of that name alone.

    The default function is compared, or the one that was asked for.

    Raises:
        PortableError: one of them can't be read or run, or they take other inputs.
    """
    assert asked.against is not None
    model = load_model(path)
    function, description = pick_function(model, asked.function)
    subject = next(s for s in subjects(model, asked.target) if s.function is function)
    recorded = _given(asked, subject)
    fed = domains(subject, description, asked.ranges, recorded)
    if asked.against.suffix in SUFFIXES:
        missing = [d.name for d in fed if d.kind not in ("given", "left out")]
        if missing:
            said = f"it lacks the input '{missing[0]}', with which its arrays were recorded; give it with --inputs"
            raise InputError(f"{asked.against}: {said}")
    check_loadable(model, function, description)
    data, case = {**arrays(fed, asked.seed), **recorded}, Case(model, function.name)
    one = trace_of(case, path, data, WeightLoader(model.model_dir))
    return compare(one, trace_other(asked.against, case, data), asked.difference)


def _partings(against: Against) -> Iterator[Group]:
    """Yield a finding for each place where two programs part."""
    worst = max(against.outputs, key=lambda pair: pair.difference)
    ends = f"output '{worst.name}' differs by {percent(worst.difference)}"
    for parting in against.partings:
        yield Group(
            "info" if against.same else "error",
            "against",
            "two programs part here",
            f"{said_of(parting)}; what it takes agrees with {against.other}; {ends}",
            "see what the operation takes and how it was converted; a larger --difference allows for other weights",
            (parting.name or parting.other,),
            evidence="computed",
        )


def said_of(parting: Parting) -> str:
    """Return in words where two programs part."""
    sides = ((parting.kind, parting.name), (parting.other_kind, parting.other))
    said = " and ".join(f"{kind} '{name}'" for kind, name in sides if name)
    said += "" if parting.difference is None else f": {percent(parting.difference)}"
    return said + (f"; {parting.what}" if parting.what else "")
