"""Programs of routers and of groups of experts: those of coremltools alone, byte for byte, with nothing left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import routed
import templates
import tiny
from oracle import convert_plain

from shardmill.convert.stamped import convert_stamped
from shardmill.gates.residency import predict
from shardmill.plan import Part

pytestmark = [pytest.mark.usefixtures("unchecked"), pytest.mark.slow]


def files(folder: Path) -> dict[str, bytes]:
    return {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture(scope="module", params=list(routed.GROUPS))
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Part]]:
    """A checkpoint with its parts."""
    source = routed.checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return source, tiny.split(source, topology="auto", experts=routed.GROUPS[request.param])[0]


def test_packages_are_plain_coremltools_and_eligible(split: tuple[Path, dict[str, Part]], tmp_path: Path) -> None:
    """The first part of layers, a later one, and a group that is not its layer's first."""
    source, parts = split
    layers = [part for part in parts.values() if part.kind == "layers"]
    groups = [part for part in parts.values() if part.kind == "experts"]
    for part in (layers[0], layers[-1], groups[-1]):
        plain, stamped = (tmp_path / f"{part.name}-{how}.mlpackage" for how in ("plain", "stamped"))
        convert_plain(part, source, "int8", plain)
        convert_stamped(part, source, "int8", stamped, templates.FOLDER)
        assert files(plain) == files(stamped)
        rows, findings = predict(stamped, part.spec.tokens)
        assert {row.status for row in rows} <= {"eligible", "no_device"}
        assert [finding for finding in findings if finding["severity"] == "error"] == []


def test_every_byte_lies_in_one_part(split: tuple[Path, dict[str, Part]]) -> None:
    """But for what a branch is multiplied with, which a layer and each of its groups have."""
    source, parts = split
    dense = tiny.split(source, topology="auto")[0]

    def read(found: dict[str, Part]) -> tuple[set[tuple[str, int | None]], int]:
        tensors = [t for part in found.values() if part.kind in ("layers", "experts") for t in part.tensors]
        once = [t for t in tensors if t.path != "branch_scale" and t.source.magnitude != "only"]
        return {(t.source.tensor, t.source.index) for t in once}, sum(t.end - t.start for t in once)

    assert read(parts) == read(dense)


def test_a_recipe_names_experts_as_the_model_does(split: tuple[Path, dict[str, Part]]) -> None:
    """Whichever program they are in: a recipe is for either form."""
    source, parts = split
    dense = tiny.split(source, topology="auto")[0]

    def named(found: dict[str, Part]) -> dict[str, tuple[int, ...]]:
        return {name: shape for part in found.values() for name, shape in part.named_shapes.items() if len(shape) == 2}

    assert named(parts) == named(dense)
