"""Packages of several functions: those that coremltools makes, with every weight stored once."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import pytest
import templates
from oracle import convert_plain, converted, save

from shardmill.convert import package, template
from shardmill.convert.package import WEIGHT_FILE, StampError, main_block
from shardmill.convert.stamped import by_function, convert_stamped, share_places
from shardmill.convert.weights import PartWeights
from shardmill.models.interface import FIXED, GRAPH, HOST, EntryPoints
from shardmill.plan import Part

from .small import draft, head_part, layers_part, write_checkpoint, write_family

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]

WIDTHS = (1, 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("functions") / "checkpoint")


def fixed(part: Part) -> Part:
    return part.changed(calls=EntryPoints(FIXED, WIDTHS))


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize(("kind", "quantization"), [("layers", "int8"), ("head", "fp16")])
def test_stamped_functions_are_those_that_coremltools_combines(
    checkpoint: Path, tmp_path: Path, kind: str, quantization: str
) -> None:
    """Byte for byte."""
    part = fixed(layers_part(checkpoint, 1, 3) if kind == "layers" else head_part(checkpoint, 32, 64))
    convert_plain(part, checkpoint, quantization, tmp_path / "plain.mlpackage")
    convert_stamped(part, checkpoint, quantization, tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


def test_kinds_of_layers_are_combined_alike(tmp_path: Path) -> None:
    """Attention and convolutions, whose states differ."""
    source = write_family(tmp_path / "checkpoint", "lfm2")
    part = fixed(draft(source, [[0, 2], [2, 4]])["layers_00_02"])
    convert_plain(part, source, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, source, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


def test_all_but_the_names_of_state_updates_is_coremltools_own(checkpoint: Path, tmp_path: Path) -> None:
    """Against its public functions alone, called here."""
    part = fixed(layers_part(checkpoint, 1, 3))
    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, one in by_function(part.spec):
        path = tmp_path / f"{name}.mlpackage"
        save(converted(one, PartWeights(one, checkpoint), "int8"), path)
        descriptor.add_function(str(path), "main", name)
    descriptor.default_function_name = "t1"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "theirs.mlpackage"))
    package.canonicalize(tmp_path / "theirs.mlpackage")
    convert_stamped(part, checkpoint, "int8", tmp_path / "ours.mlpackage", templates.FOLDER)
    ours, theirs = (package.load_spec(tmp_path / f"{whose}.mlpackage") for whose in ("ours", "theirs"))
    for update in [*state_updates(ours), *state_updates(theirs)]:
        update.attributes["name"].Clear()
    assert ours == theirs
    assert (
        files(tmp_path / "ours.mlpackage")[WEIGHT_FILE.as_posix()]
        == (files(tmp_path / "theirs.mlpackage")[WEIGHT_FILE.as_posix()])
    )


def state_updates(spec: Any) -> Iterator[Any]:
    """Yield the operations that read and write states; coremltools makes one of each of an update."""
    for function in spec.mlProgram.functions.values():
        for op in function.block_specializations[function.opset].operations:
            if op.type in ("write_state", "read_state"):
                yield op


def test_the_weights_are_those_of_one_function(checkpoint: Path, tmp_path: Path) -> None:
    """The file has the same bytes, so any number of functions takes the same room."""
    part = layers_part(checkpoint, 1, 3)
    convert_stamped(part, checkpoint, "int8", tmp_path / "one.mlpackage", templates.FOLDER)
    convert_stamped(fixed(part), checkpoint, "int8", tmp_path / "several.mlpackage", templates.FOLDER)
    one, several = (tmp_path / f"{name}.mlpackage" / WEIGHT_FILE for name in ("one", "several"))
    assert one.read_bytes() == several.read_bytes()
    spec = package.load_spec(tmp_path / "several.mlpackage")
    assert [function.name for function in spec.description.functions] == ["t1", "t4"]
    assert spec.description.defaultFunctionName == "t1"
    shapes = [list(function.input[0].type.multiArrayType.shape) for function in spec.description.functions]
    assert shapes == [[1, 64, 1, 1], [1, 64, 4, 1]]


@pytest.mark.parametrize("state", [GRAPH, HOST])
def test_shorter_contexts_take_no_room_but_their_text(checkpoint: Path, tmp_path: Path, state: str) -> None:
    """The weight file is that of one context, the functions of the whole context are the same, and two runs agree."""
    part = layers_part(checkpoint, 1, 3)
    one = part.changed(calls=EntryPoints(FIXED, WIDTHS, state))
    several = part.changed(calls=EntryPoints(FIXED, WIDTHS, state, (16, 32)))
    for name, chosen in {"one": one, "several": several, "again": several}.items():
        convert_stamped(chosen, checkpoint, "int8", tmp_path / f"{name}.mlpackage", templates.FOLDER)
    assert files(tmp_path / "several.mlpackage") == files(tmp_path / "again.mlpackage")
    weights = {name: (tmp_path / f"{name}.mlpackage" / WEIGHT_FILE).read_bytes() for name in ("one", "several")}
    assert weights["one"] == weights["several"]
    alone, spec = (package.load_spec(tmp_path / f"{name}.mlpackage") for name in ("one", "several"))
    assert {*alone.mlProgram.functions} == {"t1", "t4"} and spec.description.defaultFunctionName == "t1"
    assert [f.name for f in spec.description.functions] == ["t1", "t4", "c16_t1", "c16_t4", "c32_t1", "c32_t4"]
    assert all(spec.mlProgram.functions[name] == alone.mlProgram.functions[name] for name in ("t1", "t4"))
    for described, slots in zip(
        spec.description.functions, (part.spec.slots, part.spec.slots, 16, 16, 32, 32), strict=True
    ):
        kept = described.state if state == GRAPH else [f for f in described.input if f.name[:2] in ("k_", "v_")]
        arrays = (f.type.stateType.arrayType if state == GRAPH else f.type.multiArrayType for f in kept)
        assert [array.shape[2] for array in arrays] == [slots] * 4


def test_shorter_contexts_are_those_that_coremltools_combines(checkpoint: Path, tmp_path: Path) -> None:
    """Which stores the weights once by their values, here by their names."""
    part = layers_part(checkpoint, 1, 3).changed(calls=EntryPoints(FIXED, (1, 4), GRAPH, (16,)))
    convert_plain(part, checkpoint, "int8", tmp_path / "plain.mlpackage")
    convert_stamped(part, checkpoint, "int8", tmp_path / "stamped.mlpackage", templates.FOLDER)
    assert files(tmp_path / "stamped.mlpackage") == files(tmp_path / "plain.mlpackage")


def test_a_function_without_one_of_the_weights_is_refused(checkpoint: Path) -> None:
    one, other = (
        template.program(spec, templates.FOLDER) for _, spec in by_function(fixed(layers_part(checkpoint, 1, 3)).spec)
    )
    for op in main_block(other).operations:
        if op.outputs and op.outputs[0].name.startswith("layers_2_mlp_down_proj_weight"):
            op.outputs[0].name = "strange"
    with pytest.raises(StampError, match="a weight that another function does not have"):
        share_places(one, [other])


IN_ANOTHER_PROCESS = """
import pickle, sys
from shardmill.convert.stamped import convert_stamped
part, source, path = pickle.loads(sys.stdin.buffer.read())
convert_stamped(part, source, "int8", path, threads=1)
"""


def test_the_bytes_do_not_depend_on_the_process(checkpoint: Path, tmp_path: Path) -> None:
    part = fixed(head_part(checkpoint, 32, 64))
    convert_stamped(part, checkpoint, "int8", tmp_path / "here.mlpackage", templates.FOLDER, threads=3)
    subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps((part, checkpoint, tmp_path / "there.mlpackage")),
        env={**os.environ, "PYTHONHASHSEED": "3"},
        check=True,
        capture_output=True,
    )
    assert files(tmp_path / "here.mlpackage") == files(tmp_path / "there.mlpackage")
