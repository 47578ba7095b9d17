"""A part's weights as a package would hold them if its matrices had some forms, without making the package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from shardmill.convert.weights import PartWeights
from shardmill.errors import GateError
from shardmill.forms.form import MATRIX, form
from shardmill.gates.weights import HeldWeights, Stored
from shardmill.plan import Part
from shardmill.precision.part_codes import rounded

DEFAULT = "int8"  # of matrices that a search does not choose a form for


class FormWeights(HeldWeights):
    """The constants of a part in some forms: by its file of codes, and rounded where that has none, as for INT8."""

    def __init__(self, part: Part, source: Path, codes: Path, forms: Mapping[str, str], prefix: str) -> None:
        """Opens nothing yet.

        Args:
            part: the part.
            source: the checkpoint's folder.
            codes: the part's file of codes.
            forms: of matrices by their paths; those of experts, which no search chooses, have none and are in INT8.
            prefix: as of all held weights.
        """
        super().__init__(part, codes.name, prefix)
        self.weights, self.codes, self.forms = PartWeights(part, source), codes, forms

    def stored(self, path: str) -> Stored:
        """A constant as it would be stored."""
        if path not in self.weights.shapes:
            raise GateError(f"{self.name} does not hold {path}")
        is_matrix = len(self.weights.shapes[path]) == MATRIX
        name = self.forms.get(path, DEFAULT) if is_matrix else "fp16"
        if form(name).kind == "fp16":
            return Stored(self.weights[path].half().squeeze())
        if name == DEFAULT:
            found = rounded(self.weights[path])
            return Stored(found.codes, scale=found.scale.float()[:, None])
        if form(name).kind == "palette":
            return Stored(self._read(f"{path}.{name}.codes"), tables=self._read(f"{path}.{name}.lut"))
        scale = self._read(f"{path}.{name}.scale")
        return Stored(self._read(f"{path}.{name}.codes"), scale=scale.float()[:, None])

    def _read(self, name: str) -> Tensor:
        """A tensor of the file of codes."""
        with safe_open(self.codes, framework="pt") as stored:
            found: Tensor = stored.get_tensor(name)
            return found
