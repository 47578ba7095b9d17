"""The compiler: byte for byte against Apple's bundles where they are at hand, and the same predictions everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import limits
import numpy as np
import pytest
from portable_coreml.errors import ProgramError
from portable_coreml.files.bundle import compile_model, core_data, load_model, read_core_data
from portable_coreml.files.write_text import write_text

from tests.conftest import GOLDENS, step_inputs
from tests.same import differences

PAIRS = sorted(GOLDENS.glob("*.mlpackage"))
needs_goldens = pytest.mark.skipif(
    not PAIRS, reason=f"no Apple-compiled bundles at {GOLDENS.name}: they are not part of this repository"
)


def without_build_info(text: str) -> str:
    return re.sub(r"^\[buildInfo = .*\]$", "", text, count=1, flags=re.MULTILINE)


@needs_goldens
@pytest.mark.parametrize("package", PAIRS, ids=lambda p: p.stem)
def test_bundles_are_apples(package: Path, tmp_path: Path) -> None:
    """model.mil but for buildInfo, weights, analytics: identical. coremldata.bin: equal up to the order of map
    entries.
    """
    theirs, ours = package.with_suffix(".mlmodelc"), compile_model(package, tmp_path / "ours.mlmodelc")
    assert without_build_info((ours / "model.mil").read_text()) == without_build_info(
        (theirs / "model.mil").read_text()
    )
    for name in ("weights/weight.bin", "analytics/coremldata.bin"):
        assert (ours / name).read_bytes() == (theirs / name).read_bytes()
    mine, other = (ours / "coremldata.bin").read_bytes(), (theirs / "coremldata.bin").read_bytes()
    assert mine[:0x53] == other[:0x53] and mine[-16:] == other[-16:] and len(mine) == len(other)
    assert read_core_data(ours / "coremldata.bin") == read_core_data(theirs / "coremldata.bin")
    summaries = [json.loads((b / "metadata.json").read_text())[0] for b in (ours, theirs)]
    for summary in summaries:
        del summary["generatedClassName"]
    assert summaries[0] == summaries[1]


@needs_goldens
@pytest.mark.parametrize("package", PAIRS, ids=lambda p: p.stem)
def test_package_and_apples_bundle_predict_the_same(package: Path) -> None:
    """Random inputs through the protobuf and through Apple's text: identical outputs."""
    import coremltools as ct

    source, bundle = ct.models.MLModel(str(package)), ct.models.CompiledMLModel(str(package.with_suffix(".mlmodelc")))
    rng = np.random.default_rng(0)
    data = {
        f.name: rng.standard_normal(list(f.type.multiArrayType.shape)).astype(np.float32)
        for f in source.get_spec().description.input
    }
    mine, theirs = source.predict(dict(data)), bundle.predict(dict(data))
    assert mine and all(np.array_equal(mine[name], theirs[name]) for name in mine)


@needs_goldens
def test_a_bundle_without_its_package_is_read_and_written_back() -> None:
    """coremlc 3402's text of a program without weights comes back, but for the newline that it ends with."""
    path = GOLDENS / "add_model.mlmodelc"
    model = load_model(path)
    text = (path / "model.mil").read_text()
    assert without_build_info(write_text(model.program, model.spec_version, {})) == without_build_info(text).rstrip(
        "\n"
    )


def test_a_stateful_flexible_program_predicts_the_same_once_compiled(attention_package: Path, tmp_path: Path) -> None:
    """compile_model through coremltools' own function: outputs and states are those of the package for every T."""
    import coremltools as ct
    from coremltools.models.utils import compile_model as compile_through_coremltools

    bundle_path = compile_through_coremltools(str(attention_package), str(tmp_path / "attention.mlmodelc"))
    package, bundle = ct.models.MLModel(str(attention_package)), ct.models.CompiledMLModel(bundle_path)
    one, two = package.make_state(), bundle.make_state()
    for first, width in ((0, 1), (1, 4), (5, 2)):
        step = step_inputs(32, 8, first, width, first)
        np.testing.assert_array_equal(
            package.predict(dict(step), one)["hidden"], bundle.predict(dict(step), two)["hidden"]
        )
    np.testing.assert_array_equal(one.read_state("cache_k"), two.read_state("cache_k"))


COMPRESSIONS = (
    "int8 per channel",
    "int8 affine",
    "int4 per block",
    "lut 4",
    "lut grouped",
    "lut of int8",
    "sparse",
    "sparse int8",
    "sparse lut",
)


def compress(model: Any, how: str) -> Any:
    """A compressed copy of a model with one convolution."""
    import coremltools.optimize.coreml as cto

    def linear(**options: Any) -> Any:
        return cto.OptimizationConfig(cto.OpLinearQuantizerConfig(weight_threshold=0, **options))

    def palette(**options: Any) -> Any:
        return cto.OptimizationConfig(cto.OpPalettizerConfig(mode="uniform", weight_threshold=0, **options))

    if how == "int8 per channel":
        return cto.linear_quantize_weights(model, linear(mode="linear_symmetric", granularity="per_channel"))
    if how == "int8 affine":
        return cto.linear_quantize_weights(model, linear(mode="linear", granularity="per_tensor"))
    if how == "int4 per block":
        return cto.linear_quantize_weights(model, linear(dtype="int4", granularity="per_block", block_size=8))
    if how == "lut 4":
        return cto.palettize_weights(model, palette(nbits=4))
    if how == "lut grouped":
        return cto.palettize_weights(model, palette(nbits=2, granularity="per_grouped_channel", group_size=4))
    if how == "lut of int8":
        small = cto.palettize_weights(model, palette(nbits=4))
        settings = linear(mode="linear_symmetric", granularity="per_tensor")
        return cto.linear_quantize_weights(small, settings, joint_compression=True)
    pruned = cto.prune_weights(
        model, cto.OptimizationConfig(cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=0))
    )
    if how == "sparse":
        return pruned
    if how == "sparse lut":
        return cto.palettize_weights(pruned, palette(nbits=4), joint_compression=True)
    return cto.linear_quantize_weights(pruned, linear(mode="linear_symmetric"), joint_compression=True)


