"""Large matrices stay in their file: which ones, that predictions are the same, and that memory shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import coremltools as ct
import limits
import numpy as np
import portable_coreml
import pytest
import torch
from portable_coreml.files.bundle import compile_model
from portable_coreml.run import fixed_point, fp16_weights, lower, plan, products, stored
from portable_coreml.run.lowered import Const
from portable_coreml.run.stored import StoredMatrix

OUT, IN = 24, 16
Build = Callable[..., Any]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """With several threads torch adds up a small convolution in another order than a product."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix counts as large."""
    monkeypatch.setattr(stored, "LARGE", 1)


def quantised(shape: tuple[int, ...], axis: int) -> dict[str, np.ndarray]:
    """data and scale of constexpr_blockwise_shift_scale, one scale per index of `axis`."""
    rng = np.random.default_rng(0)
    scales = tuple(size if i == axis else 1 for i, size in enumerate(shape))
    data = rng.integers(-127, 128, shape).astype(np.int8)
    return {"data": data, "scale": (rng.random(scales) * 0.01 + 0.001).astype(np.float16)}


def conv(x: Any, mb: Any, **options: Any) -> Any:
    """A 1x1 convolution by int8 weights."""
    weight = mb.constexpr_blockwise_shift_scale(**quantised((OUT, IN, 1, 1), 0))
    return mb.conv(x=x, weight=weight, bias=np.arange(OUT, dtype=np.float16), **options)


def linear(x: Any, mb: Any) -> Any:
    weight = mb.constexpr_blockwise_shift_scale(**quantised((OUT, IN), 0))
    return mb.linear(x=x, weight=weight, bias=np.arange(OUT, dtype=np.float16))


def matmul_out_first(x: Any, mb: Any) -> Any:
    return mb.matmul(x=x, y=mb.constexpr_blockwise_shift_scale(**quantised((OUT, IN), 0)), transpose_y=True)


def matmul_in_first(x: Any, mb: Any) -> Any:
    return mb.matmul(x=x, y=mb.constexpr_blockwise_shift_scale(**quantised((IN, OUT), 1)))


def affine(x: Any, mb: Any) -> Any:
    """iOS16's operation, a zero point of zeros."""
    known = quantised((OUT, IN, 1, 1), 0)
    weight = mb.constexpr_affine_dequantize(
        quantized_data=known["data"], zero_point=np.zeros(OUT, np.int8), scale=known["scale"].reshape(-1), axis=0
    )
    return mb.conv(x=x, weight=weight)


def int4(x: Any, mb: Any) -> Any:
    """Packed two to a byte in the file."""
    from coremltools.converters.mil.mil import types

    known = quantised((OUT, IN, 1, 1), 0)
    data = (known["data"] // 16).astype(types.nptype_from_builtin(types.int4))
    return mb.conv(x=x, weight=mb.constexpr_blockwise_shift_scale(data=data, scale=known["scale"]))


def palette(x: Any, mb: Any, shape: tuple[int, ...] = (3, 1, 1, 1, 64, 1), bits: int = 6) -> Any:
    """A table of 64 numbers for every eight output channels."""
    from coremltools.converters.mil.mil import types

    rng = np.random.default_rng(3)
    dtype = types.nptype_from_builtin(types.string_to_builtin(f"uint{bits}"))
    indices = rng.integers(0, 2**bits, (OUT, IN, 1, 1)).astype(dtype)
    lut = rng.standard_normal(shape).astype(np.float16)
    return mb.conv(x=x, weight=mb.constexpr_lut_to_dense(indices=indices, lut=lut))


def palette_of_one_table(x: Any, mb: Any) -> Any:
    return palette(x, mb, (1, 1, 1, 1, 16, 1), 4)


def palette_across(x: Any, mb: Any) -> Any:
    """Tables for columns are no tables for rows."""
    return palette(x, mb, (1, 2, 1, 1, 256, 1), 8)


def fp16(x: Any, mb: Any) -> Any:
    return mb.conv(x=x, weight=np.random.default_rng(1).standard_normal((OUT, IN, 1, 1)).astype(np.float16))


def wrong_axis(x: Any, mb: Any) -> Any:
    """A scale per input channel is no factor of a row."""
    return mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(**quantised((OUT, IN), 1)))


def shifted(x: Any, mb: Any) -> Any:
    known = quantised((OUT, IN), 0)
    offset = np.ones((OUT, 1), np.int8)
    return mb.linear(x=x, weight=mb.constexpr_blockwise_shift_scale(**known, offset=offset))


