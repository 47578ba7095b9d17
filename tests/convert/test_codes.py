"""Codes in a file take the place of rounding to nearest, to the byte, and what does not fit is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import templates
import torch
from code_writer import write_codes
from oracle import convert_plain

from shardmill.convert import palette
from shardmill.convert.palette import to_integers
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.weights import PartWeights
from shardmill.errors import ShardmillError
from shardmill.forms.form import form, matrices
from shardmill.gates.weights import PackageWeights
from shardmill.plan import Part

from .small import layers_part, write_checkpoint
from .test_forms import files

pytestmark = pytest.mark.usefixtures("unchecked")
NAMES = ("int4", "palette6/16", "int8", "palette4", "fp16", "palette8")
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Part, Path, dict[str, str], Tensors]:
    """Two layers, their checkpoint, forms in turn, and the codes that rounding to nearest gives."""
    source = write_checkpoint(tmp_path_factory.mktemp("codes") / "checkpoint")
    part = layers_part(source, 1, 3)
    chosen = {path: NAMES[i % len(NAMES)] for i, path in enumerate(matrices(part.shapes))}
    weights, tensors = PartWeights(part, source), Tensors()
    for path, name in chosen.items():
        tensors |= rounded(path, name, weights[path])
    return part, source, chosen, tensors


def rounded(path: str, name: str, weights: torch.Tensor) -> Tensors:
    wanted = form(name)
    if wanted.kind == "int":
        codes, scale, _ = to_integers(weights, wanted.levels)
        return {f"{path}.{name}.codes": codes.numpy(), f"{path}.{name}.scale": scale.numpy()}
    half = weights.half().numpy()
    if wanted.kind == "fp16":
        return {path: half}
    groups = np.split(half, wanted.tables(len(half)))
    tables = [palette.palette_table(palette.histogram(group), 2**wanted.bits) for group in groups]
    codes = [palette.indices(table, group).reshape(group.shape) for table, group in zip(tables, groups, strict=True)]
    return {f"{path}.{name}.codes": np.concatenate(codes), f"{path}.{name}.lut": np.stack(tables)}


def converted(
    convert: Callable[..., None], made: tuple[Part, Path, dict[str, str], Tensors], tensors: Tensors, folder: Path
) -> Path:
    part, source, chosen, _ = made
    write_codes(folder / "codes.safetensors", tensors)
    convert(part, source, chosen, folder / "p.mlpackage", codes=folder / "codes.safetensors")
    return folder / "p.mlpackage"


@pytest.mark.thorough(but=["convert_stamped"])
@pytest.mark.parametrize("convert", [convert_stamped, convert_plain])
def test_codes_of_rounding_to_nearest_give_its_package(
    convert: Callable[..., None], made: tuple[Part, Path, dict[str, str], Tensors], tmp_path: Path
) -> None:
    part, source, chosen, tensors = made
    convert_stamped(part, source, chosen, tmp_path / "nearest.mlpackage", templates.FOLDER)
    assert files(converted(convert, made, tensors, tmp_path)) == files(tmp_path / "nearest.mlpackage")


@pytest.mark.thorough
@pytest.mark.parametrize("convert", [convert_stamped, convert_plain])
def test_a_package_holds_the_codes_and_not_the_checkpoint_s(
    convert: Callable[..., None], made: tuple[Part, Path, dict[str, str], Tensors], tmp_path: Path
) -> None:
    """Of every form, and of a norm whose values a quantiser changed."""
    part, _, chosen, tensors = made
    random, other = np.random.default_rng(1), Tensors()
    for name, values in tensors.items():
        wanted = form(chosen.get(name) or name.split(".")[-2])
        if values.dtype == np.int8:
            other[name] = random.integers(-wanted.levels - 1, wanted.levels + 1, values.shape).astype(np.int8)
        elif values.dtype == np.uint8:
            other[name] = random.integers(0, 2**wanted.bits, values.shape).astype(np.uint8)
        else:
            other[name] = random.standard_normal(values.shape).astype(np.float16)
    norm = "layers.1.input_layernorm.weight"
    other[norm] = random.standard_normal(part.shapes[norm]).astype(np.float16)
    stored = PackageWeights(converted(convert, made, other, tmp_path), part)
    for path, name in chosen.items():
        kept = stored.stored(path)
        if kept.coded:
            assert np.array_equal(kept.values.numpy(), other[f"{path}.{name}.codes"])
            beside = other.get(f"{path}.{name}.scale", other.get(f"{path}.{name}.lut"))
            found = kept.tables if kept.scale is None else kept.scale[:, 0].half()
            assert found is not None and beside is not None and np.array_equal(found.numpy(), beside)
        else:
            assert np.array_equal(kept.values.numpy(), other[path])
    assert np.array_equal(stored.values(norm).half().numpy(), other[norm])


def test_what_a_file_does_not_name_is_the_checkpoint_s(
    made: tuple[Part, Path, dict[str, str], Tensors], tmp_path: Path
) -> None:
    part, source, chosen, tensors = made
    convert_stamped(part, source, chosen, tmp_path / "nearest.mlpackage", templates.FOLDER)
    few = {name: values for name, values in tensors.items() if ".1." in name}
    assert 0 < len(few) < len(tensors)
    assert files(converted(convert_stamped, made, few, tmp_path)) == files(tmp_path / "nearest.mlpackage")


def spoilt(tensors: Tensors, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Tensors:
    changed = change(tensors[name].copy())
    rest = {key: value for key, value in tensors.items() if key != name}
    return rest if changed is None else rest | {name: changed}


def set_first(value: int) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values.flat[-1] = value
        return values

    return change


FIRST = "layers.1.self_attn.qkv_proj.weight"  # int4
SECOND = "layers.1.self_attn.o_proj.weight"  # palette6/16
FAULTS = [
    pytest.param(f"{FIRST}.int4.codes", set_first(8), r"codes outside \[-8, 7\]", id="a code of int4 above 7"),
    pytest.param(f"{FIRST}.int4.codes", set_first(-9), r"codes outside \[-8, 7\]", id="a code of int4 below -8"),
    pytest.param(
        f"{SECOND}.palette6/16.codes", set_first(64), r"codes outside \[0, 63\]", id="an index after the table"
    ),
    pytest.param(f"{FIRST}.int4.scale", lambda _: None, r"qkv_proj\.weight\.int4\.scale is nothing", id="no scale"),
    pytest.param(
        f"{FIRST}.int4.scale", lambda v: v[:-1], r"scale is F16 \[\d+\], must be F16 \[\d+\]", id="a row less"
    ),
    pytest.param(
        f"{SECOND}.palette6/16.lut", lambda v: v[:1], r"lut is F16 \[1, 64\], must be F16 \[4, 64\]", id="a table less"
    ),
    pytest.param(f"{FIRST}.int4.codes", lambda v: v.view(np.uint8), r"codes is U8 .*, must be I8", id="another type"),
]


@pytest.mark.parametrize(("name", "change", "line"), FAULTS)
def test_codes_that_do_not_fit_are_told(
    name: str,
    change: Callable[[np.ndarray], np.ndarray | None],
    line: str,
    made: tuple[Part, Path, dict[str, str], Tensors],
    tmp_path: Path,
) -> None:
    with pytest.raises(ShardmillError, match=line):
        converted(convert_stamped, made, spoilt(made[3], name, change), tmp_path)


def test_codes_of_a_form_that_a_matrix_does_not_have_are_left_alone(
    made: tuple[Part, Path, dict[str, str], Tensors], tmp_path: Path
) -> None:
    part, source, chosen, tensors = made
    convert_stamped(part, source, chosen, tmp_path / "nearest.mlpackage", templates.FOLDER)
    more = {
        f"{FIRST}.int8.codes": tensors[f"{FIRST}.int4.codes"] * 0,
        f"{FIRST}.int8.scale": tensors[f"{FIRST}.int4.scale"],
    }
    assert files(converted(convert_stamped, made, tensors | more, tmp_path)) == files(tmp_path / "nearest.mlpackage")


def test_strange_names_and_values_of_coded_matrices_are_told(
    made: tuple[Part, Path, dict[str, str], Tensors], tmp_path: Path
) -> None:
    strange = {"layers.9.mlp.down_proj.weight.int4.codes": np.zeros((1, 1), np.int8)}
    with pytest.raises(ShardmillError, match=r"layers\.9\..* belongs to nothing of layers_01_03"):
        converted(convert_stamped, made, strange, tmp_path)
    with pytest.raises(ShardmillError, match=rf"{FIRST} is stored in int4; give codes, not values"):
        converted(convert_stamped, made, {FIRST: np.zeros(made[0].shapes[FIRST], np.float16)}, tmp_path)


def test_a_file_s_bytes_do_not_depend_on_the_order(
    made: tuple[Part, Path, dict[str, str], Tensors], tmp_path: Path
) -> None:
    write_codes(tmp_path / "a", made[3])
    write_codes(tmp_path / "b", dict(reversed(made[3].items())))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
