"""The codes of a part's matrices, written as a file, with what each form does to the matrix' outputs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from shardmill.convert.quantize import to_integers
from shardmill.forms.form import INT4, INT8, form
from shardmill.plan import Part
from shardmill.precision.calibration import read_edges
from shardmill.precision.matrices import Matrix, matrices
from shardmill.precision.original import Original
from shardmill.precision.quantisers import Codes, clipped, error, gptq

ERRORS = "errors"


def write_part_codes(part: Part, source: Path, model: Original, edges: Path, to: Path) -> None:
    """Writes INT4 codes of every matrix of a part.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        edges: the calibration's file.
        to: the file to write.
    """
    logging.getLogger("coremltools").setLevel(logging.WARNING)  # it tells of every matrix
    edge = read_edges(edges, part.start if part.kind == "layers" else model.layers)
    tensors: dict[str, Tensor] = {}
    errors: dict[str, dict[str, float]] = {}
    for matrix in matrices(part, source, model, edge.seen, held=[]):
        codes = _chosen(matrix)
        name = f"{matrix.path}.{INT4}"
        tensors |= {f"{name}.codes": codes.codes, f"{name}.scale": codes.scale}
        if matrix.hessian is not None:
            found = {INT4: codes, INT8: rounded(matrix.weight)}
            errors[matrix.path] = {form: error(matrix.weight, each, matrix.hessian) for form, each in found.items()}
    save_file(dict(sorted(tensors.items())), to, {ERRORS: json.dumps(errors, sort_keys=True)})


def _chosen(matrix: Matrix) -> Codes:
    """By GPTQ, or by the weights alone where nothing is known of the inputs."""
    bits = form(INT4).bits
    return clipped(matrix.weight, bits) if matrix.hessian is None else gptq(matrix.weight, bits, matrix.hessian)


def rounded(weight: Tensor) -> Codes:
    """INT8 as conversion rounds it."""
    codes, scale, _ = to_integers(weight, form(INT8).levels)
    return Codes(codes.to(torch.int8), scale)