def added(x: Any, mb: Any) -> Any:
    """Something else asks for the whole."""
    weight = mb.constexpr_blockwise_shift_scale(**quantised((IN, IN), 0))
    return mb.add(x=mb.linear(x=x, weight=weight), y=mb.reduce_sum(x=weight, axes=[0], keep_dims=True))


IMAGE, ROWS = (1, IN, 3, 2), (2, 3, IN)
STAY = {
    "conv": (conv, IMAGE),
    "affine": (affine, IMAGE),
    "fp16": (fp16, IMAGE),
    "int4": (int4, IMAGE),
    "palette in groups": (palette, IMAGE),
    "palette": (palette_of_one_table, IMAGE),
    "linear": (linear, ROWS),
    "matmul, transposed": (matmul_out_first, ROWS),
    "matmul": (matmul_in_first, ROWS),
    "beside another use": (added, ROWS),
}
EXPANDED = {
    "strides": (lambda x, mb: conv(x, mb, strides=[2, 1]), IMAGE),
    "padding": (lambda x, mb: conv(x, mb, pad_type="custom", pad=[1, 0, 0, 0]), IMAGE),
    "groups": (lambda x, mb: conv(x, mb, groups=2), (1, 2 * IN, 3, 2)),
    "scale of another axis": (wrong_axis, ROWS),
    "zero point": (shifted, ROWS),
    "palette in groups of columns": (palette_across, IMAGE),
}


