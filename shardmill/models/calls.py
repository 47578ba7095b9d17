"""How a program takes the tokens of a pass: any number up to a bound, or one of a few."""

from __future__ import annotations

from dataclasses import dataclass

RANGE, FIXED = "range", "fixed"
MAIN = "main"  # what coremltools calls the only function of a program


@dataclass(frozen=True)
class Calls:
    """The form of a program's token axis.

    Attributes:
        shapes: RANGE for one function that takes 1 to so many tokens; FIXED for one function for each of `widths`.
        widths: the tokens that passes may carry, ascending; of a RANGE nothing depends on them, and there are none.
    """

    shapes: str = RANGE
    widths: tuple[int, ...] = ()

    @property
    def functions(self) -> dict[int, str]:
        """The function that takes a pass, by the pass' width; empty where one takes all."""
        return {width: _function_name(width) for width in self.widths}

    @property
    def named(self) -> dict[str, str]:
        """The same as JSON has it."""
        return {str(width): name for width, name in self.functions.items()}


def _function_name(width: int) -> str:
    """What the function for passes of a width is called."""
    return f"t{width}"


def calls(shapes: str, widths: tuple[int, ...]) -> Calls:
    """The form with these shapes of programs that passes of these widths go through."""
    return Calls() if shapes == RANGE else Calls(shapes, widths)
