"""What the matrices of a part cost one by one in four bits, by the codes that were chosen for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from shardmill.files import parse_json
from shardmill.forms.form import INT4
from shardmill.plan import Part
from shardmill.precision.calibration import read_edges
from shardmill.precision.matrices import matrices
from shardmill.precision.original import Original
from shardmill.precision.part_codes import ERRORS
from shardmill.precision.quantisers import Codes
from shardmill.precision.sensitivity import Costs, as_stored


def part_costs(part: Part, source: Path, model: Original, edges: Path, codes: Path) -> dict[str, Any]:
    """{path: {"kl": nats, "errors": {form: share}}} of every matrix whose inputs calibration has seen.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        edges: the calibration's file.
        codes: the part's file of codes.
    """
    if part.kind == "experts":
        return {}
    index = part.start if part.kind == "layers" else model.layers
    edge = read_edges(edges, index)
    costs, found = Costs(model, edge.held, index), dict[str, Any]()
    with safe_open(codes, framework="pt") as stored:
        errors = parse_json(stored.metadata()[ERRORS])
        for matrix in matrices(part, source, model, [], edge.held):
            if matrix.path not in errors:
                continue
            name = f"{matrix.path}.{INT4}"
            values = Codes(stored.get_tensor(f"{name}.codes"), stored.get_tensor(f"{name}.scale")).values
            if part.kind == "head":
                kl = costs.of_head(matrix.before, part.start, values)
            else:
                kl = costs.of_layer(matrix.before, matrix.index, as_stored(matrix.blocks, values, source))
            found[matrix.path] = {"kl": kl, "errors": errors[matrix.path]}
    return found
