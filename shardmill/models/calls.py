"""How a program takes the tokens of a pass, and who keeps what it remembers of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

RANGE, FIXED, ENUMERATED = "range", "fixed", "enumerated"
GRAPH, HOST = "graph", "host"
ONE, EACH = "one", "each"  # compiled bundles: of a program, or of each of its functions
INFREQUENT, FREQUENT = "infrequent", "frequent"  # how often shapes change, as coremltools' ReshapeFrequency has it
BUNDLE = ".mlmodelc"
MAIN = "main"  # what coremltools calls the only function of a program


@dataclass(frozen=True)
class Calls:
    """The form of a program.

    Attributes:
        shapes: RANGE for one function that takes 1 to so many tokens; FIXED for one function for each of `widths`;
            ENUMERATED for one function that takes any of `widths`.
        widths: the tokens that passes may carry, ascending; of a RANGE nothing depends on them, and there are none.
        state: GRAPH where the program has states, HOST where the host gives it what they would hold.
        contexts: of a FIXED, numbers of key/value slots, ascending, for each of which it has functions beside those for
            the whole context.
    """

    shapes: str = RANGE
    widths: tuple[int, ...] = ()
    state: str = GRAPH
    contexts: tuple[int, ...] = ()

    @property
    def functions(self) -> dict[int, str]:
        """The function that takes a pass, by the pass' width, "" for the only one; empty where that takes all."""
        return {width: f"t{width}" if self.shapes == FIXED else "" for width in self.widths}

    @property
    def shorter(self) -> dict[int, dict[int, str]]:
        """The functions of each of `contexts`, by the pass' width."""
        return {slots: {width: f"c{slots}_t{width}" for width in self.widths} for slots in self.contexts}

    @property
    def by_name(self) -> dict[str, int]:
        """The width of each function, at any length; none where the program has one only."""
        of_each = (self.functions, *self.shorter.values())
        return {name: width for names in of_each for width, name in names.items() if name}

    @property
    def named(self) -> dict[str, str]:
        """The same as JSON has it."""
        return {str(width): name for width, name in self.functions.items()}


def calls(shapes: str, state: str, widths: tuple[int, ...], contexts: tuple[int, ...] = ()) -> Calls:
    """The form with these shapes of programs that passes of these widths go through, at shorter contexts too."""
    return Calls(shapes, () if shapes == RANGE else widths, state, contexts)


def own_bundle(program: Path, function: str) -> Path:
    """Where the bundle of a function lies, if it has one of its own: then the program is a folder of such."""
    return program / f"{function}{BUNDLE}"
