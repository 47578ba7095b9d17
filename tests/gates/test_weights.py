"""Weights read back from a package, and their distance from the checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import templates
import tiny
import torch

from shardmill.convert.package import MODEL_FILE, load_spec
from shardmill.convert.stamped import convert_stamped
from shardmill.convert.weights import PartWeights
from shardmill.errors import GateError
from shardmill.forms.form import matrices
from shardmill.gates import stored as module
from shardmill.gates.naming import matrix_rows
from shardmill.gates.rounding import weight_steps
from shardmill.gates.stored import Stored, WholeModel
from shardmill.gates.weights import PackageWeights
from shardmill.models.interface import FIXED, EntryPoints
from shardmill.plan import Constant


@pytest.fixture(scope="module")
def stored(built: tiny.Build) -> PackageWeights:
    return PackageWeights(built.packages["layers_02_03"], built.parts["layers_02_03"])


@pytest.fixture(scope="module")
def original(built: tiny.Build) -> dict[str, torch.Tensor]:
    return dict(PartWeights(built.parts["layers_02_03"], built.source))


PROJECTION, NORM = "layers.2.mlp.down_proj.weight", "layers.2.input_layernorm.weight"
NOWHERE = Path("nowhere")


def block_rows(patch: pytest.MonkeyPatch, count: int) -> None:
    """So many rows are expanded at a time."""
    patch.setattr(module, "rows_at_once", lambda columns: count)


def test_every_tensor_is_there_in_the_checkpoint_s_shape(
    stored: PackageWeights, original: dict[str, torch.Tensor], built: tiny.Build
) -> None:
    dequantised = tiny.dequantised(built)
    for path, values in original.items():
        name = f"model.{path}"
        assert stored(name).shape == values.shape
        torch.testing.assert_close(stored(name), dequantised[name], rtol=0, atol=0)


def test_a_package_of_another_part_does_not_hold_it(built: tiny.Build) -> None:
    other = PackageWeights(built.packages["layers_03_04"], built.parts["layers_02_03"])
    with pytest.raises(GateError, match=r"layers_03_04\.mlpackage does not hold layers\.2\."):
        other(f"model.{NORM}")
    own = PackageWeights(built.packages["layers_02_03"], built.parts["layers_02_03"])
    with pytest.raises(GateError, match=r"layers_02_03\.mlpackage does not hold model\.layers\.3\."):
        own("model.layers.3.input_layernorm.weight")


class Counted(tuple[Constant, ...]):
    """A part's tensors; says how often somebody went through them."""

    times = 0

    def __iter__(self) -> Iterator[Constant]:
        self.times += 1
        return super().__iter__()


def test_a_part_s_tensors_are_not_searched_for_every_name(built: tiny.Build) -> None:
    """A layer has thousands if it has many experts, and each of them is asked for."""
    part = replace(built.parts["layers_02_03"], tensors=Counted(built.parts["layers_02_03"].tensors))
    stored = PackageWeights(built.packages["layers_02_03"], part)
    assert isinstance(part.tensors, Counted)
    known, names = part.tensors.times, [f"model.{path}" for path in part.shapes]
    for name in names:
        stored(name)
        assert len(stored.made_of(name)) == 1
    assert len(names) > 5 and part.tensors.times == known