def built(build_program: Build, program: Callable[..., Any], shape: tuple[int, ...], path: Path) -> Path:
    """A package of the program in fp16."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    target = ct.target.iOS16 if program is affine else ct.target.iOS18
    spec = mb.TensorSpec(shape=shape, dtype=types.fp16)
    made = mb.program(input_specs=[spec], opset_version=target)(lambda x: program(x, mb))
    ct.convert(made, convert_to="mlprogram", minimum_deployment_target=target, skip_model_load=True).save(str(path))
    return path


def loaded(path: Path, precision: str) -> Any:
    import coremltools as ct

    portable_coreml.install(precision)
    load = ct.models.CompiledMLModel if path.suffix == ".mlmodelc" else ct.models.MLModel
    return load(str(path))


class Mapped:
    """A stand-in for a file that an array is mapped from, and the place in it."""

    def __init__(self, given: list[int]) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter((lambda: self, 0, 4096))

    def madvise(self, advice: int, first: int, size: int) -> None:
        self.given.append(size)


def stored_matrices(model: Any) -> list[StoredMatrix]:
    """The matrices that a loaded package computes with as they are stored."""
    args = [arg for step in model.__proxy__._executable.lowered.steps for arg in step.args]
    return [arg.value for arg in args if isinstance(arg, Const) and isinstance(arg.value, StoredMatrix)]


def run(model: Any, shape: tuple[int, ...]) -> np.ndarray:
    x = np.random.default_rng(2).standard_normal(shape).astype(np.float16).astype(np.float32)
    out = [next(iter(model.predict({"x": x}).values())) for _ in range(2)]
    np.testing.assert_array_equal(out[0], out[1])  # the first run is interpreted, the second one compiled
    return np.asarray(out[0], np.float32)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", [*STAY, *EXPANDED])
def test_predictions_are_those_of_the_expanded_weights(
    build_program: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    """To rounding; from a bundle exactly as from a package; and what can stay in its file does."""
    program, shape = {**STAY, **EXPANDED}[name]
    package = built(build_program, program, shape, tmp_path / "m.mlpackage")
    dense = loaded(package, precision)
    assert not stored_matrices(dense)
    monkeypatch.setattr(stored, "LARGE", 1)
    model = loaded(package, precision)
    assert len(stored_matrices(model)) == (name in STAY)
    found, expected = run(model, shape), run(dense, shape)
    # fp16 mode sums in fp32 and rounds what comes out: the sum may fall to either side of one rounding.
    limit = limits.sums("fp32", max(shape)) if precision == "fp32" else limits.roundings("fp16")
    limits.numbers_agree(f"{name} in {precision}", found, expected, limit)
    bundle = compile_model(package, tmp_path / "m.mlmodelc")
    np.testing.assert_array_equal(run(loaded(bundle, precision), shape), found)


def test_a_stored_matrix_is_the_file_itself(small: None, build_program: Build, tmp_path: Path) -> None:
    """Mapped, not read: loading a model of gigabytes takes no memory, and processes share it."""
    package = built(build_program, linear, ROWS, tmp_path / "m.mlpackage")
    model = loaded(package, "fp32")
    (matrix,) = stored_matrices(model)
    place = matrix.values.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= place < last:
            assert line.endswith("weight.bin")
            return
    pytest.fail("nothing is mapped there")


def test_a_weight_of_two_products_is_held_once(build_program: Build, tmp_path: Path) -> None:
    """Though it is rearranged for them."""

    def twice(x: Any, mb: Any) -> Any:
        weight = mb.constexpr_blockwise_shift_scale(**quantised((IN, IN, 1, 1), 0))
        return mb.conv(x=mb.conv(x=x, weight=weight), weight=weight)

    model = loaded(built(build_program, twice, IMAGE, tmp_path / "m.mlpackage"), "fp32")
    steps = model.__proxy__._executable.lowered.steps
    constants = (arg.value for step in steps for arg in step.args if isinstance(arg, Const))
    first, second = (value for value in constants if isinstance(value, torch.Tensor) and value.dim() > 1)
    assert first.shape == second.shape == (IN, IN, 1, 1)
    assert first.data_ptr() == second.data_ptr()


def matrices(model: Any) -> list[torch.Tensor]:
    """Return the matrices that a model has expanded, in order."""
    constants = (getattr(arg, "value", None) for step in model.__proxy__._executable.lowered.steps for arg in step.args)
    return [value for value in constants if isinstance(value, torch.Tensor) and value.dim() > 1]


@pytest.mark.parametrize("compressed", [True, False])
def test_functions_of_one_program_share_what_they_expand(
    compressed: bool, build_program: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has one for each width of a pass, and their weights would be in memory as many times."""
    monkeypatch.setattr(stored, "LARGE_WITH_KERNEL", stored.LARGE)

    def half(x: Any, mb: Any) -> Any:
        weight = np.random.default_rng(1).standard_normal((OUT, IN, 1, 1)).astype(np.float16)
        return mb.cast(x=mb.conv(x=mb.cast(x=x, dtype="fp16"), weight=weight), dtype="fp32")

    program, descriptor = conv if compressed else half, ct.utils.MultiFunctionDescriptor()
    for i, name in enumerate(("one", "four")):
        package = built(build_program, program, (1, IN, 1 + 3 * i, 1), tmp_path / f"{name}.mlpackage")
        descriptor.add_function(str(package), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "one"
    both = tmp_path / "both.mlpackage"
    ct.utils.save_multifunction(descriptor, str(both))
    one, four = (ct.models.MLModel(str(both), function_name=name) for name in ("one", "four"))
    ((mine,), (theirs,), (alone,)) = matrices(one), matrices(four), matrices(loaded(package, "fp32"))
    assert mine.data_ptr() == theirs.data_ptr() != alone.data_ptr()
    assert torch.equal(mine, alone)
    x = np.random.default_rng(2).standard_normal((1, IN, 4, 1)).astype(np.float32)
    (expected,), (found,) = (model.predict({"x": x}).values() for model in (loaded(package, "fp32"), four))
    np.testing.assert_array_equal(found, expected)
    if compressed:  # rounded, in fp16 mode
        portable_coreml.install("fp16")
        ((rounded,),) = (matrices(ct.models.MLModel(str(both), function_name="one")),)
        assert rounded.data_ptr() != mine.data_ptr()


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_smaller_integer_matrices_stay_if_there_is_a_kernel_for_them(
    precision: str, fast: bool, build_program: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without one they are multiplied faster in float32."""
    monkeypatch.setattr(stored, "LARGE_WITH_KERNEL", OUT * IN)
    monkeypatch.setattr(lower, "multiplies_in_fixed_point", lambda: fast and precision == "fp32")
    monkeypatch.setattr(lower, "fp16_copies_are_right", lambda: fast and precision == "fp16")
    model = loaded(built(build_program, linear, ROWS, tmp_path / "m.mlpackage"), precision)
    assert len(stored_matrices(model)) == fast
    monkeypatch.setattr(stored, "LARGE_WITH_KERNEL", OUT * IN + 1)
    assert not stored_matrices(loaded(tmp_path / "m.mlpackage", precision))


def test_products_of_the_same_rows_share_their_fixed_point_form(
    build_program: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making it takes as long as a product with a small matrix."""
    monkeypatch.setattr(stored, "LARGE_WITH_KERNEL", 1)
    monkeypatch.setattr(lower, "multiplies_in_fixed_point", lambda: True)
    monkeypatch.setattr(products, "takes_so_many", lambda count: True)

    def three(x: Any, mb: Any) -> Any:
        other = quantised((OUT, IN, 1, 1), 0)
        other["scale"] = other["scale"] * np.float16(2)  # two equal products would become one
        first = mb.add(x=conv(x, mb), y=mb.conv(x=x, weight=mb.constexpr_blockwise_shift_scale(**other)))
        weight = mb.constexpr_blockwise_shift_scale(**quantised((OUT, OUT, 1, 1), 0))
        return mb.conv(x=first, weight=weight)

    model = loaded(built(build_program, three, IMAGE, tmp_path / "m.mlpackage"), "fp32")
    assert len(stored_matrices(model)) == 3
    made, plain = list[int](), plan.to_fixed_point
    monkeypatch.setattr(plan, "to_fixed_point", lambda rows: made.append(rows.shape[1]) or plain(rows))
    x = np.random.default_rng(2).standard_normal(IMAGE).astype(np.float32)
    (first,), (second,) = (list(model.predict({"x": x}).values()) for _ in range(2))
    assert made == [IN, OUT], "the first run plans; the second makes each form once"
    np.testing.assert_array_equal(first, second)
    x[0, 0] = np.inf
    (found,) = model.predict({"x": x}).values()
    assert not np.isfinite(found).all()


def test_a_packed_copy_takes_the_place_of_the_mapped_matrix(
    build_program: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in functions with weights of their own mapping; a program would take twice its memory."""
    if not fixed_point.fbgemm_bits():
        pytest.skip("this processor has no FBGEMM")
    monkeypatch.setattr(fixed_point, "packs", lambda: True)
    monkeypatch.setattr(products, "takes_so_many", lambda count: count == 1)
    monkeypatch.setattr(lower, "multiplies_in_fixed_point", lambda: True)
    size = 1024

    def large(x: Any, mb: Any) -> Any:
        return mb.conv(x=x, weight=mb.constexpr_blockwise_shift_scale(**quantised((size, size, 1, 1), 0)))

    package = built(build_program, large, (1, size, 1, 1), tmp_path / "m.mlpackage")
    one, other = (loaded(package, "fp32") for _ in range(2))
    (mine,), (theirs,) = (stored_matrices(model) for model in (one, other))
    assert mine.packed is theirs.packed
    given: list[int] = []
    monkeypatch.setattr(mine.packed, "_mapped", [Mapped(given) for _ in mine.packed._mapped])
    x = np.random.default_rng(2).standard_normal((1, size, 1, 1)).astype(np.float32)
    for _ in range(fixed_point.EARNED + 1):
        assert not given
        (expected,) = one.predict({"x": x}).values()
    assert len(given) == 2, "one for each mapping"
    (found,) = other.predict({"x": x}).values()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("stored_as", "precision"), [("int8", "fp16"), ("fp16", "fp32")])
def test_functions_share_a_copy_in_fp16_too(
    stored_as: str, precision: str, build_program: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fixed program has a function for each width, and each copy takes two bytes a weight."""
    if not fp16_weights.fp16_copies_are_right():
        pytest.skip("this processor has no FBGEMM")
    monkeypatch.setattr(stored, "LARGE", 1 << 20)
    size = 1024

    def large(x: Any, mb: Any) -> Any:
        if stored_as == "int8":
            return mb.conv(x=x, weight=mb.constexpr_blockwise_shift_scale(**quantised((size, size, 1, 1), 0)))
        weight = np.random.default_rng(1).standard_normal((size, size, 1, 1)).astype(np.float16)
        return mb.cast(x=mb.conv(x=mb.cast(x=x, dtype="fp16"), weight=weight), dtype="fp32")

    package = built(build_program, large, (1, size, 1, 1), tmp_path / "m.mlpackage")
    one, other = (loaded(package, precision) for _ in range(2))
    (mine,), (theirs,) = (stored_matrices(model) for model in (one, other))
    assert mine.packed is theirs.packed
    given: list[int] = []
    monkeypatch.setattr(mine.packed, "_mapped", [Mapped(given) for _ in mine.packed._mapped])
    x = np.random.default_rng(2).standard_normal((1, size, 1, 1)).astype(np.float32)
    (expected,), (found,) = (model.predict({"x": x}).values() for model in (one, other))
    assert mine.packed.pieces and len(given) == 2, "one for each mapping"
    np.testing.assert_array_equal(found, expected)


def test_small_matrices_are_expanded(build_program: Build, tmp_path: Path) -> None:
    """They are multiplied faster in float32."""
    package = built(build_program, linear, ROWS, tmp_path / "m.mlpackage")
    assert not stored_matrices(loaded(package, "fp32"))
    assert stored.LARGE > 1_000_000
