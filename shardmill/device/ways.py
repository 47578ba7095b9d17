"""Compares ways to divide a model into programs, without building them, by the forecast time of passes.

Costs are fitted to measurements of other builds on a system (forecast.py). The result is a forecast.
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

PARTS = (1, 2, 3, 4, 6, 8, 12, 16)  # numbers of programs of layers
SLICES = (1, 2, 4, 8, 16)  # numbers of slices of the LM head
WIDTHS = (1, 2, 4, 8)  # tokens of a decode pass


@dataclass(frozen=True)
class Way:
    """One way to divide a model.

    Attributes:
        topology: the layers of each part.
        slices: number of slices of the LM head.
        programs: number of programs that a pass calls.
        largest: bytes of the largest weight file.
        ms: forecast milliseconds of a pass, by width.
    """

    topology: tuple[tuple[int, int], ...]
    slices: int
    programs: int
    largest: int
    ms: dict[int, float]

    def pays_from(self, width: int) -> float:
        """Return how many tokens a pass of a width must yield to be worth more than single-token passes."""
        return self.ms[width] / self.ms[1]


def ways(config: Config, builds: Sequence[Path]) -> dict[str, list[Way]]:
    """Return the ways to divide a model for each system on which the builds were measured, the fastest first.

    Args:
        config: a decoder's config; its own topology and head slices are among the ways.
        builds: folders of finished builds.

    Raises:
        ConfigError: the config is an encoder's, routes to experts, or can't be built at all.
        ShardmillError: a folder is not a finished build, or every system has too few measurements.
    """
    own = preview(config)
    if own.buckets:
        raise ConfigError(f"{config.model}: an encoder has a program for each bucket, and no cuts to choose")
    if own.expert_groups:
        raise ConfigError(
            f"{config.model}: its tokens decide which groups of experts a pass calls, so no cut has a fixed time; "
            "see `shardmill plan` for the expected calls, or set `experts: dense`"
        )
    fitting = list(_fitting(config, own))
    return {
        system: sorted((_way(found, costs) for found in fitting), key=lambda way: (way.ms[1], way.programs))
        for system, costs in costs_by_system(builds).items()
    }


def _fitting(config: Config, own: Preview) -> Iterator[Preview]:
    """Yield the preview of each division whose programs are within the weight file limit."""
    layers = own.topology[-1][1]
    topologies = dict.fromkeys([own.topology, *(_even(layers, parts) for parts in PARTS if parts <= layers)])
    for topology in topologies:
        for slices in sorted({own.head_slices, *SLICES}):
            cut = replace(config, topology=topology, head=replace(config.head, slices=slices))
            try:
                found = preview(cut)
            except ConfigError:  # for example a head with fewer rows than slices
                continue
            if max(program.weight_bytes for program in found.programs) <= found.weight_file_limit:
                yield found


def _even(layers: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return ranges of layers of almost equal length."""
    return tuple(pairwise(index * layers // parts for index in range(parts + 1)))


def _way(found: Preview, costs: Costs) -> Way:
    numbers = sum(program.parameters for program in found.programs)
    ms = {}
    for width in WIDTHS:
        operations = 2.0 * width * (numbers + found.state_bytes / 2)
        ms[width] = costs.ms(Work(found.bytes_per_token, operations, len(found.programs)))
    largest = max(program.weight_bytes for program in found.programs)
    return Way(found.topology, found.head_slices, len(found.programs), largest, ms)
