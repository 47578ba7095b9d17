"""Where two programs part: the operation that was changed is named, whatever the values are called."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from portable_coreml.errors import InputError
from portable_coreml.judge.against import Against
from portable_coreml.judge.asked import Asked
from portable_coreml.judge.report import against_of
from portable_coreml.proxy import MLModelProxy

from tests.judge.pairs import CHANGES, built, renamed


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("pairs") / "one.mlpackage")


def against(one: Path, two: Path, **asked: object) -> Against:
    return against_of(one, Asked(against=two, **asked))  # type: ignore[arg-type]


@pytest.mark.parametrize("names", ["same names", "other names"])
@pytest.mark.parametrize("changed", sorted(CHANGES))
def test_the_changed_operation_is_named(original: Path, tmp_path: Path, changed: str, names: str) -> None:
    other = built(tmp_path / "two.mlpackage", changed)
    if names == "other names":
        renamed(other)
    found = against(original, other)
    assert not found.same
    assert [parting.name for parting in found.partings] == [changed]
    if names == "same names":
        assert found.partings[0].other == changed
        same = [row.name for row in found.rows if row.same]
        assert changed not in same and ("stem" in same or changed == "stem")


def test_what_is_unlike_about_two_operations_is_told(original: Path, tmp_path: Path) -> None:
    """Their types, a number, or how far a matrix is from the other."""
    said = {}
    for changed in ("act", "norm", "stem", "turned"):
        (parting,) = against(original, built(tmp_path / f"{changed}.mlpackage", changed)).partings
        said[changed] = parting.what
    assert said["act"] == "relu here, gelu there"
    assert said["norm"].startswith("'epsilon' is") and "0.00999" in said["norm"]
    assert said["stem"] == "'weight' differs by 1.00%"
    assert said["turned"] == "'perm' is [0, 1, 3, 2] here, [0, 1, 2, 3] there"


def test_the_same_program_under_other_names_is_the_same(original: Path, tmp_path: Path) -> None:
    """Every value has a counterpart, found by its numbers."""
    found = against(original, renamed(built(tmp_path / "two.mlpackage")))
    assert found.same and found.partings == () and found.alone == 0
    assert all(row.same for row in found.rows)
    assert {row.name == row.other for row in found.rows} == {True, False}


def test_a_larger_difference_counts_as_the_same(original: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "two.mlpackage", "stem")
    assert not against(original, other, difference=0.001).same
    assert against(original, other, difference=0.5).same


class Small(torch.nn.Module):
    """A convolution, an activation in one of two forms, and a projection."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.out, self.activation = torch.nn.Conv2d(4, 8, 3), torch.nn.Linear(8, 5), activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3))
        y = torch.nn.functional.silu(y) if self.activation == "silu" else y * torch.sigmoid(y * 1.02)
        return self.out(y)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with exported programs of both forms, and the package of the first."""
    import coremltools as ct

    folder = tmp_path_factory.mktemp("exported")
    for activation in ("silu", "other"):
        program = torch.export.export(Small(activation).eval(), (torch.zeros(1, 4, 6, 6),))
        torch.export.save(program, folder / f"{activation}.pt2")
        if activation == "silu":
            target = {"compute_precision": ct.precision.FLOAT32, "minimum_deployment_target": ct.target.iOS17}
            made = ct.convert(program.run_decompositions({}), convert_to="mlprogram", **target)
            made.save(str(folder / "silu.mlpackage"))
    return folder


def test_a_package_is_compared_with_an_exported_program(exported: Path) -> None:
    """Of the same mathematics in other operations only what comes to another result is named."""
    assert against(exported / "silu.mlpackage", exported / "silu.pt2").same
    found = against(exported / "silu.mlpackage", exported / "other.pt2")
    (parting,) = found.partings
    assert (parting.kind, parting.other_kind) == ("silu", "aten.mul.Tensor")
    assert parting.difference is None  # the two are not one operation in both


def test_a_difference_that_reaches_no_output_is_named_all_the_same(original: Path, tmp_path: Path) -> None:
    other = built(tmp_path / "two.mlpackage", "bounded")
    found = against(original, other, difference=0.01)
    assert found.same is (max(pair.difference for pair in found.outputs) <= 0.01)
    inside = against(original, renamed(built(tmp_path / "three.mlpackage", "norm")), difference=0.0005)
    assert [parting.name for parting in inside.partings] == ["norm"]


def recorded(package: Path, path: Path, **changed: float) -> Path:
    """Record the inputs of a package and some of its values, of which some are changed by a factor."""
    import safetensors.numpy
    from portable_coreml.run.observe import trace

    values = {"x": np.random.default_rng(5).standard_normal((1, 8, 6, 6)).astype(np.float32)}
    with trace(lambda name, kind, value: values.update({name: value.numpy().copy()})):
        MLModelProxy(str(package)).predict({"x": values["x"]})
    kept = {name: values[name] * np.float32(changed.get(name, 1)) for name in ("x", "act", "norm", "weights", "joined")}
    np.savez(path, **kept) if path.suffix == ".npz" else safetensors.numpy.save_file(kept, path)
    return path


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_a_package_is_compared_with_recorded_arrays(original: Path, tmp_path: Path, suffix: str) -> None:
    """With what was recorded of some values: the first that differs after others that agree."""
    assert against(original, recorded(original, tmp_path / f"same{suffix}")).same
    found = against(original, recorded(original, tmp_path / f"other{suffix}", norm=1.1, weights=1.2, joined=1.1))
    assert [parting.name for parting in found.partings] == ["norm"]
    assert [pair.name for pair in found.outputs if pair.same] == ["act"]


def test_what_cannot_be_compared_is_refused(original: Path, exported: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "nothing.npz", x=np.zeros((1, 8, 6, 6), np.float32), elsewhere=np.zeros(3))
    np.savez(tmp_path / "without.npz", joined=np.zeros((1, 16, 6), np.float32))
    (tmp_path / "damaged.pt2").write_bytes(b"no archive")
    for other, said in (
        (tmp_path / "nothing.npz", "no array in it has the name of a value"),
        (tmp_path / "without.npz", "lacks the input 'x'"),
        (tmp_path / "damaged.pt2", "not an exported program"),
        (exported / "silu.pt2", "can't be computed from these inputs"),
        (exported / "silu.mlpackage", "input 'x'"),
    ):
        with pytest.raises(InputError, match=said):
            against(original, other)
