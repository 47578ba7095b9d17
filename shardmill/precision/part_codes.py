"""The codes of a part's matrices, written as a file, with what each form does to the matrix' outputs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shardmill.convert.codes import CODES, LUT, SCALE
from shardmill.convert.quantize import to_integers
from shardmill.forms.form import FP16, INT4, INT8, form, misfit
from shardmill.plan import Part
from shardmill.precision.calibration import read_edges
from shardmill.precision.matrices import Matrix, matrices
from shardmill.precision.original import Original
from shardmill.precision.palettes import Palettes, palettised
from shardmill.precision.quantisers import Codes, clipped, error, gptq
from shardmill.precision.spooled import write_spooled

ERRORS = "errors"


def write_part_codes(
    part: Part, source: Path, model: Original, edges: Path, to: Path, forms: Sequence[str] = ()
) -> None:
    """Writes codes of every matrix of a part, in INT4 and other forms.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        edges: the calibration's file.
        to: the file to write.
        forms: the others; INT8 has no codes of its own, and neither has fp16.
    """
    logging.getLogger("coremltools").setLevel(logging.WARNING)  # it tells of every matrix
    edge = read_edges(edges, part.start if part.kind == "layers" else model.layers)
    errors: dict[str, dict[str, float]] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for matrix in matrices(part, source, model, edge.seen, held=[]):
            found = {INT4: _chosen(matrix)} | _palettes(matrix, forms)
            for name, codes in found.items():
                stem = f"{matrix.path}.{name}"
                yield f"{stem}.{CODES}", codes.codes
                yield (f"{stem}.{SCALE}", codes.scale) if isinstance(codes, Codes) else (f"{stem}.{LUT}", codes.lut)
            if matrix.hessian is not None:
                values = _values(matrix, found, forms)
                errors[matrix.path] = {name: error(matrix.weight, each, matrix.hessian) for name, each in values}

    write_spooled(to, tensors(), lambda: {ERRORS: json.dumps(errors, sort_keys=True)})


def _chosen(matrix: Matrix) -> Codes:
    """By GPTQ, or by the weights alone where nothing is known of the inputs."""
    bits = form(INT4).bits
    return clipped(matrix.weight, bits) if matrix.hessian is None else gptq(matrix.weight, bits, matrix.hessian)


def _palettes(matrix: Matrix, forms: Sequence[str]) -> dict[str, Palettes]:
    """The matrix in those forms that are palettes and that it can have."""
    weigh = None if matrix.hessian is None else matrix.hessian.diagonal()
    fitting = [name for name in forms if form(name).kind == "palette" and not misfit(name, tuple(matrix.weight.shape))]
    return {name: palettised(matrix.weight, form(name), weigh) for name in fitting}


def _values(
    matrix: Matrix, found: Mapping[str, Codes | Palettes], forms: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """What the matrix is in each form that it can have, one after the other."""
    for name, codes in found.items():
        yield name, codes.values
    yield INT8, rounded(matrix.weight).values
    if FP16 in forms:
        yield FP16, matrix.weight.half().float()


def rounded(weight: Tensor) -> Codes:
    """INT8 as conversion rounds it."""
    codes, scale, _ = to_integers(weight, form(INT8).levels)
    return Codes(codes.to(torch.int8), scale)
