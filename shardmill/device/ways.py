"""The ways to cut a model into programs, none of them built, by what passes are foreseen to take.

Costs are fitted to what was measured of other builds on a system (forecast.py). What comes out is a forecast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from shardmill.config import Config
from shardmill.device.forecast import Costs, Work, costs_by_system
from shardmill.errors import ConfigError
from shardmill.pipeline.preview import Preview, preview

PARTS = (1, 2, 3, 4, 6, 8, 12, 16)  # programs of layers
SLICES = (1, 2, 4, 8, 16)  # of the LM head
WIDTHS = (1, 2, 4, 8)  # tokens of a decode pass


@dataclass(frozen=True)
class Way:
    """One way.

    Attributes:
        topology: the layers of each part.
        slices: of the LM head.
        programs: that a pass calls.
        largest: bytes of the largest weight file.
        ms: foreseen of a pass, by its width.
    """

    topology: tuple[tuple[int, int], ...]
    slices: int
    programs: int
    largest: int
    ms: dict[int, float]

    def pays_from(self, width: int) -> float:
        """Tokens that a pass of a width has to yield before it is worth more than single ones."""
        return self.ms[width] / self.ms[1]


def ways(config: Config, builds: Sequence[Path]) -> dict[str, list[Way]]:
    """For each system that the builds were measured on, the ways that a program may be cut, the fastest first.

    Args:
        config: of a decoder; its own topology and head slices are among the ways.
        builds: folders of finished builds.

    Raises:
        ConfigError: the config is an encoder's, routes to experts, or can't be built at all.
        ShardmillError: a folder holds no finished build, or every system was measured too little.
    """
    own = preview(config)
    if own.buckets:
        raise ConfigError(f"{config.model}: an encoder has a program for each bucket, and no cuts to choose")
    if own.expert_groups:
        raise ConfigError(
            f"{config.model}: its tokens decide which groups of experts a pass calls, so no cut has a time of its own; "
            "`shardmill plan` says what to expect of them, and `experts: dense` has ways"
        )
    fitting = list(_fitting(config, own))
    return {
        system: sorted((_way(found, costs) for found in fitting), key=lambda way: (way.ms[1], way.programs))
        for system, costs in costs_by_system(builds).items()
    }


def _fitting(config: Config, own: Preview) -> Iterator[Preview]:
    """What would be built of each cut whose programs may be as large as they are."""
    layers = own.topology[-1][1]
    topologies = dict.fromkeys([own.topology, *(_even(layers, parts) for parts in PARTS if parts <= layers)])
    for topology in topologies:
        for slices in sorted({own.head_slices, *SLICES}):
            cut = replace(config, topology=topology, head=replace(config.head, slices=slices))
            try:
                found = preview(cut)
            except ConfigError:  # a head of fewer rows, say
                continue
            if max(program.weight_bytes for program in found.programs) <= found.weight_file_limit:
                yield found


def _even(layers: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Ranges of layers, as alike as can be."""
    return tuple(pairwise(index * layers // parts for index in range(parts + 1)))


def _way(found: Preview, costs: Costs) -> Way:
    numbers = sum(program.parameters for program in found.programs)
    ms = {}
    for width in WIDTHS:
        operations = 2.0 * width * (numbers + found.state_bytes / 2)
        ms[width] = costs.ms(Work(found.bytes_per_token, operations, len(found.programs)))
    largest = max(program.weight_bytes for program in found.programs)
    return Way(found.topology, found.head_slices, len(found.programs), largest, ms)
