"""What coremltools can write, compiled and read back: the same program, value by value, and the same predictions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from portable_coreml.files.bundle import compile_model, load_model

from tests.same import differences

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 6)).astype(np.float32)
Case = tuple[Any, Sequence[Mapping[str, Any]]]  # a model and inputs to try
SPECIAL = np.array([1e-7, 6e-8, np.inf, -np.inf, -0.0, np.nan], np.float32)  # fp16: subnormal, rounded, infinite


def survives(model: Any, inputs: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Saves and compiles a model; compares program, description and predictions."""
    import coremltools as ct

    package = folder / "m.mlpackage"
    model.save(str(package))
    bundle = compile_model(package, folder / "m.mlmodelc")
    one, two = load_model(package), load_model(bundle)
    assert list(differences(one.program, two.program)) == []
    assert (one.description, one.spec_version) == (two.description, two.spec_version)
    first, second = ct.models.MLModel(str(package)), ct.models.CompiledMLModel(str(bundle))
    for data in inputs:
        mine, theirs = first.predict(dict(data)), second.predict(dict(data))
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            if isinstance(value, (str, int, dict)):
                assert value == theirs[name]
            else:
                np.testing.assert_array_equal(np.asarray(value), np.asarray(theirs[name]))


def special_numbers(target: str, precision: str) -> Case:
    """Every kind of float in constants, at every specification version."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    opset = getattr(ct.target, target)

    @mb.program(input_specs=[mb.TensorSpec((2, 6))], opset_version=opset)
    def program(x: Any) -> Any:
        return mb.mul(x=mb.add(x=x, y=SPECIAL), y=np.float32(3.3))

    kind = ct.precision.FLOAT16 if precision == "fp16" else ct.precision.FLOAT32
    return ct.convert(program, minimum_deployment_target=opset, compute_precision=kind), [{"x": X}]


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("target", ["iOS15", "iOS16", "iOS17", "iOS18", "iOS26"])
def test_numbers_survive_at_every_version(tmp_path: Path, target: str, precision: str) -> None:
    """Subnormal, infinite, negative zero and NaN, in both dialects of the text."""
    survives(*special_numbers(target, precision), tmp_path)


def control_flow(mb: Any) -> Any:
    def program(x: Any) -> Any:
        positive = mb.greater(x=mb.reduce_sum(x=x, axes=[0, 1], keep_dims=False), y=0.0)
        chosen = mb.cond(pred=positive, _true_fn=lambda: mb.add(x=x, y=1.0), _false_fn=lambda: mb.mul(x=x, y=2.0))
        less, body = lambda i, a: mb.less(x=i, y=4), lambda i, a: (mb.add(x=i, y=1), mb.mul(x=a, y=1.5))
        return mb.while_loop(_cond=less, _body=body, loop_vars=(0, chosen))[1]

    return program


def integers(mb: Any) -> Any:
    def program(x: Any) -> Any:
        picked = mb.gather(x=x, indices=np.array([2, 0, 1], np.uint16), axis=1)
        parts = [mb.cast(x=mb.cast(x=picked, dtype=d), dtype="fp32") for d in ("int8", "uint8", "int16", "uint16")]
        kept = mb.select(cond=np.array([[True, False, True]]), a=picked, b=mb.mul(x=picked, y=-1.0))
        return mb.concat(values=[*parts, kept, mb.cast(x=mb.greater(x=picked, y=0.0), dtype="fp32")], axis=1)

    return program


def names(mb: Any) -> Any:
    return lambda x: mb.relu(x=mb.add(x=x, y=np.float32(1), name='a "quo\\ted"\nname\twith é漢 and {braces}'), name="y")


def lists(mb: Any) -> Any:
    def program(x: Any) -> Any:
        ls = mb.list_write(ls=mb.make_list(init_length=2, elem_shape=(2, 6)), index=1, value=x)
        return mb.list_gather(ls=ls, indices=[0, 1])

    return program


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "control flow": control_flow,
    "integers and booleans": integers,
    "names that need escapes": names,
    "lists": lists,
}


@pytest.mark.parametrize("what", sorted(PROGRAMS))
def test_programs_survive(build_program: Callable[..., Any], tmp_path: Path, what: str) -> None:
    from coremltools.converters.mil import Builder as mb

    model = build_program(PROGRAMS[what](mb), {"x": (2, 6)})
    survives(model, [{"x": np.abs(X) * 10}, {"x": -X}], tmp_path)


@pytest.mark.parametrize("size", [9, 10, 11, 1000])
def test_constants_survive_in_the_text_and_in_the_weight_file(
    build_program: Callable[..., Any], tmp_path: Path, size: int
) -> None:
    """On both sides of coremltools' limit of ten elements, with five axes."""
    from coremltools.converters.mil import Builder as mb

    values = RNG.standard_normal((1, 1, size, 1, 1)).astype(np.float32)
    model = build_program(lambda x: mb.add(x=x, y=values), {"x": (1, 2, size, 1, 1)})
    survives(model, [{"x": np.ones((1, 2, size, 1, 1), np.float32)}], tmp_path)


