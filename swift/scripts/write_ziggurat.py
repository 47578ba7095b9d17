"""Write Ziggurat.swift: the layers of the ziggurat for exponential variables, computed from their definition.

    python swift/scripts/write_ziggurat.py > swift/Sources/Decode/Ziggurat.swift

The 256 layers under exp(-x) have equal areas: the tail begins at x_255 = r, and exp(-x_(i-1)) = exp(-x_i) + area / x_i,
so that the top layer ends at 1 (Marsaglia and Tsang, "The ziggurat method for generating random variables", 2000).
Doubles would drift by a rounding per layer, so this is computed with 50 digits.
"""

from __future__ import annotations

from decimal import Decimal, getcontext

getcontext().prec = 50
LAYERS = 256


def edges(tail: Decimal) -> tuple[Decimal, list[Decimal]]:
    """Return the area of a layer, and x_1 to x_255, for a ziggurat whose tail begins at `tail`."""
    area = (tail + 1) * (-tail).exp()
    found = [tail]
    while len(found) < LAYERS - 1:
        found.append(-((-found[-1]).exp() + area / found[-1]).ln())
    return area, found[::-1]


def excess(tail: Decimal) -> Decimal:
    """Return by how much the top layer ends above 1."""
    area, found = edges(tail)
    return (-found[0]).exp() + area / found[0] - 1


def tail() -> Decimal:
    """Return where the tail begins, by the secant method."""
    low, high = Decimal("7.6971"), Decimal("7.6972")
    while abs(high - low) > Decimal("1e-35"):
        slope = (excess(high) - excess(low)) / (high - low)
        low, high = high, high - excess(high) / slope
    return high


def main() -> None:
    """Print the Swift file."""
    area, found = edges(tail())
    base = area / (-found[-1]).exp()
    numbers = [float(number).hex() for number in (base, *found)]
    print("// Written by swift/scripts/write_ziggurat.py, which explains the numbers.\n\nimport Foundation\n")
    print("/// The layers of the ziggurat for exponential variables, for 53-bit integers.")
    print("enum Ziggurat {")
    print("    /// The right edge of each layer; layer 0 is the base, whose tail begins at the last edge.")
    print("    private static let edges: [Double] = [")
    for start in range(0, LAYERS, 4):
        print("        " + " ".join(f"{number}," for number in numbers[start : start + 4]))
    print("    ]")
    print("    static let tail = edges[255]")
    print("    /// The factor of a layer's integers.")
    print("    static let widths = edges.map { $0 * 0x1p-53 }")
    print("    /// Integers below this lie inside the layer above too.")
    print("    static let inside = edges.indices.map { i in")
    print("        i == 1 ? 0 : UInt64((i == 0 ? tail / edges[0] : edges[i - 1] / edges[i]) * 0x1p53)")
    print("    }")
    print("    /// The function at each edge.")
    print("    static let heights = edges.indices.map { $0 == 0 ? 1 : exp(-edges[$0]) }")
    print("}")


if __name__ == "__main__":
    main()
