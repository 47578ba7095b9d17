"""metadata.json: what Apple's compiler says of the same things."""

from __future__ import annotations

import pytest
from portable_coreml.files.metadata import _histogram_name, _storage_precision
from portable_coreml.files.read_text import read_text


@pytest.mark.parametrize(
    ("kind", "prefix", "name"),
    [
        ("slice_by_index", None, "SliceByIndex"),
        ("relu", "Ios16", "Ios16.relu"),
        ("concat", "Ios16", "Concat"),
        ("concat", "Ios17", "Ios17.concat"),
        ("relu", "Ios17", "Ios16.relu"),
        ("relu", "Ios18", "Ios18.relu"),
        ("constexpr_lut_to_dense", "Ios17", "Ios16.constexprLutToDense"),
        ("split", "Ios17", "Split"),
        ("logical_and", "Ios17", "Ios17.logicalAnd"),
    ],
)
def test_operations_count_under_the_set_that_last_defined_them(kind: str, prefix: str | None, name: str) -> None:
    """As in public bundles of Apple's compiler."""
    assert _histogram_name(kind, prefix) == name


BLOB = 'BLOBFILE(path = string("@model_path/weights/weight.bin"), offset = uint64({}))'


@pytest.mark.parametrize(
    ("line", "precision"),
    [
        (f"tensor<fp16, [2]> w = const()[val = tensor<fp16, [2]>({BLOB.format(64)})];", "Float16"),
        (
            "tensor<fp16, [2]> w = constexpr_lut_to_dense(indices = tensor<uint4, [2]>("
            f"{BLOB.format(64)}), lut = tensor<fp16, [1, 16, 1]>({BLOB.format(128)}));",
            "Palettized (4 bits)",
        ),
        (
            f"tensor<fp16, [1, 16, 1]> t = const()[val = tensor<fp16, [1, 16, 1]>({BLOB.format(64)})]; "
            f"tensor<fp16, [2]> w = constexpr_lut_to_dense(indices = tensor<uint6, [2]>({BLOB.format(128)}), lut = t);",
            "Mixed (Float16, Palettized (6 bits))",
        ),
    ],
)
def test_storage_is_named_by_how_weights_are_compressed(line: str, precision: str) -> None:
    """Plain, palettized, and palettized with a table that another operation gives."""
    text = f"program(1.3){{ func main<ios18>(tensor<fp16, [2]> x) {{ {line} }} -> (x); }}"
    assert _storage_precision(read_text(text).functions["main"]) == precision