def test_metadata_survives(build_program: Callable[..., Any], tmp_path: Path) -> None:
    """Free text with quotes, newlines and other alphabets, in the description and in metadata.json."""
    import json

    from coremltools.converters.mil import Builder as mb

    model = build_program(lambda x: mb.relu(x=x), {"x": (2, 6)})
    model.author, model.short_description, model.license, model.version = 'é "x"\n', "漢", "l\\", "1"
    model.user_defined_metadata['key "\n'] = "v\\漢"
    model.input_description["x"] = 'in "x"'
    survives(model, [{"x": X}], tmp_path)
    (entry,) = json.loads((tmp_path / "m.mlmodelc" / "metadata.json").read_text(encoding="utf-8"))
    assert (entry["author"], entry["userDefinedMetadata"]['key "\n']) == ('é "x"\n', "v\\漢")


def flexible(*shapes: Any) -> Case:
    """Inputs a, b, ... joined on axis 1, described by `shapes`."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import get_new_symbol

    specs = [mb.TensorSpec((1, get_new_symbol())) for _ in shapes]
    inputs = [ct.TensorType(name, shape) for name, shape in zip("ab", shapes, strict=False)]

    def one(a: Any) -> Any:
        return mb.relu(x=a)

    def two(a: Any, b: Any) -> Any:
        return mb.concat(values=[a, b], axis=1)

    program = mb.program(input_specs=specs, opset_version=ct.target.iOS18)(two if len(shapes) > 1 else one)
    model = ct.convert(program, inputs=inputs, minimum_deployment_target=ct.target.iOS18)
    sizes = [(2, 3), (5, 6)]
    return model, [{name: X[:1, :n] for name, n in zip("ab"[: len(shapes)], pair, strict=False)} for pair in sizes]


@pytest.mark.parametrize("kind", ["range", "enumerated", "two enumerated"])
def test_flexible_shapes_survive(tmp_path: Path, kind: str) -> None:
    import coremltools as ct

    listed = [ct.EnumeratedShapes([(1, 2), (1, 5)], default=(1, 5)), ct.EnumeratedShapes([(1, 3), (1, 6)])]
    shapes = {"range": [(1, ct.RangeDim(1, 8, 4))], "enumerated": listed[:1], "two enumerated": listed}[kind]
    survives(*flexible(*shapes), tmp_path)


@pytest.mark.parametrize("labels", [['a "b"', "c\n", "é"], [0, 1, 2]], ids=["text", "numbers"])
def test_classifiers_survive(tmp_path: Path, labels: list[Any]) -> None:
    """A class label, and a dictionary of probabilities."""
    import coremltools as ct
    import torch

    class Mean(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.softmax(x.mean((2, 3)), 1)

    example = torch.from_numpy(RNG.random((1, 3, 4, 4), np.float32))
    model = ct.convert(
        torch.jit.trace(Mean().eval(), example),
        inputs=[ct.TensorType("x", (1, 3, 4, 4))],
        classifier_config=ct.ClassifierConfig(labels),
    )
    survives(model, [{"x": example.numpy()}], tmp_path)
    label = model.predict({"x": example.numpy()})["classLabel"]
    assert label == labels[int(example.mean((2, 3)).argmax())]


def test_images_survive(tmp_path: Path) -> None:
    """An RGB image in, a BGR image out, and a default for an optional input."""
    import coremltools as ct
    import torch

    image = pytest.importorskip("PIL.Image")

    class Half(torch.nn.Module):
        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return x * factor

    model = ct.convert(
        torch.jit.trace(Half().eval(), (torch.rand(1, 3, 4, 6), torch.rand(1))),
        inputs=[
            ct.ImageType("x", (1, 3, 4, 6), scale=0.5),
            ct.TensorType("factor", (1,), default_value=np.full(1, 0.5, np.float32)),
        ],
        outputs=[ct.ImageType("y", color_layout=ct.colorlayout.BGR)],
        minimum_deployment_target=ct.target.iOS16,
    )
    picture = image.fromarray((RNG.random((4, 6, 3)) * 255).astype(np.uint8))
    survives(model, [{"x": picture}, {"x": picture, "factor": np.ones(1, np.float32)}], tmp_path)


def test_a_program_is_read_once_until_its_file_changes(attention_package: Path, tmp_path: Path) -> None:
    """Of a package and of a bundle; what is in the file counts, not when it was written."""
    from coremltools.proto import Model_pb2

    package = Path(shutil.copytree(attention_package, tmp_path / "m.mlpackage"))
    bundle = compile_model(package, tmp_path / "m.mlmodelc")
    before = {path: load_model(path).program for path in (package, bundle)}
    assert [load_model(path).program is program for path, program in before.items()] == [True, True]
    file, text = next(package.rglob("*.mlmodel")), bundle / "model.mil"
    spec = Model_pb2.Model.FromString(file.read_bytes())
    function = spec.mlProgram.functions["main"]
    function.block_specializations[function.opset].operations[0].outputs[0].name += "_"
    file.write_bytes(spec.SerializeToString())
    text.write_text(text.read_text().replace("write", "wrote"))
    for path, program in before.items():
        assert next(differences(program, load_model(path).program), None) is not None
