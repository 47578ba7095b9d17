"""Compression of a model's matrices by coremltools, with a separate form for each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import coremltools.optimize.coreml as cto
import numpy as np
from numpy.typing import NDArray

from shardmill.convert.palette import histogram, indices, palette_table
from shardmill.forms.form import Form, form
from shardmill.models.contract import stem


def compressed(model: Any, forms: Mapping[str, str]) -> Any:
    """Return an MLModel of fp16 weights with its matrices in other forms; `forms` maps a matrix's path to its form."""
    by_name = {f"{stem(path)}_to_fp16": form(name) for path, name in forms.items()}
    kinds = {found.kind for found in by_name.values()}
    if "int" in kinds:
        if len(set(by_name.values())) == 1:
            return cto.linear_quantize_weights(model, every_projection(next(iter(forms.values()))))
        named = {name: _linear(f) if f.kind == "int" else None for name, f in by_name.items()}
        model = cto.linear_quantize_weights(model, cto.OptimizationConfig(op_name_configs=named))
    if "palette" in kinds:
        named = {name: _palettizer(f) if f.kind == "palette" else None for name, f in by_name.items()}
        model = cto.palettize_weights(model, cto.OptimizationConfig(op_name_configs=named))
    return model


def every_projection(name: str) -> Any:
    """Return the coremltools configuration that makes the matrix of every projection INT8 or INT4."""
    return cto.OptimizationConfig(op_type_configs={"conv": _linear(form(name))})


def _linear(wanted: Form) -> Any:
    """Return the configuration for symmetric integers with one scale per output channel (rules W6 and W7)."""
    return cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", dtype=f"int{wanted.bits}", granularity="per_channel", weight_threshold=0
    )


def _palettizer(wanted: Form) -> Any:
    """Return the configuration for palettes with our tables, which coremltools stores."""

    def look_up(values: NDArray[np.float16]) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
        entries = palette_table(histogram(values), 2**wanted.bits)
        return entries, indices(entries, values.ravel())

    size = {"granularity": "per_grouped_channel", "group_size": wanted.group, "channel_axis": 0} if wanted.group else {}
    return cto.OpPalettizerConfig(mode="custom", lut_function=look_up, weight_threshold=0, **size)
