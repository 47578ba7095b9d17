"""How a program is called, and the names that plan.json and model.json have for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RANGE, FIXED, ENUMERATED = "range", "fixed", "enumerated"
GRAPH, HOST = "graph", "host"
ONE, EACH = "one", "each"  # compiled bundles: of a program, or of each of its functions
NATIVE, TANH = "native", "tanh"  # how programs compute SiLU
INFREQUENT, FREQUENT = "infrequent", "frequent"  # how often shapes change, as coremltools' ReshapeFrequency has it
BUNDLE = ".mlmodelc"
ASSISTANT = "assistant"  # the drafter that reads the model's caches
MTP = "mtp"  # the drafter that is a layer in the model's own checkpoint, and the kind of its first program
DRAFT_PARTS = ("draft_fuse", "draft_layers", "draft_head")  # of a drafter, in the order in which a draft runs them
LABELS = "labels"  # the name and the kind of the part with the labels' rows of the LM head
TOWER = "tower"  # the kind of a tower's parts; a name has an underscore and the patches of its bucket after it
MAIN = "main"  # what coremltools calls the only function of a program


@dataclass(frozen=True)
class EntryPoints:
    """The form of a program.

    Attributes:
        shapes: RANGE is one function that takes any number of tokens up to a limit. FIXED is one function for each of
            `widths`. ENUMERATED is one function that takes any of `widths`.
        widths: the numbers of tokens that a pass may carry, ascending; empty for RANGE, which does not depend on them.
        state: GRAPH if the program has states, HOST if the host passes the states' content as inputs.
        contexts: for FIXED, numbers of key/value slots, ascending. The program has functions for each of these numbers
            beside the functions for the whole context.
        adapters: the rank of adapters that parts of layers take as inputs; 0 if they take none.
    """

    shapes: str = RANGE
    widths: tuple[int, ...] = ()
    state: str = GRAPH
    contexts: tuple[int, ...] = ()
    adapters: int = 0

    @property
    def functions(self) -> dict[int, str]:
        """Return the name of the function for each width of a pass, "" for the only function.

        Empty for RANGE, whose only function takes every width.
        """
        return {width: f"t{width}" if self.shapes == FIXED else "" for width in self.widths}

    @property
    def shorter(self) -> dict[int, dict[int, str]]:
        """Return the functions of each of `contexts`, by the pass' width."""
        return {slots: {width: f"c{slots}_t{width}" for width in self.widths} for slots in self.contexts}

    @property
    def by_name(self) -> dict[str, int]:
        """Return the width of each function, at any context; empty if the program has only one function."""
        of_each = (self.functions, *self.shorter.values())
        return {name: width for names in of_each for width, name in names.items() if name}

    @property
    def named(self) -> dict[str, str]:
        """Return `functions` with the widths as strings, as JSON has them."""
        return {str(width): name for width, name in self.functions.items()}


def own_bundle(program: Path, function: str) -> Path:
    """Return where the bundle of a function lies if each function has a bundle: the program is a folder of bundles."""
    return program / f"{function}{BUNDLE}"


def is_apart(part: str) -> bool:
    """Return whether a pass of the model leaves out the part of this name."""
    return part in (LABELS, *DRAFT_PARTS) or part.startswith(f"{TOWER}_")