def test_a_package_is_read_one_tensor_at_a_time(built: tiny.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights may be gigabytes: nothing is read before it is asked for, or that was not asked for."""
    from coremltools.converters.mil.frontend.milproto import load

    offsets: list[int] = []
    real = load._load_file_value

    def counted(files: object, value: object, dtype: object) -> object:
        offsets.append(value.offset)  # type: ignore[attr-defined]
        return real(files, value, dtype)

    monkeypatch.setattr(load, "_load_file_value", counted)
    stored = PackageWeights(built.packages["layers_02_03"], built.parts["layers_02_03"])
    assert not offsets
    stored.values(PROJECTION)
    assert len(offsets) == 2  # values and scales
    stored.values(NORM)
    assert len(set(offsets)) == 3


def test_rows_are_the_tensor_s(stored: PackageWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block at a time, the last one shorter."""
    block_rows(monkeypatch, 40)
    for name in (PROJECTION, NORM):
        blocks = [rows.clone() for rows in stored.rows(name)]
        assert [len(b) for b in blocks] == [40, 40, 16]
        assert torch.equal(torch.cat(blocks), stored.values(name))


def test_a_whole_model_is_multiplied_a_block_of_rows_at_a_time(
    built: tiny.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole matrices in fp32 would be paid for page by page, in each pass of transformers' model."""
    block_rows(monkeypatch, 40)
    whole = WholeModel([PackageWeights(built.packages[part.name], part) for part in (*built.layers(), *built.heads())])
    dequantised = tiny.dequantised(built)
    for layer in ("2", "3"):  # of two programs
        name = f"model.{PROJECTION.replace('2', layer)}"
        blocks = [rows.clone() for rows in matrix_rows(whole, name)]
        assert [len(rows) for rows in blocks] == [40, 40, 16]
        assert torch.equal(torch.cat(blocks), whole(name)) and torch.equal(whole(name), dequantised[name])
    rows = torch.cat([rows.clone() for rows in whole.head()])
    assert torch.equal(rows, dequantised["lm_head.weight"])


def test_what_no_program_contains_stands_beside_a_whole_model(built: tiny.Build) -> None:
    part = built.layers()[0]
    beside = torch.arange(6.0).reshape(3, 2)
    whole = WholeModel([PackageWeights(built.packages[part.name], part)], {"model.other.weight": beside})
    assert torch.equal(whole("model.other.weight"), beside)
    assert torch.equal(torch.cat(list(matrix_rows(whole, "model.other.weight"))), beside)


FORMS = ("int4", "palette4", "palette6/16", "palette8", "fp16")


@pytest.fixture(scope="module")
def mixed(built: tiny.Build, tmp_path_factory: pytest.TempPathFactory) -> PackageWeights:
    """The part with a matrix in each form."""
    part, path = built.parts["layers_02_03"], tmp_path_factory.mktemp("mixed") / "layers_02_03.mlpackage"
    chosen = dict(zip(matrices(part.shapes), FORMS, strict=False))
    convert_stamped(part, built.source, chosen, path, templates.FOLDER)
    return PackageWeights(path, part)


def test_every_form_is_expanded_as_coremltools_does(mixed: PackageWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    import coremltools.optimize.coreml as cto
    from coremltools.models import MLModel

    block_rows(monkeypatch, 40)
    dense = cto.decompress_weights(MLModel(str(mixed.package), skip_model_load=True))
    operations = dense._mil_program.functions["main"].operations
    known = {op.outputs[0].name: op.outputs[0].val for op in operations if op.op_type == "const"}
    found = 0
    for path in matrices(mixed.part.shapes):
        name = mixed.op(path).outputs[0].name
        expected = next(value for key, value in known.items() if key.startswith(path.replace(".", "_")))
        kept = mixed.stored(path)
        # coremltools rounds the product with a scale to fp16.
        assert torch.equal(kept.whole().half(), torch.from_numpy(expected).flatten(1)), name
        assert kept.coded == ("_to_fp16_" in name)
        found += kept.coded
    assert found == 4


def test_a_palette_s_step_is_the_gap_between_the_two_nearest_entries() -> None:
    """Within the table, beyond its ends, and of each row's own table."""
    tables = torch.tensor([[0.0, 1.0, 4.0, 4.0], [8.0, 8.0, 8.0, 8.0]])
    kept = Stored(torch.zeros(2, 4, dtype=torch.uint8), tables=tables)
    steps = kept.steps(torch.tensor([[0.4, 3.0, 9.0, -2.0], [8.0, 7.0, 9.0, 0.0]]), 0)
    expected = torch.tensor([[1.0, 3.0, 13.0, 5.0], [2**-24, 2.0, 2.0, 16.0]])
    torch.testing.assert_close(steps, expected)


def test_functions_that_do_not_share_their_weights_are_refused(built: tiny.Build, tmp_path: Path) -> None:
    """The gate reads one function's; another one could hold anything."""
    part, path = built.parts["layers_02_03"].changed(calls=EntryPoints(FIXED, (1, 4))), tmp_path / "p.mlpackage"
    convert_stamped(part, built.source, "int8", path, templates.FOLDER)
    shared = PackageWeights(path, part)
    assert weight_steps(shared, built.source, [*part.shapes])[0] <= 1
    spec = load_spec(path)
    function = spec.mlProgram.functions["t4"]
    op = next(op for op in function.block_specializations[function.opset].operations if op.type.startswith("constexpr"))
    op.inputs["data"].arguments[0].value.blobFileValue.offset += 64
    (path / MODEL_FILE).write_bytes(spec.SerializeToString())
    with pytest.raises(GateError, match=rf"p\.mlpackage: its functions do not share {op.outputs[0].name}"):
        PackageWeights(path, part)