@pytest.mark.parametrize("how", COMPRESSIONS)
def test_compressed_weights_are_coremltools_own(build_program: Callable[..., Any], tmp_path: Path, how: str) -> None:
    """Every compression: package and bundle give what the weights are that coremltools itself decompresses to."""
    import coremltools as ct
    import coremltools.optimize.coreml as cto
    from coremltools.converters.mil import Builder as mb

    weight = np.random.default_rng(0).standard_normal((16, 32, 1, 1)).astype(np.float32)
    model = build_program(
        lambda x: mb.conv(x=x, weight=weight), {"x": (1, 32, 2, 1)}, minimum_deployment_target=ct.target.iOS18
    )
    small = compress(model, how)
    dense = cto.decompress_weights(small)
    package, bundle = tmp_path / "m.mlpackage", tmp_path / "m.mlmodelc"
    small.save(str(package))
    compile_model(package, bundle)
    assert list(differences(load_model(package).program, load_model(bundle).program)) == []
    x = np.random.default_rng(1).standard_normal((1, 32, 2, 1)).astype(np.float32)
    runs = [m.predict({"x": x}) for m in (dense, small, ct.models.CompiledMLModel(str(bundle)))]
    first, second, third = (next(iter(run.values())) for run in runs)
    limits.numbers_agree("compressed weights", second, first, limits.sums("fp32", 32))
    np.testing.assert_array_equal(second, third)
    assert np.abs(second).max() > 0.1


def test_multifunction_bundles_keep_every_function(build_program: Callable[..., Any], tmp_path: Path) -> None:
    """Each function predicts by name; the default one without; one trailer record each in coremldata.bin."""
    import coremltools as ct
    from coremltools.converters.mil import Builder as mb

    def scaled(factor: float) -> Callable[[Any], Any]:
        return lambda x: mb.mul(x=x, y=factor)

    descriptor = ct.utils.MultiFunctionDescriptor()
    for name, factor in (("twice", 2.0), ("thrice", 3.0)):
        path = tmp_path / f"{name}.mlpackage"
        model = build_program(scaled(factor), {"x": (1, 4)}, minimum_deployment_target=ct.target.iOS18)
        model.save(str(path))
        descriptor.add_function(str(path), src_function_name="main", target_function_name=name)
    descriptor.default_function_name = "thrice"
    ct.utils.save_multifunction(descriptor, str(tmp_path / "both.mlpackage"))
    bundle = compile_model(tmp_path / "both.mlpackage", tmp_path / "both.mlmodelc")
    x = np.ones((1, 4), np.float32)
    for name, factor in (("twice", 2.0), ("thrice", 3.0), (None, 3.0)):
        out = ct.models.CompiledMLModel(str(bundle), function_name=name).predict({"x": x})
        np.testing.assert_array_equal(next(iter(out.values())), x * factor)
    assert (bundle / "coremldata.bin").read_bytes().count(core_data(load_model(bundle))[-16:]) >= 2


def test_compiling_is_deterministic(attention_package: Path, tmp_path: Path) -> None:
    """Two compilations of one package give the same bytes."""
    first, second = (compile_model(attention_package, tmp_path / n / "m.mlmodelc") for n in ("a", "b"))
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert len(names) == 5
    assert all((first / n).read_bytes() == (second / n).read_bytes() for n in names)


def test_damaged_packages_are_refused(attention_package: Path, tmp_path: Path) -> None:
    """No manifest, a truncated specification, a missing weight file, a manifest that leaves the package."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(attention_package, tmp_path / f"{name}.mlpackage"))

    bare = copy("bare")
    (bare / "Manifest.json").unlink()
    cut = copy("cut")
    spec = next(cut.rglob("*.mlmodel"))
    spec.write_bytes(spec.read_bytes()[:-100])
    weightless = copy("weightless")
    next(weightless.rglob("weight.bin")).unlink()
    outside = copy("outside")
    manifest = (outside / "Manifest.json").read_text()
    (outside / "Manifest.json").write_text(manifest.replace("com.apple.CoreML/model.mlmodel", "../../other.mlmodel"))
    for package in (bare, cut, weightless, outside):
        with pytest.raises(ProgramError, match=package.stem):
            compile_model(package, tmp_path / f"{package.stem}.mlmodelc")


@pytest.mark.thorough
def test_compiling_leaves_no_folder_behind(attention_package: Path, tmp_path: Path) -> None:
    """coremltools moves the bundle out of the temporary folder that it was made in."""
    code = (
        "import sys, portable_coreml; portable_coreml.install(); import coremltools as ct; "
        "ct.models.utils.compile_model(sys.argv[1], sys.argv[2]); ct.models.utils.compile_model(sys.argv[1])"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    command = [sys.executable, "-c", code, str(attention_package), str(tmp_path / "m.mlmodelc")]
    subprocess.run(command, env=os.environ | {"TMPDIR": str(folder)}, check=True, capture_output=True)
    assert (tmp_path / "m.mlmodelc" / "model.mil").is_file()
    (kept,) = folder.glob("mlmodelc_*")  # of the call that asked for no place of its own
    assert [path.suffix for path in kept.iterdir()] == [".mlmodelc"]
