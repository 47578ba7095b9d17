"""How far a forecast of three numbers comes: on passes made up with noise, and on what others have published.

    python benchmarks/forecast.py

The first table fits passes that are made up from known costs with 5 % of noise, and shows what is found again. The
second takes passes that were published with enough about them to count their work: bytes and operations from the
model's shape, programs as published. They are of several chips and toolchains, so three numbers can't fit them all;
each row is shown with the error of the fit to all rows, and of the fit to all others. Nothing here was measured by this
project, and no forecast is a measurement.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.device.forecast import Costs, Work, fitted

GB, MB = 1e9, 1e6


@dataclass(frozen=True)
class Published:
    """A pass that somebody measured.

    Attributes:
        what: model, precision, chip, width.
        source: where it was published.
        ms: of the pass, from tokens a second where those were published.
        weights, states: bytes that are read.
        parameters: of the matrices that are multiplied with.
        width: tokens of the pass.
        dispatches: programs.
    """

    what: str
    source: str
    ms: float
    weights: float
    states: float
    parameters: float
    width: int
    dispatches: int

    @property
    def work(self) -> Work:
        """What the pass does."""
        operations = 2 * self.width * (self.parameters + self.states / 2)
        return Work(self.weights + self.states, operations, self.dispatches)


# Phi-4-mini: 32 layers of 100.8 MB and a head of 614.6 MB in INT8. The context of the published runs is not known, so
# states are left out. Qwen3-4B: 36 layers with 8 key/value heads of 128 at a context of 1,024.
PHI_LAYERS, PHI_HEAD = 32 * 100.8 * MB, 614.6 * MB
PHI = PHI_LAYERS + PHI_HEAD
QWEN_STATES = 36 * 2 * 8 * 128 * 1024 * 2
EXP_26, JOURNAL = "ane-book experiment 26", "ane-book journal 073"
PUBLISHED = (
    Published("Phi-4-mini INT8, M4 Max, T=1, 3 head slices", EXP_26, 1e3 / 16.7, PHI, 0, 3.84e9, 1, 7),
    Published("Phi-4-mini INT8, M4 Max, T=1, 4 head slices", JOURNAL, 1e3 / 17.2, PHI, 0, 3.84e9, 1, 8),
    Published("Phi-4-mini INT8, M4 Max, T=4, prefill", EXP_26, 4e3 / 68.7, PHI_LAYERS, 0, 3.23e9, 4, 4),
    Published("Qwen3-4B fp16, M5 Pro, T=1", "cadamcat", 1e3 / 14.56, 8.04 * GB, QWEN_STATES, 4.02e9, 1, 1),
    Published("Qwen3-0.6B fp16, T=128, prefill", "mobius PR 77", 12.5, 0.88 * GB, 0, 0.44e9, 128, 1),
    Published("Qwen3-8B fp16, T=1, 9 programs", "ANEForge PR 49", 1e3 / 7.5, 16 * GB, 0, 8.0e9, 1, 9),
)


def made_up(costs: Costs, noise: float, seed: int) -> list[tuple[Work, float]]:
    """Passes of models of several sizes, widths and cuts, by known costs and with noise."""
    chance = np.random.default_rng(seed)
    found = []
    for parameters in (0.3e9, 1e9, 4e9):
        for width in (1, 4, 64):
            for programs in (1, 8, 60):
                work = Work(parameters, 2 * width * parameters, programs)
                found.append((work, costs.ms(work) * float(chance.normal(1, noise))))
    return found


def told(costs: Costs) -> str:
    """The numbers as people know them."""
    bandwidth = f"{1e-6 / costs.byte:.0f} GB/s" if costs.byte else "bytes cost nothing"
    throughput = f"{1e-9 / costs.operation:.1f} TOPS" if costs.operation else "operations cost nothing"
    return f"{bandwidth}, {throughput}, {costs.dispatch:.3f} ms a dispatch"


def main() -> None:
    """Prints both tables."""
    truth = Costs(byte=1e3 / (65 * GB), operation=1e3 / 9e12, dispatch=0.4)
    for noise in (0.0, 0.05):
        passes = made_up(truth, noise, seed=14)
        found = fitted(passes)
        errors = [abs(found.ms(work) / ms - 1) for work, ms in passes]
        print(f"made up, {noise:.0%} noise: {told(truth)}; found {told(found)}; worst error {max(errors):.1%}")
    everything = fitted([(row.work, row.ms) for row in PUBLISHED])
    print(f"\npublished, all chips together: {told(everything)}\n")
    print("| pass | source | published ms | fit to all | error | fit to the others | error |")
    print("|---|---|---|---|---|---|---|")
    for row in PUBLISHED:
        others = fitted([(other.work, other.ms) for other in PUBLISHED if other is not row])
        both = [costs.ms(row.work) for costs in (everything, others)]
        cells = " | ".join(f"{ms:.1f} | {ms / row.ms - 1:+.0%}" for ms in both)
        print(f"| {row.what} | {row.source} | {row.ms:.1f} | {cells} |")


if __name__ == "__main__":
    main()
