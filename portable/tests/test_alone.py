"""The distributions on their own: the wheels, installed where nothing else of this repository can be imported, run,
compile and lint a package.
"""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import venv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import portable_coreml
import pytest
from portable_coreml.files.compare import read_contents
from portable_coreml.proxy import MLModelProxy

from tests.conftest import GOLDENS, step_inputs

PROJECT = Path(__file__).resolve().parents[1]
APPLES = GOLDENS / "unified_int8.mlpackage"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def dependencies() -> list[str]:
    """The folders that hold the installed dependencies; none of them holds shardmill itself, only links to it do."""
    return [path for path in (*site.getsitepackages(), site.getusersitepackages()) if Path(path).is_dir()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program of a fresh environment that has both wheels, the dependencies, and no other code of ours."""
    folder = tmp_path_factory.mktemp("alone")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder)]
    build += ["--no-build-isolation"] if find_spec("hatchling") else []
    subprocess.run([*build, str(PROJECT), str(PROJECT / "extra")], check=True, cwd=folder, env=bare())
    venv.create(folder / "env", with_pip=False)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    # Paths from the end of a .pth file: folders are added as they are, and the .pth files in them are not followed,
    # by which an editable install of this repository would come in.
    (packages / "dependencies.pth").write_text("\n".join(dependencies()) + "\n")
    wheels = [str(wheel) for wheel in folder.glob("portable_coreml*.whl")]
    install = [sys.executable, "-m", "pip", "--python", str(folder / "env" / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*install, "--no-deps", "--no-index", *wheels], check=True, cwd=folder, env=bare())

    def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(folder / "env" / "bin" / program), *(str(argument) for argument in arguments)]
        return subprocess.run(command, check=False, cwd=folder, env=bare(), capture_output=True, text=True)

    return run


def bare() -> dict[str, str]:
    """The environment without what makes this repository importable."""
    return {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@pytest.fixture(params=["of Apple's compiler", "converted here"])
def package(request: pytest.FixtureRequest, attention_package: Path) -> Path:
    """A package that Apple's tools have made, and one that was converted in these tests."""
    if request.param == "converted here":
        return attention_package
    if not APPLES.is_dir():
        pytest.skip(f"no {APPLES.name} in {GOLDENS}: bundles of Apple's compiler are not part of this repository")
    return APPLES


def inputs_of(package: Path) -> dict[str, np.ndarray]:
    """Random numbers for the inputs of either package."""
    if package != APPLES:
        return step_inputs(32, 8, 0, 2, 0)
    shapes = {item.name: json.loads(item.shape) for item in read_contents(package).functions[0].inputs}
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.thorough
def test_the_command_is_there_and_nothing_else_of_ours(alone: Run) -> None:
    """Or the test below would prove nothing."""
    assert alone("portable-coreml", "--version").stdout == f"portable-coreml {portable_coreml.__version__}\n"
    code = "import importlib.util as u; print(u.find_spec('shardmill'), u.find_spec('portable_coreml').origin)"
    found = alone("python", "-c", code).stdout.split()
    assert found[0] == "None"
    assert "site-packages" in found[1] and not Path(found[1]).is_relative_to(PROJECT)


PROGRAM = """if True:
    import contextlib, io, json, sys
    import numpy as np, portable_coreml
    from portable_coreml.cli import main
    package, inputs, folder = sys.argv[1:]
    bundle = folder + "/m.mlmodelc"

    def command(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main(arguments)
        return code, out.getvalue()

    report = {"compile": command("compile", package, bundle)[0], "names": []}
    for kind, model in (("package", package), ("bundle", bundle)):
        code, text = command("run", model, inputs, "--out", folder + "/" + kind + ".npz")
        assert code == 0, text
        report["names"].append(sorted(line.split(":")[0] for line in text.splitlines()))
    report["lint"], text = command("lint", bundle, "--json")
    report["errors"] = sum(row["severity"] == "error" for row in json.loads(text))

    assert portable_coreml.install()  # as in the README
    import coremltools as ct

    again = ct.models.utils.compile_model(package, folder + "/again.mlmodelc")
    found = ct.models.CompiledMLModel(again).predict(dict(np.load(inputs)))
    expected = np.load(folder + "/package.npz")
    report["same"] = all(np.array_equal(found[name], expected[name]) for name in expected.files)
    plan = ct.models.compute_plan.MLComputePlan.load_from_path(again)
    report["operations"] = len(plan.model_structure.program.functions["main"].block.operations)
    report["extra"] = "portable_coreml_extra" in sys.modules
    report["foreign"] = sorted(name for name in sys.modules if name.startswith("shardmill"))
    print(json.dumps(report))
"""


@pytest.mark.thorough
def test_it_runs_compiles_and_lints(alone: Run, package: Path, tmp_path: Path) -> None:
    """By its own commands and by coremltools' API; the predictions are those of this process."""
    inputs = inputs_of(package)
    np.savez(tmp_path / "inputs.npz", **inputs)
    done = alone("python", "-c", PROGRAM, package, tmp_path / "inputs.npz", tmp_path)
    assert done.returncode == 0, done.stderr
    report, expected = json.loads(done.stdout), MLModelProxy(str(package)).predict(inputs)
    assert (report["compile"], report["same"], report["foreign"]) == (0, True, [])
    assert report["names"] == [sorted(expected)] * 2 and report["operations"] > 10
    assert (report["lint"], report["errors"] > 0) == ((1, True) if package == APPLES else (0, False))
    assert report["extra"] == (package == APPLES)  # which has an lstm
    for kind in ("package", "bundle"):
        with np.load(tmp_path / f"{kind}.npz") as found:
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value)
