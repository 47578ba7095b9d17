"""Packages with matrices in several forms are coremltools' own, byte for byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import encoders
import pytest
import templates
import torch
from models import tiny_encoders, tiny_families
from oracle import convert_plain
from portable_coreml.judge.lint import lint
from safetensors.torch import load_file, save_file

from shardmill.convert import package, stream
from shardmill.convert.stamped import convert_stamped
from shardmill.forms.form import matrices
from shardmill.forms.recipe import Recipe, recipe
from shardmill.gates.rounding import weight_steps
from shardmill.gates.weights import PackageWeights
from shardmill.plan import Part
from shardmill.weight_files import file_bytes

from .small import described, draft, head_part, layers_part, write_checkpoint, write_family

pytestmark = pytest.mark.usefixtures("unchecked")

EXPERTS = "granitemoe"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("forms") / "checkpoint")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers of two kinds."""
    return write_family(tmp_path_factory.mktemp("family") / "checkpoint", "gemma3_text")


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def in_turn(part: Part, *names: str) -> dict[str, str]:
    """The forms in turn, matrix by matrix."""
    return {path: names[i % len(names)] for i, path in enumerate(matrices(part.shapes))}


def both(part: Part, source: Path, forms: str | Mapping[str, str], folder: Path) -> tuple[Path, Path]:
    """The package by coremltools alone, and the stamped one."""
    plain, stamped = folder / "plain.mlpackage", folder / "stamped.mlpackage"
    convert_plain(part, source, forms, plain)
    convert_stamped(part, source, forms, stamped, templates.FOLDER, threads=3)
    return plain, stamped


MIXES = [
    pytest.param(("int4",), id="all INT4"),
    pytest.param(("int4", "int8", "fp16"), id="linear forms"),
    pytest.param(("palette4", "fp16"), id="palettes and fp16"),
    pytest.param(("palette6/16", "int4", "palette8", "int8", "fp16", "palette4/32"), id="all kinds"),
]


@pytest.mark.thorough(but=["all INT4", "all kinds"])
@pytest.mark.parametrize("mix", MIXES)
def test_layers_are_plain_coremltools_byte_for_byte(mix: tuple[str, ...], checkpoint: Path, tmp_path: Path) -> None:
    part = layers_part(checkpoint, 1, 3)
    plain, stamped = both(part, checkpoint, in_turn(part, *mix), tmp_path)
    assert files(stamped) == files(plain)


@pytest.mark.parametrize("form", ["int4", "palette4", "palette6/32", "palette8/16"])
def test_heads_are_plain_coremltools_byte_for_byte(form: str, checkpoint: Path, tmp_path: Path) -> None:
    plain, stamped = both(head_part(checkpoint, 32, 64), checkpoint, form, tmp_path)
    assert files(stamped) == files(plain)


@pytest.mark.thorough
def test_layers_of_other_kinds_are_plain_coremltools_byte_for_byte(family: Path, tmp_path: Path) -> None:
    layers = described(family).architecture.layers
    part = draft(family, [[0, layers]])[f"layers_00_{layers:02d}"]
    mix = in_turn(part, "int8", "int4", "palette4/8", "fp16")
    plain, stamped = both(part, family, mix, tmp_path)
    assert files(stamped) == files(plain)


@pytest.mark.parametrize(
    ("role", "changed"),
    [
        pytest.param("mlp.down_proj.weight", torch.Tensor.zero_, id="matrices of zeros"),
        pytest.param("input_layernorm.weight", lambda values: values.fill_(1.0), id="gains of ones"),
    ],
)
def test_nothing_is_left_out_because_of_its_values(
    role: str, changed: Callable[[torch.Tensor], object], checkpoint: Path, tmp_path: Path
) -> None:
    """coremltools keeps equal constants once, as of layers that were copied, and no multiplication with ones."""
    source = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name, values in tensors.items():
            if name.endswith(role):
                changed(values)
        save_file(tensors, file, {"format": "pt"})
    part = layers_part(source, 1, 3)
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert weight_steps(PackageWeights(tmp_path / "stamped.mlpackage", part), source, [*part.shapes])[0] <= 1


def test_encoders_are_plain_coremltools_byte_for_byte(tmp_path: Path) -> None:
    checkpoint = tiny_encoders.write_tiny("bert", tmp_path / "checkpoint")
    source, parts, _ = encoders.parts_of(checkpoint, tmp_path, buckets=[32])
    mix = in_turn(parts["encoder_32"], "int4", "int8", "palette6", "fp16")
    plain, stamped = both(parts["encoder_32"], source, mix, tmp_path)
    assert files(stamped) == files(plain)


@pytest.mark.slow
def test_routers_of_experts_stay_in_fp16(tmp_path: Path) -> None:
    """They choose among experts; a form would be refused, and the rule of thumb leaves them alone."""
    source = tiny_families.write_tiny(EXPERTS, tmp_path / "checkpoint")
    layers = described(source).architecture.layers
    part = draft(source, [[0, layers]])[f"layers_00_{layers:02d}"]
    routers = [path for path in part.shapes if "router.weight" in path]
    chosen = recipe("int4").forms(part.shapes)
    assert routers and not chosen.keys() & routers and set(chosen.values()) == {"int4"}
    plain, stamped = both(part, source, chosen, tmp_path)
    assert files(stamped) == files(plain)
    stored = PackageWeights(stamped, part)
    assert all(stored.op(path).type == "const" for path in routers)
    assert all(stored.op(path).type == "constexpr_blockwise_shift_scale" for path in chosen)


def test_threads_and_blocks_do_not_decide_bytes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A palette is one thread's work, in blocks of whatever size; INT4 rows are packed in whole bytes."""
    part = layers_part(checkpoint, 1, 3)
    mix = in_turn(part, "palette4", "int4", "palette6/16", "palette8")
    convert_stamped(part, checkpoint, mix, tmp_path / "one.mlpackage", templates.FOLDER, threads=1)
    for name, size in (("small", 300), ("large", 1 << 20)):
        monkeypatch.setattr(stream, "BLOCK", size)
        convert_stamped(part, checkpoint, mix, tmp_path / f"{name}.mlpackage", templates.FOLDER, threads=4)
        assert files(tmp_path / f"{name}.mlpackage") == files(tmp_path / "one.mlpackage")


@pytest.mark.parametrize("forms", ["int4", "palette6/16"])
def test_the_size_of_a_program_is_that_of_its_weight_file(forms: str, checkpoint: Path, tmp_path: Path) -> None:
    """To the byte, for it is the file that the Neural Engine takes or refuses."""
    part = layers_part(checkpoint, 1, 3)
    convert_stamped(part, checkpoint, forms, tmp_path / "p.mlpackage", templates.FOLDER)
    size = (tmp_path / "p.mlpackage" / package.WEIGHT_FILE).stat().st_size
    assert 0 <= file_bytes(part.shapes, Recipe(forms)) - size < 64  # the last blob need not be filled up


def test_programs_of_every_form_are_lint_free_but_for_palettes(checkpoint: Path, tmp_path: Path) -> None:
    """W6 is about scales along the inputs, which no form has; W9 tells what is known of palettes."""
    part, found = layers_part(checkpoint, 1, 3), dict[str, set[str]]()
    for forms in ("int8", "int4", "palette4/16"):
        convert_stamped(part, checkpoint, forms, tmp_path / f"{forms[:4]}.mlpackage", templates.FOLDER)
        found[forms] = {row.rule for row in lint(tmp_path / f"{forms[:4]}.mlpackage")}
    assert found["int4"] == found["int8"]
    assert found["palette4/16"] - found["int8"] == {"W9"}
