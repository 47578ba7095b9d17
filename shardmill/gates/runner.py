"""A part's program, run on rows pass by pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.gates.passes import Pass, filled_up
from shardmill.machine import is_portable
from shardmill.models.architecture import CLASSIFY
from shardmill.models.caches import CacheKind, cache_kind
from shardmill.models.contract import caches, lent_caches
from shardmill.models.part_kinds import PART_KINDS, interface, pass_inputs
from shardmill.plan import Part
from shardmill.runtime.kv import Floats, KVLayout
from shardmill.runtime.pack import apart, columns, encoder_arrays
from shardmill.runtime.program import HostCaches, Program, reused


def _gate_widths(part: Part, verify: int) -> tuple[int, ...]:
    """Return the widths at which a gate runs a part's program; empty if it may run at any width.

    The first pass of a width takes Core ML minutes. On Core ML a narrower pass is therefore padded, as a session pads
    it, and all widths that decoding uses are compared in the whole stack. A program of fixed widths pads by itself.
    """
    return () if is_portable() or part.spec.calls.functions or part.spec.encodes else (verify, part.spec.tokens)


class PartRunner:
    """A part of any kind, run by hand through MLModel.predict.

    The host's arrays of a pass are KVLayout's for a part of layers, and `encoder_arrays` for an encoder. Other parts
    take none.
    """

    def __init__(self, program: Path, part: Part, runtime: Mapping[str, Any]) -> None:
        """Store the arguments; the program is loaded at the first pass.

        Args:
            program: the compiled bundle.
            part: the part that was converted to the program.
            runtime: plan.json's content, or `of_drafter` of it, which has the parameters of the host's arrays.
        """
        self.program, self.part, self.runtime = program, part, runtime
        self.names = [name for name in pass_inputs(part.spec) if name not in caches(part.spec)]
        self.widths = _gate_widths(part, runtime["verify"])
        self.loaded = reused(self._load)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Return the lengths in slots of the contexts that the program has functions for, ascending.

        There is only one length if the functions accept any context.
        """
        return (*self.part.spec.calls.contexts, self.part.spec.slots)

    def _load(self) -> Program:
        """Load the program, in its shortest context if it has functions for several."""
        return Program(self.program, interface(self.part.spec), self.part.spec.slots)

    def run(self, rows: Mapping[str, Floats], passes: Iterable[Pass]) -> tuple[Floats, dict[str, Floats]]:
        """Run passes from empty states, in the whole context unless they name another.

        Args:
            rows: the inputs by name, each [n, channels], in the model's units.
            passes: these keep each of the n rows once, in order. In a pass of an encoder a text begins where its
                positions begin again.

        Returns:
            Outputs [n, channels], and by name the states' contents for the tokens. Of an encoder that classifies texts,
            the outputs have a row for each text.
        """
        if self.part.spec.encodes:
            return self._texts(rows, passes), {}
        layers, passes, pieces = bool(self.part.spec.layers), list(passes), []
        program, host, used = self.loaded(), KVLayout(self.runtime) if layers else None, passes[-1].positions[-1] + 1
        program.move(passes[0].slots or self.part.spec.slots, keep=False)
        program.renew()
        scale = self.part.spec.graph.stream_scale
        into, out_of = (np.float32(scale if scaled else 1) for scaled in PART_KINDS[self.part.kind].streams)
        room = self.part.spec.slots if layers else used + max(self.widths, default=0)
        lent = HostCaches({name: name for name in lent_caches(self.part.spec)}, self._lent(passes[0].slots))
        for p in filled_up(passes, self.widths, room):
            if host and p.slots:
                program.move(p.slots)
                host.resize(p.slots)
                lent.resize(self._lent(p.slots))
            inputs = host.arrays(p.places, p.positions) if host else {}
            taken = {name: values[list(p.tokens)] for name, values in rows.items()}  # each [T, channels]
            lent.write({name: _by_head(taken[name], shape) for name, shape in lent.shapes.items()}, inputs)
            inputs |= lent.arrays
            inputs |= {name: each.T[None, :, :, None] * into for name, each in taken.items() if name not in lent.shapes}
            result = program({name: inputs[name] for name in self.names})[0, :, :, 0].T  # [T, channels]
            pieces.append((result / out_of)[: p.kept])
        outputs = np.concatenate(pieces)
        # How rows lie in memory decides the last digit of sums over them, and so of a verdict's figures.
        left = self._states(program, host, used, passes[-1].offset) if host else {}
        return (np.ascontiguousarray(outputs) if layers else outputs), left

    def _texts(self, rows: Mapping[str, Floats], passes: Iterable[Pass]) -> Floats:
        """Run passes of an encoder, which keeps nothing; rows have the scale of the host's table, each [n, d]."""
        program, generator, outputs = self.loaded(), np.random.default_rng(0), list[Floats]()
        labels = len(self.runtime["labels"]) if self.part.spec.label_rows else None  # which only the last part has
        first = 1 if labels and self.runtime["task"] == CLASSIFY else None
        for p in passes:
            counts = [len(tokens) for tokens in p.texts]
            inputs = encoder_arrays(self.runtime, self.part.spec.tokens, counts)
            for name, each in rows.items():
                inputs[name] = columns([each[list(tokens)] for tokens in p.texts], self.part.spec.tokens)
                rest = inputs[name][:, :, sum(counts) :]
                rest[:] = p.noise * generator.standard_normal(rest.shape)
            out = program({name: inputs[name] for name in self.names})
            outputs += [of_text[:first] for of_text in apart(out[0, :labels, :, 0].T, counts)]
        return np.concatenate(outputs)

    def _lent(self, slots: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the lent caches that the part reads, in a context of some slots; 0 for the whole."""
        return lent_caches(replace(self.part.spec, slots=slots or self.part.spec.slots))

    def _states(self, program: Program, host: KVLayout, used: int, offset: int) -> dict[str, Floats]:
        """Return the states' contents for the first `used` positions; a ring contains only the last positions.

        The state of a recurrence is left out. The passes decide how far it is folded, and its content shows in
        the outputs.
        """
        contents, g = {}, self.part.spec.graph
        taps = g.recurrence.taps if g.recurrence else g.conv_taps
        for name in caches(self.part.spec):
            kind = cache_kind(name)
            if kind is CacheKind.STATE:
                continue
            values = program.kept(name)
            if kind is CacheKind.RING:
                contents[name] = values[0, 0][:, host.ring_slots(range(max(used - taps + 1, 0), used))].T
            elif (slots := values.shape[2]) == self.runtime["window_slots"]:
                contents[name] = values[0][:, np.arange(max(used - self.runtime["window"] + 1, 0), used) % slots]
            else:
                contents[name] = values[0, :, offset : offset + used]
        return contents


def _by_head(rows: Floats, shape: tuple[int, ...]) -> Floats:
    """Return rows [T, heads * head_dim] of a cache of this shape as a program returns them, [1, heads, T, head_dim]."""
    return rows.reshape(len(rows), shape[1], shape[3]).swapaxes(0, 1)[None]
