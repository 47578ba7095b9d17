"""Rules on states and how they are written."""

from __future__ import annotations

from collections.abc import Iterator

from portable_coreml.judge.placement.rule import Breach, Citation, Rule, Scope
from portable_coreml.judge.placement.subject import Subject, label

_FIRST_STATEFUL_SPEC = 9  # iOS 18, macOS 15
_MANY_STATES = 2
_LONG_CACHE = 2048
_STATE_PATTERN = Citation("john-rocky/CoreML-LLM", "docs/MLSTATE_PATTERN.md")


def _too_old(subject: Subject) -> Iterator[Breach]:
    if subject.states and subject.spec_version < _FIRST_STATEFUL_SPEC:
        yield Breach("", f"the model has states at specification version {subject.spec_version}")


def _symbolic_state(subject: Subject) -> Iterator[Breach]:
    for name, kind in subject.states.items():
        if None in kind.shape or kind.variadic:
            yield Breach("", f"state '{name}' has an unknown extent")


def _standalone_update(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind != "slice_update":
            continue
        readers = subject.consumers.get(label(op), ())
        if not readers or any(r.kind not in ("write_state", "coreml_update_state") for r in readers):
            yield Breach(label(op), "its result goes elsewhere than to a state")


def _computed_update(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        bounds = [*op.inputs.get("begin", ()), *op.inputs.get("end", ())] if op.kind == "slice_update" else []
        if any(isinstance(name, str) and not subject.is_constant(name) for name in bounds):
            yield Breach(label(op), "its begin or end is computed at run time")


def _many_sliced_states(subject: Subject) -> Iterator[Breach]:
    if len(subject.states) > _MANY_STATES and any(op.kind == "slice_update" for op in subject.runtime_ops):
        yield Breach("", f"{len(subject.states)} states, written with slice_update")


def _long_cache(subject: Subject) -> Iterator[Breach]:
    for name, kind in subject.states.items():
        if any(n is not None and n > _LONG_CACHE for n in kind.shape[-2:-1]):
            yield Breach("", f"state '{name}' holds {kind.shape[-2]} slots")


RULES = (
    Rule(
        "ST1",
        "error",
        "states before iOS 18",
        "convert with minimum_deployment_target=ct.target.iOS18 or newer",
        _too_old,
        "A",
        (Citation("apple/coremltools", "docs-guides/source/stateful-models.md"),),
    ),
    Rule(
        "ST2",
        "error",
        "state without a static shape",
        "give the state a fixed shape; hide unused slots with a mask",
        _symbolic_state,
        "A",
        (Citation("apple/coremltools", "issue 2537"),),
        Scope("iOS 18 to 26"),
    ),
    Rule(
        "ST3",
        "warn",
        "slice_update that does not end in a state",
        "write the state and read it again, or write by mask: cache * (1 - mask) + mask @ new",
        _standalone_update,
        "C",
        (
            Citation("ANE compiler", 'message "Cannot support standalone slice_update"'),
            Citation("anemll-profile", "README"),
        ),
        Scope("iOS 18, coremltools 8.2 and newer"),
    ),
    Rule(
        "ST5",
        "warn",
        "slice_update with computed bounds",
        "write by mask: cache * (1 - mask) + mask @ new",
        _computed_update,
        "C",
        (Citation("apple/coreai-torch", "issue 6"),),
        contested="works in Core ML on an iPhone 17 Pro (john-rocky/CoreML-LLM, docs/MLSTATE_PATTERN.md)",
    ),
    Rule(
        "ST6",
        "warn",
        "more than two states written with slice_update",
        "write by mask, or keep one or two states per program",
        _many_sliced_states,
        "C",
        (_STATE_PATTERN,),
        Scope("iOS 26", "A19"),
        contested="40 states written by mask run on M4 Max (videlalvaro/ane-book, experiment 26)",
    ),
    Rule(
        "ST9",
        "warn",
        "cache longer than 2048 slots",
        "keep the cache short: decode cost grows with its length, whatever is in it",
        _long_cache,
        "C",
        (Citation("john-rocky/CoreML-LLM", "docs/DECODE_STATE_LAYOUTS.md"),),
        Scope(chips="M-series"),
    ),
)
