"""How a program takes the tokens of a pass, and who keeps what it remembers of earlier ones."""

from __future__ import annotations

from dataclasses import dataclass

RANGE, FIXED, ENUMERATED = "range", "fixed", "enumerated"
GRAPH, HOST = "graph", "host"
MAIN = "main"  # what coremltools calls the only function of a program


@dataclass(frozen=True)
class Calls:
    """The form of a program.

    Attributes:
        shapes: RANGE for one function that takes 1 to so many tokens; FIXED for one function for each of `widths`;
            ENUMERATED for one function that takes any of `widths`.
        widths: the tokens that passes may carry, ascending; of a RANGE nothing depends on them, and there are none.
        state: GRAPH where the program has states, HOST where the host gives it what they would hold.
    """

    shapes: str = RANGE
    widths: tuple[int, ...] = ()
    state: str = GRAPH

    @property
    def functions(self) -> dict[int, str]:
        """The function that takes a pass, by the pass' width, "" for the only one; empty where that takes all."""
        return {width: f"t{width}" if self.shapes == FIXED else "" for width in self.widths}

    @property
    def named(self) -> dict[str, str]:
        """The same as JSON has it."""
        return {str(width): name for width, name in self.functions.items()}


def calls(shapes: str, state: str, widths: tuple[int, ...]) -> Calls:
    """The form with these shapes of programs that passes of these widths go through."""
    return Calls(shapes, () if shapes == RANGE else widths, state)
