"""The codes of a part's matrices, written to a file, with the error of each form in the matrix' outputs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from shardmill.checkpoint.headers import header_bytes
from shardmill.convert.codes import CODES, LUT, SCALE
from shardmill.convert.palette import to_integers
from shardmill.convert.weights import PartWeights
from shardmill.errors import GateError
from shardmill.forms.form import FP16, INT4, INT8, MATRIX, form, misfit
from shardmill.gates.stored import Stored, StoredWeights
from shardmill.plan import Part
from shardmill.precision.calibration import Matrix, calibrated_matrices, read_edges
from shardmill.precision.original import Original
from shardmill.precision.quantisers import Palettes, QuantizedMatrix, clipped, error, gptq, palettised

DTYPES = {torch.float16: "F16", torch.int8: "I8", torch.uint8: "U8"}  # in the order in which safetensors sorts them
PIECE = 1 << 24  # bytes


def write_spooled(to: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Callable[[], Mapping[str, str]]) -> None:
    """Write the same file as safetensors' save_file, byte for byte.

    Args:
        to: the file. Its folder needs room for a second copy while the file is written.
        tensors: by name, in any order, in fp16, int8 or uint8.
        metadata: called after the last tensor; returns one entry, as safetensors does not keep the order of several.
    """
    with TemporaryFile(dir=to.parent) as spool, to.open("wb") as file:
        spooled: dict[str, tuple[Tensor, int]] = {}  # name -> its shape and dtype, its place in the spool
        for name, tensor in tensors:
            spooled[name] = tensor.to("meta"), spool.tell()
            spool.write(tensor.contiguous().numpy().data)
        kinds = list(DTYPES)
        entries, end = dict[str, Any](__metadata__=dict(metadata())), 0
        for name, (form, _) in sorted(spooled.items(), key=lambda item: (kinds.index(item[1][0].dtype), item[0])):
            start, end = end, end + form.nbytes
            entries[name] = {"dtype": DTYPES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
        file.write(header_bytes(entries))
        for name in [name for name in entries if name in spooled]:
            form, place = spooled[name]
            spool.seek(place)
            for start in range(0, form.nbytes, PIECE):
                file.write(spool.read(min(PIECE, form.nbytes - start)))


ERRORS = "errors"


def write_part_codes(
    part: Part, source: Path, model: Original, edges: Path, to: Path, forms: Sequence[str] = ()
) -> None:
    """Write the codes of every matrix of a part in INT4 and other forms.

    Args:
        part: layers or a head.
        source: the checkpoint's folder.
        model: the original.
        edges: the calibration's file.
        to: the file to write.
        forms: the other forms; no codes are written for INT8 and fp16.
    """
    logging.getLogger("coremltools").setLevel(logging.WARNING)  # it logs every matrix
    edge = read_edges(edges, part.edges(model.layers)[0])
    errors: dict[str, dict[str, float]] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for matrix in calibrated_matrices(part, source, model, edge.seen, held_out=[]):
            quantised = {INT4: _chosen(matrix)} | _palettes(matrix, forms)
            for name, codes in quantised.items():
                stem = f"{matrix.path}.{name}"
                yield f"{stem}.{CODES}", codes.codes
                yield (
                    (f"{stem}.{SCALE}", codes.scale)
                    if isinstance(codes, QuantizedMatrix)
                    else (f"{stem}.{LUT}", codes.lut)
                )
            if matrix.hessian is not None:
                values = _values(matrix, quantised, forms)
                errors[matrix.path] = {name: error(matrix.weight, each, matrix.hessian) for name, each in values}

    write_spooled(to, tensors(), lambda: {ERRORS: json.dumps(errors, sort_keys=True)})


def _chosen(matrix: Matrix) -> QuantizedMatrix:
    """Quantise by GPTQ, or by the weights alone if calibration has not seen the inputs."""
    bits = form(INT4).bits
    return clipped(matrix.weight, bits) if matrix.hessian is None else gptq(matrix.weight, bits, matrix.hessian)


def _palettes(matrix: Matrix, forms: Sequence[str]) -> dict[str, Palettes]:
    """Return the matrix in each palette form that fits it."""
    weigh = None if matrix.hessian is None else matrix.hessian.diagonal()
    fitting = [name for name in forms if form(name).kind == "palette" and not misfit(name, tuple(matrix.weight.shape))]
    return {name: palettised(matrix.weight, form(name), weigh) for name in fitting}


def _values(
    matrix: Matrix, quantised: Mapping[str, QuantizedMatrix | Palettes], forms: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrix' values in each form that fits it, one form at a time."""
    for name, codes in quantised.items():
        yield name, codes.values
    yield INT8, rounded(matrix.weight).values
    if FP16 in forms:
        yield FP16, matrix.weight.half().float()


def rounded(weight: Tensor) -> QuantizedMatrix:
    """Round a matrix to INT8 in the same way as the conversion."""
    codes, scale, _ = to_integers(weight, form(INT8).levels)
    return QuantizedMatrix(codes.to(torch.int8), scale)


DEFAULT = "int8"  # form of matrices for which a search does not choose a form


class FormWeights(StoredWeights):
    """A part's constants in chosen forms: from its file of codes, or rounded if the file has no codes, as for INT8."""

    def __init__(self, part: Part, source: Path, codes: Path, forms: Mapping[str, str], prefix: str) -> None:
        """Keep the arguments; no file is opened yet.

        Args:
            part: the part.
            source: the checkpoint's folder.
            codes: the part's file of codes.
            forms: the forms of matrices by path; matrices of experts are not searched, and stay in INT8.
            prefix: see StoredWeights.
        """
        super().__init__(part, codes.name, prefix)
        self.weights, self.codes, self.forms = PartWeights(part, source), codes, forms

    def stored(self, path: str) -> Stored:
        """Return a constant as it would be stored."""
        if path not in self.weights.shapes:
            raise GateError(f"{self.name} does not hold {path}")
        is_matrix = len(self.weights.shapes[path]) == MATRIX
        name = self.forms.get(path, DEFAULT) if is_matrix else "fp16"
        if form(name).kind == "fp16":
            return Stored(self.weights[path].half().squeeze())
        if name == DEFAULT:
            int8 = rounded(self.weights[path])
            return Stored(int8.codes, scale=int8.scale.float()[:, None])
        if form(name).kind == "palette":
            return Stored(self._read(f"{path}.{name}.codes"), tables=self._read(f"{path}.{name}.lut"))
        scale = self._read(f"{path}.{name}.scale")
        return Stored(self._read(f"{path}.{name}.codes"), scale=scale.float()[:, None])

    def _read(self, name: str) -> Tensor:
        """Return a tensor from the file of codes."""
        with safe_open(self.codes, framework="pt") as stored:
            tensor: Tensor = stored.get_tensor(name)
            return tensor
