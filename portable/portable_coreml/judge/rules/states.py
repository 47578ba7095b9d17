"""Rules on states and how they are written."""

from __future__ import annotations

from collections.abc import Iterator

from portable_coreml.judge.rule import Breach, Subject, label, rule

_FIRST_STATEFUL_SPEC = 9  # iOS 18, macOS 15
_MANY_STATES = 2
_LONG_CACHE = 2048
_STATE_PATTERN = "john-rocky/CoreML-LLM, docs/MLSTATE_PATTERN.md"


@rule(
    "ST1",
    "error",
    "A",
    "states before iOS 18",
    "convert with minimum_deployment_target=ct.target.iOS18 or newer",
    "apple/coremltools, docs-guides/source/stateful-models.md",
)
def _too_old(subject: Subject) -> Iterator[Breach]:
    if subject.states and subject.spec_version < _FIRST_STATEFUL_SPEC:
        yield Breach("", f"the model has states at specification version {subject.spec_version}")


@rule(
    "ST2",
    "error",
    "A",
    "state without a static shape",
    "give the state a fixed shape; hide unused slots with a mask",
    "apple/coremltools, issue 2537",
    systems="iOS 18 to 26",
)
def _symbolic_state(subject: Subject) -> Iterator[Breach]:
    for name, kind in subject.states.items():
        if None in kind.shape or kind.variadic:
            yield Breach("", f"state '{name}' has an unknown extent")


@rule(
    "ST3",
    "warn",
    "C",
    "slice_update that does not end in a state",
    "write the state and read it again, or write by mask: cache * (1 - mask) + mask @ new",
    'ANE compiler, message "Cannot support standalone slice_update"',
    "anemll-profile, README",
    systems="iOS 18, coremltools 8.2 and newer",
)
def _standalone_update(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        if op.kind != "slice_update":
            continue
        readers = subject.consumers.get(label(op), ())
        if not readers or any(r.kind not in ("write_state", "coreml_update_state") for r in readers):
            yield Breach(label(op), "its result goes elsewhere than to a state")


@rule(
    "ST5",
    "warn",
    "C",
    "slice_update with computed bounds",
    "write by mask: cache * (1 - mask) + mask @ new",
    "apple/coreai-torch, issue 6",
    contested="works in Core ML on an iPhone 17 Pro (john-rocky/CoreML-LLM, docs/MLSTATE_PATTERN.md)",
)
def _computed_update(subject: Subject) -> Iterator[Breach]:
    for op in subject.runtime_ops:
        bounds = [*op.inputs.get("begin", ()), *op.inputs.get("end", ())] if op.kind == "slice_update" else []
        if any(isinstance(name, str) and not subject.is_constant(name) for name in bounds):
            yield Breach(label(op), "its begin or end is computed at run time")


@rule(
    "ST6",
    "warn",
    "C",
    "more than two states written with slice_update",
    "write by mask, or keep one or two states per program",
    _STATE_PATTERN,
    systems="iOS 26",
    chips="A19",
    contested="40 states written by mask run on M4 Max (videlalvaro/ane-book, experiment 26)",
)
def _many_sliced_states(subject: Subject) -> Iterator[Breach]:
    if len(subject.states) > _MANY_STATES and any(op.kind == "slice_update" for op in subject.runtime_ops):
        yield Breach("", f"{len(subject.states)} states, written with slice_update")


@rule(
    "ST9",
    "warn",
    "C",
    "cache longer than 2048 slots",
    "keep the cache short: decode cost grows with its length, whatever is in it",
    "john-rocky/CoreML-LLM, docs/DECODE_STATE_LAYOUTS.md",
    chips="M-series",
)
def _long_cache(subject: Subject) -> Iterator[Breach]:
    for name, kind in subject.states.items():
        if any(n is not None and n > _LONG_CACHE for n in kind.shape[-2:-1]):
            yield Breach("", f"state '{name}' holds {kind.shape[-2]} slots")
